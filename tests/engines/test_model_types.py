"""Every type of model that is accepted, against Transformers' own attention, by both runners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import merged, random_adapters, shapes_of
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from smartspec_py.engines.checkpoints.adapters import linear_layers
from smartspec_py.engines.checkpoints.checks import (
    GEMMA_4,
    GRANITE_4,
    LFM2,
    MODELS,
    OPENVINO_ONLY,
    RECURRENT,
    ModelError,
    check_model,
)
from smartspec_py.engines.checkpoints.experts import EXPERT_BIAS
from smartspec_py.engines.checkpoints.pair import WINDOWED, has_window
from smartspec_py.engines.checkpoints.rope import fix_longrope
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.model_types import can_write_out
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.pytorch.causal import CausalModel, PyTorchRunner, load_runner
from smartspec_py.engines.runtimes.pytorch.packed import ATTENTION_NAME
from smartspec_py.engines.runtimes.runner import RowInput, Runner, RunnerConfig

pytestmark = pytest.mark.slow  # so that they run beside the others

VOCAB_SIZE = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "query_pre_attn_scalar": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 24,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Small sizes by the names that any of the types has."""

ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-4}
TOKENS = [(7 * i) % 90 + 3 for i in range(40)]


def make_config(kind: str, **more: Any) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[kind]
    names = {name for one in config_class.__mro__ for name in getattr(one, "__annotations__", {})}
    sizes = {name: value for name, value in SIZES.items() if name in names} | more
    if kind in RECURRENT:
        rope = {**PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
        layers = ["linear_attention", "full_attention"]
        sizes |= {"layer_types": layers, "rope_parameters": rope}
    if kind == GRANITE_4:
        sizes |= {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8}
    if kind in LFM2:
        sizes["layer_types"] = ["conv", "full_attention"]
    if kind == "lfm2_moe":
        sizes |= {"num_dense_layers": 1, "routed_scaling_factor": 1.5}
    if kind in GEMMA_4:
        layers = ["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
        sizes |= {"layer_types": layers, "global_head_dim": 16, "vocab_size_per_layer_input": 96}
    return config_class(**sizes)


def check(config: PreTrainedConfig, served: PreTrainedConfig | None = None) -> None:
    """Read in several passes, beside a longer row, as in one pass of Transformers.

    served: the config to serve with, if it is another one.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.inference_mode():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
        for name, bias in model.named_buffers():
            if name.endswith(EXPERT_BIAS):
                bias.uniform_(-0.5, 0.5)
        expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    weights = model.state_dict()
    model = AutoModelForCausalLM.from_config(served or config).eval()
    model.load_state_dict(weights)
    model.set_attn_implementation(ATTENTION_NAME)
    own = RunnerConfig(Path(), torch.device("cpu"), torch.float32, 2, 96, VOCAB_SIZE)
    runners: list[Runner] = []
    if config.model_type not in OPENVINO_ONLY:
        runners.append(PyTorchRunner(CausalModel(model, own), own))
    if can_write_out(config):
        runners.append(OpenVinoRunner(model, own))
    assert runners
    for runner in runners:
        runner.forward([RowInput(0, 0, [9] * 50, 0), RowInput(1, 0, TOKENS[:20], 0, 20)])
        first = runner.forward([RowInput(1, 20, TOKENS[20:26], 6), RowInput(0, 50, [4], 1)])
        second = runner.forward([RowInput(0, 51, [4, 5], 2), RowInput(1, 26, TOKENS[26:], 14)])
        found = torch.cat([first.logits[:6], second.logits[2:]])
        largest = float(expected.abs().max())
        torch.testing.assert_close(found, expected[20:], rtol=0.0, atol=1e-4 * largest)


@pytest.mark.parametrize("kind", MODELS)
def test_type(kind: str) -> None:
    check(make_config(kind))


@pytest.mark.parametrize(("kind", "window"), [("mistral", 1), *((kind, 11) for kind in WINDOWED)])
def test_windows(kind: str, window: int) -> None:
    """All that `check_pair` accepts; 40 tokens are more than both windows."""
    more: dict[str, Any] = {"sliding_window": window}
    if kind.startswith(("qwen", "smollm3")):
        more |= {"use_sliding_window": True, "max_window_layers": 1}
    if kind in ("exaone4", "smollm3"):
        more["layer_types"] = ["sliding_attention", "full_attention"]
    config = make_config(kind, **more)
    assert has_window(config, len(TOKENS))
    check(config)


@pytest.mark.parametrize("kind", ["phi3", "phimoe", "qwen2_moe"])
def test_a_window_of_all_positions(kind: str) -> None:
    """Each type is served with such a window, as it is without one."""
    config = make_config(kind, sliding_window=256)
    assert not has_window(config, config.max_position_embeddings)
    check(config)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotation(rotation: str) -> None:
    settings = {"rope_type": rotation, "rope_theta": 1e4, **ROTATIONS[rotation]}
    check(make_config("llama", rope_parameters=settings, tie_word_embeddings=True))


@pytest.mark.parametrize("trained_len", [16, 64])
def test_longrope(trained_len: int) -> None:
    """With 40 tokens, Transformers uses the long factors in the first case. The factors that are
    served depend on the longest context."""
    settings = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 5.0, 8.0, 9.0],
        "original_max_position_embeddings": trained_len,
    }
    configs = [make_config("phi3", rope_parameters=dict(settings)) for _ in range(2)]
    fix_longrope(configs[1], 50 if trained_len == 64 else 96)
    check(*configs)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("phi3", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
        (
            "granite",
            {
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.3,
                "attention_multiplier": 0.2,
                "logits_scaling": 4.0,
            },
        ),
        (
            "ministral3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 16.0,
                    "original_max_position_embeddings": 8,
                    "llama_4_scaling_beta": 0.5,
                }
            },
        ),
    ],
)
def test_layers_that_differ(kind: str, more: dict[str, Any]) -> None:
    config = make_config(kind, **more)
    assert can_write_out(config)
    check(config)


OF_GEMMA_4: list[dict[str, Any]] = [
    {  # such as E2B
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0,
    },
    {  # such as 31B
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
    {  # such as 26B-A4B
        "enable_moe_block": True,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
    },
]


@pytest.mark.parametrize("more", OF_GEMMA_4)
def test_gemma_4(more: dict[str, Any]) -> None:
    check(make_config("gemma4_text", sliding_window=11, **more))


@pytest.mark.parametrize("more", OF_GEMMA_4)
def test_adapters_of_gemma_4(more: dict[str, Any]) -> None:
    """Of all layers that may have them, beside a text without one. Only the last token of each text
    goes through all layers."""
    config = make_config("gemma4_text", **more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    layers = linear_layers(config)
    assert (layers.keys() < shapes_of(model).keys()) == config.enable_moe_block
    adapters = random_adapters(layers, [3])
    own = RunnerConfig(Path(), torch.device("cpu"), torch.float32, 2, 96, VOCAB_SIZE)
    runner = OpenVinoRunner(model, replace(own, adapters=adapters))
    found = runner.forward([RowInput(i, 0, TOKENS, 1, len(TOKENS), adapter=i) for i in range(2)])
    with torch.inference_mode():
        for served, logits in zip((model, merged(model, adapters, "a")), found.logits, strict=True):
            expected = served(torch.tensor([TOKENS]), use_cache=False).logits[0, -1]
            largest = float(expected.abs().max())
            torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-4 * largest)


def test_states_of_all_tokens_of_gemma_4() -> None:
    """Its last layers compute wanted tokens only, but all if a head reads the states."""
    config = make_config(
        "gemma4_text", num_hidden_layers=4, num_kv_shared_layers=2, hidden_size_per_layer_input=8
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    own = RunnerConfig(Path(), torch.device("cpu"), torch.float32, 1, 96, VOCAB_SIZE)
    runner = OpenVinoRunner(model, replace(own, state_layers=(3, 4)))
    [states] = runner.forward([RowInput(0, 0, TOKENS, 1, len(TOKENS))]).states
    torch.testing.assert_close(states, torch.cat([expected[3][0], expected[4][0]], 1), **CLOSE)


GEMMA_3 = "gemma3", "gemma3_text", "siglip_vision_model"
GEMMA_4_IMAGES = "gemma4", "gemma4_text", "gemma4_vision"
LFM2_VL = "lfm2_vl", "lfm2", "siglip2_vision_model"
MISTRAL_3 = "mistral3", "mistral", "pixtral"
QWEN_3_5 = (
    ("qwen3_5", "qwen3_5_text", "qwen3_5_vision"),
    ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe_vision"),
)
"""Types of a model that reads images, of its language model, and of what reads images."""


@pytest.mark.parametrize(
    ("load", "kind", "text", "vision", "is_tied"),
    [
        *((load, *GEMMA_3, True) for load in (load_runner, load_openvino_runner)),
        *((load, *MISTRAL_3, False) for load in (load_runner, load_openvino_runner)),
        *((load_openvino_runner, *kinds, True) for kinds in (*QWEN_3_5, GEMMA_4_IMAGES, LFM2_VL)),
        *((load_openvino_runner, *kinds, False) for kinds in (QWEN_3_5[0], LFM2_VL)),
    ],
)
def test_the_language_model_of_one_that_reads_images(
    tmp_path: Path,
    kind: str,
    text: str,
    vision: str,
    is_tied: bool,
    load: Callable[[RunnerConfig], Runner],
) -> None:
    """With the names that Transformers writes, and those that the whole model has. Transformers
    ties the output layer by the field of the whole model."""
    images = {"model_type": vision, "hidden_size": 16, "intermediate_size": 24, "patch_size": 14}
    if text in RECURRENT:
        images |= {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
    else:
        images |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = CONFIG_MAPPING[kind](
        text_config=make_config(text).to_dict(),
        vision_config=images,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    expected = model(torch.tensor([TOKENS])).logits[0, -1]
    own = RunnerConfig(tmp_path, torch.device("cpu"), torch.float32, 2, 96, VOCAB_SIZE)
    prompt = [RowInput(0, 0, TOKENS, 1, len(TOKENS))]
    model.save_pretrained(tmp_path)
    check_model("the target", tmp_path)
    torch.testing.assert_close(load(own).forward(prompt).logits[0], expected, **CLOSE)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if is_tied:
        del weights["lm_head.weight"]
    weights["mtp.fc.weight"] = torch.ones(1)
    save_file(weights, tmp_path / "model.safetensors")
    torch.testing.assert_close(load(own).forward(prompt).logits[0], expected, **CLOSE)
    twice = {f"model.{'embedding_norm' if text in LFM2 else 'norm'}.weight": torch.ones(32)}
    save_file(weights | twice, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"have both .*norm\.weight"):
        load(own)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_factors_of_other_types_have_no_effect(kind: str) -> None:
    check(make_config(kind, logits_scaling=4.0, residual_multiplier=0.5))
