"""Writes small EAGLE-3 heads with random weights, in both checkpoint layouts, and their target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from smartspec_py.engines.runtimes.runner import RunnerConfig

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
    """Random tensors of a head by their names. layer: the prefix of its one layer."""
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


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with this head: safetensors for Speculators, a pickle for EAGLE."""
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
    """Write a random target; how it and its head are loaded."""
    path = folder / "target"
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(path)
    return RunnerConfig(path, CPU, torch.float32, num_rows=3, max_len=64, vocab_size=VOCAB)
