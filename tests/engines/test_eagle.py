"""EAGLE-3 heads: both checkpoint layouts against a short reference, what is refused, and the drafts
of the proposer in a random sequence of steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ragged_reference
import torch
import torch.nn.functional as F
from local_models import MAX_DRAFT_LEN, poll
from safetensors.torch import save_file
from test_local_engine import Driver
from transformers import LlamaConfig, LlamaForCausalLM

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Decode, Prefill, SequenceStart, TargetCapabilities
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.supported import ModelError
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.drafts.eagle import proposer as eagle_proposer
from smartspec_py.engines.drafts.eagle.head import EagleHead, is_eagle, load_eagle, read_config
from smartspec_py.engines.drafts.eagle.openvino import OpenVinoEagleRunner
from smartspec_py.engines.drafts.eagle.proposer import EagleProposer
from smartspec_py.engines.drafts.eagle.runner import EagleRunner
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.runtimes.pytorch import graphs
from smartspec_py.engines.runtimes.pytorch.causal import load_runner
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner
from smartspec_py.engines.runtimes.runner import RowInput, Runner, RunnerConfig

HIDDEN, OF_TARGET, HEADS, KEY_HEADS, HEAD_DIM, MLP = 16, 24, 4, 2, 6, 20
ROWS, VOCAB, DRAFTED = 40, 36, 12  # the target pads its vocabulary
NUM_LAYERS, THETA, EPS = 7, 100.0, 1e-5
CPU = torch.device("cpu")

TARGET = LlamaConfig(
    hidden_size=OF_TARGET,
    intermediate_size=8,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=2,
    vocab_size=ROWS,
    max_position_embeddings=64,
    initializer_range=0.3,
)
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "vocab_size": ROWS,
    "max_position_embeddings": 64,
}
EAGLE = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": DRAFTED,
    "transformer_layer_config": LAYER,
    "target_hidden_size": OF_TARGET,
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def weights(layer: str, *flags: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)

    def norm(size: int) -> torch.Tensor:
        return 1.0 + torch.randn(size) / 4

    width, of_keys = HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM
    found = {
        "embed_tokens.weight": torch.randn(ROWS, HIDDEN),
        "fc.weight": torch.randn(HIDDEN, 3 * OF_TARGET) / 4,
        f"{layer}.input_layernorm.weight": norm(HIDDEN),
        f"{layer}.hidden_norm.weight": norm(HIDDEN),
        f"{layer}.post_attention_layernorm.weight": norm(HIDDEN),
        f"{layer}.self_attn.q_proj.weight": torch.randn(width, 2 * HIDDEN) / 4,
        f"{layer}.self_attn.k_proj.weight": torch.randn(of_keys, 2 * HIDDEN) / 4,
        f"{layer}.self_attn.v_proj.weight": torch.randn(of_keys, 2 * HIDDEN) / 4,
        f"{layer}.self_attn.o_proj.weight": torch.randn(HIDDEN, width) / 4,
        f"{layer}.mlp.gate_proj.weight": torch.randn(MLP, HIDDEN) / 4,
        f"{layer}.mlp.up_proj.weight": torch.randn(MLP, HIDDEN) / 4,
        f"{layer}.mlp.down_proj.weight": torch.randn(HIDDEN, MLP) / 4,
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": torch.randn(DRAFTED, HIDDEN),
        "d2t": 3 * torch.arange(DRAFTED) - torch.arange(DRAFTED),  # tokens 0, 3, .., 33
        "t2d": torch.arange(3 * DRAFTED) % 3 == 0,
    }
    if "norm_before_fc" in flags:
        found["input_norm.weight"] = norm(3 * OF_TARGET)
    if "fc_norm" in flags:
        found |= {f"fc_norm.{i}.weight": norm(OF_TARGET) for i in range(3)}
    return found


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return states / (states.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(heads: torch.Tensor) -> torch.Tensor:
    """[heads, N, D], turned by the position."""
    half = HEAD_DIM // 2
    angles = torch.arange(heads.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)
    left, right = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Reference:
    """The head without a cache: every draft reads the whole sequence again."""

    def __init__(self, tensors: dict[str, torch.Tensor], layer: str, *flags: str) -> None:
        self.w = {name.removeprefix(f"{layer}."): one for name, one in tensors.items()}
        self.flags = flags

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        if "norm_before_fc" in self.flags:
            states = rms(states, self.w["input_norm.weight"])
        if "fc_norm" in self.flags:
            parts = states.split(OF_TARGET, -1)
            normed = [rms(one, self.w[f"fc_norm.{i}.weight"]) for i, one in enumerate(parts)]
            states = torch.cat(normed, -1)
        return states @ self.w["fc.weight"].T

    def run(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [N], states [N, H] before each -> logits [DRAFTED] and state after the last."""
        w = self.w
        hidden = rms(states, w["hidden_norm.weight"])
        embedded = rms(w["embed_tokens.weight"][tokens], w["input_layernorm.weight"])
        both = torch.cat([embedded, hidden], -1)
        q, k, v = (
            (both @ w[f"self_attn.{n}_proj.weight"].T)
            .view(len(tokens), -1, HEAD_DIM)
            .transpose(0, 1)
            for n in "qkv"
        )
        k, v = (one.repeat_interleave(HEADS // KEY_HEADS, 0) for one in (k, v))
        scores = rotated(q) @ rotated(k).transpose(1, 2) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = mixed @ w["self_attn.o_proj.weight"].T
        x = x + (hidden if "norm_before_residual" in self.flags else states)
        y = rms(x, w["post_attention_layernorm.weight"])
        y = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = (x + y @ w["mlp.down_proj.weight"].T)[-1]
        out = rms(x, w["norm.weight"])
        return w["lm_head.weight"] @ out, out if "norm_output" in self.flags else x

    def chain(self, tokens: list[int], states: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        """Logits before each draft and after the last one. tokens: those that have a state."""
        tokens, fused, found = list(tokens), self.fuse(states), []
        for draft in (*drafts, -1):
            logits, state = self.run(tokens, fused)
            found.append(logits)
            tokens.append(draft)
            fused = torch.cat([fused, state[None]])
        return torch.stack(found)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    made = folder / "head"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    if "speculators_model_type" in config:
        save_file(
            {name: one.contiguous() for name, one in tensors.items()}, made / "model.safetensors"
        )
    else:
        torch.save(tensors, made / "pytorch_model.bin")
    return made


def own(folder: Path, config: LlamaConfig = TARGET) -> RunnerConfig:
    path = folder / "target"
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(path)
    return RunnerConfig(path, CPU, torch.float32, num_rows=3, max_len=64, vocab_size=VOCAB)


class PaddedEagleRunner(EagleRunner):
    """Its passes are padded, as a GPU would replay them, and read drafts on the device."""

    is_asynchronous = True

    def __init__(self, head: EagleHead, config: RunnerConfig) -> None:
        super().__init__(head, config)
        self.warm()


RUNNERS = [EagleRunner, PaddedEagleRunner, OpenVinoEagleRunner]


def runner_of(head: Path, config: RunnerConfig, kind: type[Runner] = EagleRunner) -> Runner:
    assert is_eagle(head)
    target = load_config(config.path, config.max_len)
    return kind(load_eagle(read_config(head, target), config), config)  # type: ignore[call-arg, arg-type]


TOKENS = {2: [5, 9, 33, 0, 12, 7, 30, 3, 1], 0: [8, 8, 35, 21]}
"""By row: tokens that have a state before them."""


def compare(runner: Runner, reference: Reference, first: int = 1) -> None:
    """Two rows read their tokens, one of them in two passes, and then two drafts each."""
    torch.manual_seed(2)
    states = {row: torch.randn(len(tokens), 3 * OF_TARGET) for row, tokens in TOKENS.items()}
    drafts = {2: [4, 6], 0: [9, 9]}
    runner.forward([RowInput(2, first, TOKENS[2][:5], 0, first=first, states=states[2][:5])])
    inputs: list[RowInput] = [
        RowInput(2, first + 5, TOKENS[2][5:], 1, first=first, states=states[2][5:]),
        RowInput(0, first, TOKENS[0], 1, first=first, states=states[0]),
    ]
    found = [runner.forward(inputs).logits]
    for i in range(2):
        inputs = [
            RowInput(row, first + len(TOKENS[row]) + i, drafts[row][i : i + 1], 1, first=first)
            for row in TOKENS
        ]
        found.append(runner.forward(inputs).logits)
    for place, row in enumerate(TOKENS):
        expected = reference.chain(TOKENS[row], states[row], drafts[row])
        logits = torch.stack([one[place] for one in found])
        assert logits.shape == (3, VOCAB)
        torch.testing.assert_close(logits[:, ::3], expected, atol=1e-4, rtol=1e-4)
        assert int(logits.isfinite().sum()) == 3 * DRAFTED


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("first", [1, 7])
def test_the_eagle_layout(tmp_path: Path, first: int, kind: type[Runner]) -> None:
    """first: the row begins later if earlier states are unknown. Rotations are relative."""
    tensors = weights("midlayer")
    runner = runner_of(write(tmp_path, EAGLE, tensors), own(tmp_path), kind)
    compare(runner, Reference(tensors, "midlayer"), first)


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize(
    "flags", [(), ("norm_before_residual",), FLAGS[:2], ("fc_norm", "norm_output")], ids=str
)
def test_the_speculators_layout(tmp_path: Path, flags: tuple[str, ...], kind: type[Runner]) -> None:
    tensors = weights("layers.0", *flags)
    head = write(tmp_path, SPECULATORS | dict.fromkeys(flags, True), tensors)
    compare(runner_of(head, own(tmp_path), kind), Reference(tensors, "layers.0", *flags))


@pytest.mark.parametrize("num_drafted", [DRAFTED, ROWS])
def test_a_head_that_shares_embedding_and_lm_head(tmp_path: Path, num_drafted: int) -> None:
    """The target's hidden size. The LM head is the target's rows of the head's tokens."""
    config = LlamaConfig(**TARGET.to_dict() | {"hidden_size": HIDDEN})
    tensors = weights("midlayer")
    shared = ("embed_tokens.weight", "lm_head.weight", *(("d2t", "t2d") * (num_drafted == ROWS)))
    for name in shared:
        del tensors[name]
    tensors["fc.weight"] = tensors["fc.weight"][:, : 3 * HIDDEN].clone()
    document, ours = EAGLE | {"draft_vocab_size": num_drafted}, own(tmp_path, config)
    runner = runner_of(write(tmp_path, document, tensors), ours)
    target = LlamaForCausalLM.from_pretrained(ours.path)
    reference = Reference(
        tensors
        | {
            "embed_tokens.weight": target.model.embed_tokens.weight.detach(),
            "lm_head.weight": target.lm_head.weight.detach()[:: ROWS // num_drafted][:num_drafted],
        },
        "midlayer",
    )
    states = torch.randn(4, 3 * HIDDEN)
    found = runner.forward([RowInput(0, 1, TOKENS[0], 1, first=1, states=states)]).logits
    expected = reference.chain(TOKENS[0], states, [])
    step = ROWS // num_drafted
    torch.testing.assert_close(found[:, ::step], expected[:, :VOCAB], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "layer_ids"),
    [
        (EAGLE, (2, 3, 4)),
        (SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        (EAGLE | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)),
    ],
    ids=["default", "inputs", "outputs"],
)
def test_which_layers_are_read(
    tmp_path: Path, config: dict[str, Any], layer_ids: tuple[int, ...]
) -> None:
    assert read_config(write(tmp_path, config, {}), TARGET).layer_ids == layer_ids


def layer_of(**fields: Any) -> dict[str, Any]:
    return {**SPECULATORS, "transformer_layer_config": LAYER | fields}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SPECULATORS | {"speculators_model_type": "dflash"}, "speculators_model_type is dflash"),
        (layer_of(model_type="qwen3"), "model_type is qwen3, but for EAGLE heads only llama"),
        (EAGLE | {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        (EAGLE | {"hidden_act": "gelu"}, "hidden_act is gelu"),
        (layer_of(use_sliding_window=True), "use_sliding_window is True"),
        (layer_of(layer_types=["sliding_attention"]), "use_sliding_window is True"),
        (EAGLE | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        (EAGLE | {"draft_vocab_size": "x"}, r"draft_vocab_size 'x' .* a whole number in 1\.\.40"),
        (EAGLE | {"draft_vocab_size": 41}, "draft_vocab_size 41 in its config.json"),
        (EAGLE | {"target_hidden_size": 25}, "target_hidden_size 25 .* must be 24, which is that"),
        (EAGLE | {"norm_before_residual": "no"}, "norm_before_residual 'no' .* true or false"),
        (EAGLE | {"eagle_config": 5}, "eagle_config 5 .* must be an object"),
        (EAGLE | {"eagle_aux_hidden_state_layer_ids": [0.5]}, r"layer_ids \[0\.5\] .* a list of"),
        (EAGLE | {"hidden_size": 0}, "hidden_size 0 in its config.json|cannot use"),
        (EAGLE | {"rms_norm_eps": -1.0}, "rms_norm_eps -1.0 .* a number in 0..1"),
        (layer_of(num_attention_heads=0), "a config.json that Transformers cannot use"),
        (layer_of(rope_theta="x"), "a config.json that Transformers cannot use"),
        (EAGLE | {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, r"\(2, 3, 7\), .* layers 0 to 6"),
    ],
)
def test_refused_before_loading(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(write(tmp_path, config, {}), TARGET)


GOOD = weights("midlayer")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({n: t for n, t in GOOD.items() if n != "fc.weight"}, 'Missing key.*: "fc.weight"'),
        (GOOD | {"fc.bias": torch.zeros(HIDDEN)}, 'Unexpected key.*: "fc.bias"'),
        (
            GOOD | {"fc.weight": torch.zeros(16, 48)},
            r"size mismatch for fc.weight: .*\[16, 48\].*\[16, 72\]",
        ),
        (
            GOOD | {"norm.weight": torch.full((HIDDEN,), torch.nan)},
            "norm.weight are not all finite",
        ),
        ({n: t for n, t in GOOD.items() if n != "d2t"}, "the weight file lacks d2t"),
        (GOOD | {"d2t": torch.zeros(5, dtype=torch.long)}, "d2t has 5 entries, but needs 12"),
        (GOOD | {"d2t": torch.zeros(DRAFTED, dtype=torch.long)}, "d2t must have the tokens of t2d"),
        (GOOD | {"d2t": -torch.arange(DRAFTED)}, "d2t must have the tokens of t2d, each once"),
        (GOOD | {"fc.weight": GOOD["fc.weight"].to(torch.int8)}, "fc.weight of the type int8"),
        (
            GOOD | {"layers.0.hidden_norm.weight": torch.ones(HIDDEN)},
            "has tensors of both midlayer and layers.0",
        ),
        (GOOD | {"d2t": torch.full((DRAFTED,), 30)}, "d2t has tokens 30 to 41, but .* 40 tokens"),
    ],
)
def test_refused_weights(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        runner_of(write(tmp_path, EAGLE, tensors), own(tmp_path))


def test_folders_without_an_eagle_head(tmp_path: Path) -> None:
    assert not is_eagle(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 4, "architectures": 5}))
    assert not is_eagle(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="an unreadable config"):
        is_eagle(tmp_path)


GREEDY = SamplingParams()


def target_of(config: RunnerConfig, load: Callable[[RunnerConfig], Runner]) -> LocalTarget:
    runner = load(config)
    capabilities = TargetCapabilities(
        max_sequences=3,
        max_context_len=64,
        max_draft_len=MAX_DRAFT_LEN,
        max_decode_tokens=1,
        max_prefill_tokens=64,
        verifies_sampling=True,
        vocab_size=VOCAB,
    )
    return LocalTarget(runner, capabilities)


class EagleDriver(Driver):
    """Every draft of the head is compared with the reference, which reads the whole text again.
    What is verified are mostly the right tokens, so that any number of drafts is accepted.

    first: by sequence, the first token that the head sees.
    """

    proposer: EagleProposer

    def __init__(
        self, target: LocalTarget, proposer: EagleProposer, reference: Reference, path: Path
    ) -> None:
        super().__init__(target, proposer, seed=3)
        self.reference = reference
        self.model = LlamaForCausalLM.from_pretrained(path).eval()
        self.first: dict[int, int] = {}
        self.num_drafts = 0

    @torch.inference_mode()
    def expected(self, sequence: int, num_drafts: int) -> list[int]:
        tokens, first = self.tokens[sequence], self.first[sequence]
        found = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        states = torch.cat([found[i][0] for i in (2, 3, 4)], -1)
        drafts: list[int] = []
        while len(drafts) < num_drafts:
            logits = self.reference.chain(tokens[first:], states[first - 1 : -1], drafts)
            drafts.append(3 * int(logits[-1].argmax()))
        return drafts

    @torch.inference_mode()
    def right(self, sequence: int, num_tokens: int) -> list[int]:
        """What the target generates next, except that a token is wrong now and then."""
        known = list(self.tokens[sequence])
        for _ in range(num_tokens):
            known.append(int(self.model(torch.tensor([known])).logits[0, -1, :VOCAB].argmax()))
        found = known[-num_tokens:]
        if self.rng.random() < 0.5:
            found[self.rng.randrange(num_tokens)] = self.rng.randrange(VOCAB)
        return found

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        drafts = []
        for task, draft in zip(tasks, self.proposer.propose(tasks), strict=True):
            right: list[int] = []
            if task.draft_len:
                self.first[task.sequence] = self.proposer._states[task.sequence].first
                found = draft.tokens if draft.on_device is None else draft.on_device.tolist()
                assert list(found) == self.expected(task.sequence, task.draft_len)
                right = self.right(task.sequence, task.draft_len)
            self.num_drafts += len(draft.tokens)
            drafts.append(Draft(tuple(right)))
        return drafts

    def end(self, sequence: int) -> list[int]:
        self.target.release(sequence)
        self.proposer.release(sequence)
        del self.unread[sequence]
        return self.tokens.pop(sequence)


def with_openvino(config: RunnerConfig) -> Runner:
    from smartspec_py.engines.runtimes.openvino.runner import load_openvino_runner

    return load_openvino_runner(config)


@pytest.fixture(autouse=True)
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "kernels", ragged_reference.kernels)


def with_graphs(config: RunnerConfig) -> Runner:
    runner = load_runner(config, GraphRunner)
    runner.warm()
    return runner


@pytest.mark.parametrize(
    "load",
    [load_runner, with_graphs, with_openvino],
    ids=lambda f: f.__name__,
)
def test_drafts_do_not_depend_on_the_steps_before(
    tmp_path: Path, load: Callable[[RunnerConfig], Runner]
) -> None:
    """Six sequences through three rows. The last three find a prefix of 12 tokens in both caches,
    the first two in that of the target only."""
    tensors = weights("midlayer")
    head, config = write(tmp_path, EAGLE, tensors), own(tmp_path)
    kinds = {with_openvino: OpenVinoEagleRunner, with_graphs: PaddedEagleRunner}
    kind = kinds.get(load, EagleRunner)
    runner = runner_of(head, config, kind)
    target = target_of(replace(config, state_layers=(2, 3, 4)), load)
    proposer = EagleProposer(runner, 3, MAX_DRAFT_LEN)
    driver = EagleDriver(target, proposer, Reference(tensors, "midlayer"), config.path)
    shared = [(7 * i) % VOCAB for i in range(12)]
    other = [(5 * i + 1) % VOCAB for i in range(12)]
    target.begin(SequenceStart(99, other, 12, GREEDY))
    poll(target, Prefill(99, tuple(other), 0, True))
    target.release(99)
    todo = [[*other, 8], [*other, 9], [*shared, 1, 2], [*shared, 3], [*shared, 4, 4], shared]
    firsts, cached = {}, []
    for sequence, prompt in enumerate(todo):
        driver.begin(sequence, prompt)
        cached.append(driver.num_cached[sequence])
        while len(driver.unread) == 3 or (sequence == 5 and driver.unread):
            driver.step()
            for number in [n for n in driver.unread if len(driver.tokens[n]) > 34]:
                firsts[number] = driver.first[number]
                driver.end(number)
    assert cached == [11, 11, 0, 11, 11, 10], "one less than the tokens in common"
    assert firsts == {0: 12, 1: 12, 2: 1, 3: 1, 4: 1, 5: 1}
    assert driver.num_drafts > 60
    assert driver.num_accepted > 30


class TreeDriver(EagleDriver):
    """All drafts are trees, compared with those that the reference grows."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        tasks = [
            task._replace(draft_len=self.rng.choice((5, 20, 63)), depth=task.draft_len)
            for task in tasks
        ]
        drafts = self.proposer.propose(tasks)
        for task, draft in zip(tasks, drafts, strict=True):
            if task.depth:
                self.first[task.sequence] = self.proposer._states[task.sequence].first
                paths = [()]
                for token, parent in zip(draft.tokens, draft.tree.parents, strict=True):
                    paths.append((*paths[parent], token))
                assert sorted(paths[1:]) == self.grown(task)
                self.num_drafts += len(draft.tokens)
        return drafts

    @torch.inference_mode()
    def grown(self, task: DraftTask) -> list[tuple[int, ...]]:
        """The most probable paths: each depth follows the eight most probable of that before."""
        tokens, first = self.tokens[task.sequence], self.first[task.sequence]
        found = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        states = torch.cat([found[i][0] for i in (2, 3, 4)], -1)
        nodes: dict[tuple[int, ...], float] = {}
        ends = {(): 0.0}
        for _ in range(task.depth):
            below = {}
            for path, score in ends.items():
                logits = self.reference.chain(tokens[first:], states[first - 1 : -1], list(path))
                best = logits[-1].log_softmax(-1).topk(8)
                for log_prob, token in zip(*(each.tolist() for each in best), strict=True):
                    below[(*path, 3 * token)] = score + min(log_prob, -1e-4)
            nodes |= below
            ends = dict(sorted(below.items(), key=lambda pair: -pair[1])[:8])
        return sorted(sorted(nodes, key=lambda path: -nodes[path])[: task.draft_len])


def test_trees_are_the_most_probable_paths(tmp_path: Path) -> None:
    """Of trees of different depths in the same passes; rows begin late if states are missing."""
    tensors = weights("midlayer")
    head, config = write(tmp_path, EAGLE, tensors), own(tmp_path)
    config = replace(config, max_len=128)
    target = target_of(replace(config, state_layers=(2, 3, 4)), load_runner)
    proposer = EagleProposer(runner_of(head, config), 3, MAX_DRAFT_LEN, drafts_trees=True)
    driver = TreeDriver(target, proposer, Reference(tensors, "midlayer"), config.path)
    for sequence in range(3):
        driver.begin(sequence, [(5 * i + sequence) % VOCAB for i in range(12)])
    while min(len(tokens) for tokens in driver.tokens.values()) < 24:
        driver.step()
    assert driver.num_drafts > 300
    proposer.time_trees(3, 3 * OF_TARGET)
    alone_s, together_s = proposer.capabilities.tree_s
    assert 0.0 <= together_s < 1.0
    assert 0.0 <= alone_s < 1.0


def test_drafts_are_timed_until_the_device_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, like trees, are complete when a copy to the host has waited for them."""
    head, config = write(tmp_path, EAGLE, weights("midlayer")), own(tmp_path)
    monkeypatch.setattr(EagleRunner, "is_asynchronous", True)
    config = replace(config, max_len=128)
    proposer = EagleProposer(runner_of(head, config), 3, MAX_DRAFT_LEN, drafts_trees=True)
    copied, num_timed = list[torch.Tensor](), 0
    to_host = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        copied.append(tensor)
        return to_host(tensor)

    def timed(draft: Callable[[], object], prepare: Callable[[], object]) -> float:
        nonlocal num_timed
        prepare()
        copied.clear()
        draft()
        assert copied
        num_timed += 1
        return 0.0

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    monkeypatch.setattr(eagle_proposer, "fastest_s", timed)
    proposer.time_trees(3, 3 * OF_TARGET)
    assert num_timed == 4


def test_states_that_were_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 4 states wait, so after a chunk of 9 tokens and 6 decoded ones, the head begins at
    token 16 - 4 = 12."""
    monkeypatch.setattr(eagle_proposer, "KEPT_STATES", 4)
    tensors = weights("midlayer")
    head, config = write(tmp_path, EAGLE, tensors), own(tmp_path)
    runner = runner_of(head, config)
    target = target_of(replace(config, state_layers=(2, 3, 4)), load_runner)
    proposer = EagleProposer(runner, 3, MAX_DRAFT_LEN)
    driver = EagleDriver(target, proposer, Reference(tensors, "midlayer"), config.path)
    driver.begin(0, list(range(9)))
    tokens = driver.tokens[0]
    assert proposer.num_available(0, tokens, SamplingParams()) == 0
    assert proposer.draft_prefill_len(0, 9) == 8
    for work in (Prefill(0, tuple(tokens), 0, True), *[Decode(0, 1)] * 6):
        (event,) = poll(target, work)
        proposer.observe(0, 0, event.hidden)
        tokens += event.tokens
    assert len(tokens) == 16
    assert proposer.num_available(0, tokens, SamplingParams()) == MAX_DRAFT_LEN
    assert proposer.draft_prefill_len(0, 16) == 3
    driver.first[0] = 12
    (draft,) = proposer.propose([DraftTask(0, tokens, 9, 3, GREEDY)])
    assert list(draft.tokens) == driver.expected(0, 3)
    assert proposer.num_cached(0, 16) > 0
    proposer.release(0)
    proposer.observe(0, 0, event.hidden)
    assert (proposer.draft_prefill_len(0, 16), proposer.num_cached(0, 16)) == (0, 0), (
        "nothing is cached"
    )


def test_states_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle_proposer, "KEPT_STATES", 4)
    monkeypatch.setattr(eagle_proposer, "MAX_PARTS", 3)
    states, last = eagle_proposer._States(), 0
    for num in (10, *[1] * 50):
        states.add(torch.arange(last, last + num)[:, None])
        last += num
        assert 4 <= states.num <= 10 + 3
    num = states.num
    assert num <= 4 + 3
    assert states.take(num)[:, 0].tolist() == [*range(last - num, last)]
