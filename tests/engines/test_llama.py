"""The written-out decoder against Transformers' own, over the whole of a sequence.

`test_torch_engine` goes on from here: rows, chunks and drafts, for these families too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_models import VOCAB_SIZE
from transformers import (
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.engines.torch import packed
from smartspec_py.engines.torch.llama import LlamaDecoder
from smartspec_py.engines.torch.packed import ATTENTION_NAME, RowInput, pack
from smartspec_py.engines.torch.runner import CausalRunner, RunnerConfig, prepared

CPU = torch.device("cpu")
NUM_TOKENS = 50
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
WRITTEN_OUT = {
    "llama": LlamaConfig(**COMMON),
    "llama, biases, wide heads": LlamaConfig(
        **COMMON, attention_bias=True, mlp_bias=True, head_dim=20
    ),
    "llama, tied, scaled positions": LlamaConfig(
        **COMMON, tie_word_embeddings=True, rope_parameters=SCALED
    ),
    "llama, yarn": LlamaConfig(**COMMON, rope_parameters=STRETCHED),
    "mistral": MistralConfig(**COMMON, sliding_window=None),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=8),
}
LEFT = {
    "another layout": GPTNeoXConfig(
        **{name: value for name, value in COMMON.items() if name != "num_key_value_heads"}
    ),
    "another activation": LlamaConfig(**COMMON, hidden_act="gelu"),
    "angles that depend on the length": LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
}


def make_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Norms and biases are random too: those of a new model change nothing."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    return model.to(dtype)


def config_of(dtype: torch.dtype = torch.float32, batch_invariant: bool = False) -> RunnerConfig:
    return RunnerConfig(
        Path("model"),
        CPU,
        dtype,
        2,
        192,
        VOCAB_SIZE,
        gives_hidden=True,
        batch_invariant=batch_invariant,
    )


def tokens() -> list[int]:
    return torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.manual_seed(1)).tolist()


@pytest.mark.parametrize("kind", WRITTEN_OUT)
@torch.inference_mode()
def test_logits_and_states_are_those_of_transformers(kind: str) -> None:
    expected = make_model(WRITTEN_OUT[kind])(
        torch.tensor([tokens()]), use_cache=False, output_hidden_states=True
    )
    config = config_of()
    decoder = prepared(make_model(WRITTEN_OUT[kind]), config)
    assert isinstance(decoder, LlamaDecoder)
    runner = CausalRunner(decoder, config)
    found = [
        runner.forward([RowInput(1, start, tokens()[start:end], end - start)])
        for start, end in ((0, 30), (30, 31), (31, 35), (35, NUM_TOKENS))
    ]
    logits = torch.cat([one.logits for one in found])
    torch.testing.assert_close(logits, expected.logits[0], rtol=1e-4, atol=1e-4)
    hidden = torch.cat([one.hidden for one in found if one.hidden is not None])
    torch.testing.assert_close(hidden, expected.hidden_states[-1][0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_in_bfloat16_it_rounds_no_worse_than_transformers() -> None:
    exact = make_model(WRITTEN_OUT["llama"])(torch.tensor([tokens()])).logits[0]
    plain = make_model(WRITTEN_OUT["llama"], torch.bfloat16)(torch.tensor([tokens()])).logits[0]
    config = config_of(torch.bfloat16)
    decoder = prepared(make_model(WRITTEN_OUT["llama"], torch.bfloat16), config)
    assert isinstance(decoder, LlamaDecoder)
    found = CausalRunner(decoder, config).forward([RowInput(0, 0, tokens(), NUM_TOKENS)]).logits
    assert _distance(found, exact) < 1.2 * _distance(plain, exact)


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).pow(2).mean().sqrt())


@pytest.mark.parametrize("kind", LEFT)
def test_other_models_are_left_to_transformers(kind: str) -> None:
    model = make_model(LEFT[kind])
    assert prepared(model, config_of()) is model


def test_batch_invariant_sums_are_left_to_transformers() -> None:
    model = make_model(WRITTEN_OUT["llama"], torch.bfloat16)
    assert prepared(model, config_of(torch.bfloat16, batch_invariant=True)) is model


@torch.inference_mode()
def test_a_pass_without_logits_writes_the_same_keys() -> None:
    config = config_of()
    runners = []
    for num_logits in (0, NUM_TOKENS):
        model = make_model(WRITTEN_OUT["qwen2"])
        model.set_attn_implementation(ATTENTION_NAME)
        runner = CausalRunner(prepared(model, config), config)
        out = runner.forward([RowInput(0, 0, tokens(), num_logits)])
        assert out.logits.shape == (num_logits, VOCAB_SIZE)
        runners.append(runner)
    assert torch.equal(runners[0].cache.buffer, runners[1].cache.buffer)


def test_weights_are_not_held_twice() -> None:
    model = make_model(WRITTEN_OUT["llama"])
    before = sum(weight.numel() for weight in model.parameters())
    decoder = LlamaDecoder(model, 64)
    assert sum(weight.numel() for weight in decoder.parameters()) == before
    assert not list(model.model.layers.parameters())


@torch.inference_mode()
def test_attended_in_one_call_or_in_many_a_row_gets_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five rows, one of which has many new tokens: padded to it, it alone, each alone."""
    config = replace(config_of(), num_rows=5)
    found = []
    for max_short, num_groups in ((16, 1), (8, 2), (0, 5)):
        monkeypatch.setattr(packed, "MAX_SHORT", max_short)
        model = make_model(WRITTEN_OUT["qwen2"])
        model.set_attn_implementation(ATTENTION_NAME)
        runner = CausalRunner(prepared(model, config), config)
        for row in range(5):
            runner.forward([RowInput(row, 0, tokens()[: 10 + row], 0)])
        widths = (1, 2, 9, 2, 1)
        inputs = [RowInput(r, 10 + r, tokens()[:w], w) for r, w in enumerate(widths)]
        assert len(pack(inputs, config.row_len, CPU).groups) == num_groups
        found.append(runner.forward(inputs).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-5)
