"""The logits of a token have the same bits in every pass that OpenVINO runs.

The reference serves each sequence alone: the whole prompt in one pass, then one token a pass. It is
compared with random batches, chunks, drafts, cached prefixes, preemptions and cancels. Bits are
compared, not tokens: texts differ only at near-ties, logits wherever a sum is in another order.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import random_adapters, shapes_of
from local_models import VOCAB_SIZE, check_cache
from quantised_files import gptq_settings, gptq_tensors
from transformers import (
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import (
    Event,
    Prefill,
    SequenceStart,
    TargetCapabilities,
    Verify,
    Work,
)
from smartspec_py.engines.checkpoints.quantized import QuantizedTensors
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.runtimes.runner import RunnerConfig, bytes_per_token

pytestmark = pytest.mark.slow  # so that they run beside the others

MAX_LEN, MAX_SEQUENCES, MAX_DRAFT_LEN, NUM_TOKENS = 640, 5, 16, 20
GREEDY = SamplingParams()
DTYPES = (torch.float32, torch.bfloat16)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 1152,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3, heads of 64": Qwen3Config(**SIZES, head_dim=64),
    "mistral, window 50": MistralConfig(**SIZES, sliding_window=50),
    "gemma4, window 50": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=32,
        global_head_dim=64,
        sliding_window=50,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=64,
        use_double_wide_mlp=True,
    ),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "qwen2": Qwen2Config(**SIZES),  # the only one with biases
    "wide": LlamaConfig(**SIZES | {"intermediate_size": 4864}),
    "experts": Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=16, num_experts_per_tok=3, moe_intermediate_size=256
    ),
    "gpt-oss, window 50": GptOssConfig(
        **SIZES | {"intermediate_size": 256},
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=50,
        max_position_embeddings=2048,
    ),
    "recurrent": Qwen3_5TextConfig(
        **SIZES,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_key_head_dim=48,
        linear_num_value_heads=4,
        linear_value_head_dim=32,
    ),
    "states of Mamba 2": GraniteMoeHybridConfig(
        **SIZES,
        layer_types=["linear_attention", "full_attention"],
        mamba_n_heads=6,
        mamba_d_head=64,
        mamba_d_state=48,
        num_local_experts=0,
        shared_intermediate_size=1152,
        position_embedding_type="nope",
    ),
    "convolutions": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "no groups": LlamaConfig(
        **SIZES | {"hidden_size": 200, "num_attention_heads": 4, "intermediate_size": 4872}
    ),
}


def four_bits_of(model: Any) -> Any:
    """The weights of a checkpoint in 4 bits, with groups of 64."""
    from smartspec_py.engines.runtimes.openvino.weights import Weights

    names = [name for name, _ in model.named_parameters() if "_proj" in name]
    written = gptq_tensors(model.state_dict(), 64, names)
    return Weights(QuantizedTensors(written, gptq_settings(64)))


def computes_bfloat16() -> bool:
    """Whether this processor does, with some weights."""
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


class Recorder(LocalTarget):
    """A target that keeps the logits of its last pass, [number of wanted tokens, vocabulary]."""

    def __init__(
        self,
        kind: str,
        dtype: torch.dtype,
        weights: str,
        layers: tuple[int, ...] = (),
        kv_cache: str = "auto",
        ranks: tuple[int, ...] = (),
    ) -> None:
        """ranks: of adapters."""
        if dtype != torch.float32 and not computes_bfloat16():
            pytest.skip(f"not computed in {dtype} on this processor")
        torch.manual_seed(0)
        of_weights = torch.bfloat16 if weights == "half" else dtype
        is_kept, is_whole = weights == "kept", weights == "whole"
        weights = {"half": "stored", "kept": "int8", "whole": "int8"}.get(weights, weights)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]).to(of_weights).eval()
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight)
            if name.endswith("A_log"):
                torch.nn.init.uniform_(weight, -6.0, -2.0)  # states that remember
        config = RunnerConfig(
            Path(), torch.device("cpu"), dtype, MAX_SEQUENCES, MAX_LEN, VOCAB_SIZE,
            state_layers=layers, weights=weights, kv_cache=kv_cache,
            num_threads=2,  # some products sum in another order only with several threads
            adapters=random_adapters(shapes_of(model), ranks), keeps_4_bits=is_kept,
            num_back=MAX_DRAFT_LEN, num_kept_states=6,
        )  # fmt: skip
        capabilities = TargetCapabilities(
            MAX_SEQUENCES, MAX_LEN, MAX_DRAFT_LEN, 1, MAX_LEN, True, VOCAB_SIZE,
            adapters=config.adapters.names,
        )  # fmt: skip
        from smartspec_py.engines.runtimes.openvino import precision
        from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner

        with pytest.MonkeyPatch.context() as patch:
            if is_whole:  # as without VNNI
                patch.setattr(precision, "has_vnni", lambda: False)
                patch.setattr(precision, "LEAST_WEIGHTS", 0)
            runner = OpenVinoRunner(model, config, four_bits_of(model) if is_kept else None)
        if runner.config.dtype != dtype:
            pytest.skip(f"not computed in {dtype} on this processor")
        operators = runner.compiled.get_runtime_model().get_ordered_ops()
        kinds = [one.get_rt_info()["layerType"].astype(str) for one in operators]
        assert ("Convolution" in kinds) == is_whole
        assert runner.config.keeps_4_bits == is_kept
        super().__init__(runner, capabilities)
        self.last_logits = torch.empty(0)
        forward = self.runner.forward

        def recorded(*given: Any) -> Any:
            out = forward(*given)
            self.last_logits = out.logits.clone()
            return out

        self.runner.forward = recorded  # type: ignore[method-assign]


class Reference:
    """The text and the logits of a prompt, in passes of its own and without cached prefixes."""

    def __init__(self, target: Recorder) -> None:
        self._target = target
        self._found: dict[tuple[int | str, ...], tuple[list[int], torch.Tensor]] = {}

    def of(self, prompt: list[int], adapter: str = "") -> tuple[list[int], torch.Tensor]:
        key = (adapter, *prompt)
        if key not in self._found:
            target, logits, text = self._target, [], list(prompt)
            start = SequenceStart(0, prompt, len(prompt), GREEDY, False, adapter=adapter)
            target.begin(start)
            work: Work = Prefill(0, tuple(prompt), 0, True)
            for _ in range(NUM_TOKENS):
                target.submit([work])
                [event] = target.poll(0)
                logits.append(target.last_logits)
                text += event.tokens
                work = Verify(0, Draft())
            target.release(0)
            self._found[key] = text, torch.cat(logits)
        return self._found[key]


class Live:
    """A sequence of the random run."""

    def __init__(self, prompt: list[int], tokens: list[int], num_read: int, adapter: str) -> None:
        self.prompt, self.tokens, self.num_read = prompt, tokens, num_read
        self.adapter = adapter
        self.has_begun = False


class RandomRun:
    """Serves prompts that share prefixes, several at a time, and compares all logits."""

    def __init__(self, target: Recorder, reference: Reference, seed: int) -> None:
        self.target, self.reference, self.rng = target, reference, random.Random(seed)
        stem = [self.rng.randrange(VOCAB_SIZE) for _ in range(500)]
        ends = [stem[:400], stem[:33], [*stem[:65], 1], stem[:250] + stem[:90], stem[:1], stem[:9]]
        first_answer = reference.of([*stem[:65], 1])[0]
        self.prompts = [*ends, [*first_answer, 5, 6, 7]]  # the next turn of a chat
        self.live: dict[int, Live] = {}
        self.next_sequence = 1
        self.num_checked = self.num_reused = self.num_accepted = self.most_shared = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._change()
            work = [w for s, one in self.live.items() if (w := self._work(s, one)) is not None]
            if work:
                self.target.submit(work)
                self._check(work, self.target.poll(0))
                check_cache(self.target)
                self.most_shared = max(self.most_shared, self.target.num_shared_tokens())

    def _change(self) -> None:
        """Admit, preempt or cancel."""
        rng = self.rng
        if len(self.live) < MAX_SEQUENCES - 1 and rng.random() < 0.5:  # one is the reference's
            prompt, names = rng.choice(self.prompts), self.target.capabilities.adapters
            adapter = rng.choice(("", *names)) if names else ""
            self._begin(prompt, list(prompt), adapter)
        if self.live and rng.random() < 0.1:
            sequence = rng.choice(list(self.live))
            one = self.live.pop(sequence)
            self.target.release(sequence)
            if rng.random() < 0.7:  # preempted
                self._begin(one.prompt, one.tokens, one.adapter)

    def _begin(self, prompt: list[int], tokens: list[int], adapter: str) -> None:
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        start = SequenceStart(sequence, tokens, len(prompt), GREEDY, adapter=adapter)
        self.reference.of(prompt, adapter)
        num_read = self.target.begin(start)
        self.num_reused += num_read
        self.live[sequence] = Live(prompt, tokens, num_read, adapter)

    def _work(self, sequence: int, one: Live) -> Work | None:
        if self.rng.random() < 0.3:
            return None
        if not one.has_begun:
            one.num_read = self.target.find_more(sequence)
        if num_unread := len(one.tokens) - one.num_read:
            one.has_begun = True
            num = min(num_unread, self.rng.choice([1, 2, 3, 31, 100, 400]))
            chunk = tuple(one.tokens[one.num_read :][:num])
            return Prefill(sequence, chunk, one.num_read, num == num_unread)
        true = self.reference.of(one.prompt, one.adapter)[0][len(one.tokens) :]
        num_drafts = min(self.rng.randrange(MAX_DRAFT_LEN + 1), len(true) - 1)
        drafts = [token if self.rng.random() < 0.9 else 0 for token in true[:num_drafts]]
        return Verify(sequence, Draft(tuple(drafts)))

    def _check(self, work: list[Work], events: list[Event]) -> None:
        first = 0
        for item, event in zip(work, events, strict=True):
            one = self.live[event.sequence]
            if isinstance(item, Prefill):
                one.num_read += len(item.tokens)
                num_rows = int(item.is_last)
            else:
                num_rows = len(item.draft.tokens) + 1
            text, expected = self.reference.of(one.prompt, one.adapter)
            start = len(one.tokens) - len(one.prompt)
            for i, token in enumerate(event.tokens):
                assert torch.equal(self.target.last_logits[first + i], expected[start + i]), (
                    f"token {start + i} after a prompt of {len(one.prompt)}, {item}"
                )
                assert token == text[len(one.tokens) + i]
            first += num_rows
            self.num_checked += len(event.tokens)
            self.num_accepted += event.num_accepted
            one.tokens = [*one.tokens, *event.tokens]
            if event.tokens:
                one.num_read = len(one.tokens)
            if len(one.tokens) >= len(one.prompt) + NUM_TOKENS:
                self.target.release(event.sequence)
                del self.live[event.sequence]


CASES = [
    ("llama", "stored"),
    ("mistral, window 50", "stored"),
    ("qwen3, heads of 64", "int8"),
    ("wide", "int8"),
    ("no groups", "int8"),
    ("wide", "half"),  # weights of half precision, also for products in float32
    ("llama", "int4"),
    ("wide", "kept"),
    ("gemma4, window 50", "int8"),
]
WHOLE = ("gemma4, window 50", "phi3", "qwen2", "wide")
"""With products of whole numbers, the others are computed in float32."""

ODD = ("convolutions", "experts", "recurrent", "states of Mamba 2")
OF_ODD = ("stored", "int8", "whole")
"""Computed in float32, with any weights."""


@pytest.mark.parametrize(
    ("kind", "dtype", "weights"),
    [
        *((kind, dtype, weights) for kind, weights in CASES for dtype in DTYPES),
        *((kind, torch.float32, "whole") for kind in WHOLE),
        *((kind, torch.float32, weights) for kind in ODD for weights in OF_ODD),
        *(("gpt-oss, window 50", torch.float32, weights) for weights in ("stored", "whole")),
    ],
)
def test_logits_do_not_depend_on_the_pass(kind: str, dtype: torch.dtype, weights: str) -> None:
    check_bits(Recorder(kind, dtype, weights))


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_of_layers(dtype: torch.dtype) -> None:
    """They read the last token of a cached prefix again, here also after a preemption."""
    check_bits(Recorder("llama", dtype, "int8", layers=(0, 1)))


@pytest.mark.parametrize(
    ("kind", "dtype", "weights"),
    [
        ("llama", torch.float32, "kept"),
        ("gemma4, window 50", torch.float32, "int8"),
        ("wide", torch.float32, "whole"),
        ("convolutions", torch.float32, "int8"),
        ("llama", torch.bfloat16, "stored"),
        ("phi3", torch.bfloat16, "int8"),
    ],
)
def test_logits_do_not_depend_on_the_adapters_of_others(
    kind: str, dtype: torch.dtype, weights: str
) -> None:
    """Two adapters, one of them with an odd rank, and sequences without one."""
    check_bits(Recorder(kind, dtype, weights, ranks=(13, 64)))


@pytest.mark.parametrize(("weights", "num_bytes"), [("stored", 4), ("int8", 2)])
def test_the_type_of_keys_of_float32(weights: str, num_bytes: int) -> None:
    runner = Recorder("llama", torch.float32, weights).runner
    expected = {4: "f32", 2: "bf16" if computes_bfloat16() else "f16"}[num_bytes]
    tensors = runner.cache.tensors.values()  # type: ignore[attr-defined]
    assert {tensor.element_type.to_string() for tensor in tensors} == {expected}
    assert runner.bytes_per_token == 2 * 2 * 2 * 32 * num_bytes


@pytest.mark.parametrize(
    ("kind", "widths"), [("qwen3, heads of 64", (64, 64)), ("gemma4, window 50", (32, 64))]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_8_bits(kind: str, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Each head of a token takes one byte per number, and 8 for the scale and the zero."""
    target = Recorder(kind, dtype, "int8", kv_cache="u8")
    runner = target.runner
    tensors = runner.cache.tensors.values()  # type: ignore[attr-defined]
    assert {tensor.element_type.to_string() for tensor in tensors} == {"u8"}
    assert runner.bytes_per_token == sum(2 * 2 * (width + 8) for width in widths)
    expected = bytes_per_token(CONFIGS[kind], dtype, "u8")
    assert runner.bytes_per_token == expected
    check_bits(target)


def check_bits(target: Recorder) -> None:
    run = RandomRun(target, Reference(target), seed=1)
    run.run(45)
    assert run.num_checked > 250
    assert run.num_reused > 300
    assert run.num_accepted > 120
    assert run.most_shared > 60
