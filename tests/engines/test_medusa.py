"""Medusa heads: both checkpoint layouts against a short reference, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.drafts.medusa.heads import MedusaHeads, load_heads
from smartspec_py.engines.runtimes.runner import RunnerConfig

HIDDEN, ROWS, VOCAB = 16, 40, 36  # the target pads its vocabulary
NUM_HEADS, NUM_LAYERS = 3, 2
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "vocab_size": ROWS,
    "num_attention_heads": 2,
}

torch.manual_seed(0)
WEIGHTS = torch.randn(NUM_HEADS, NUM_LAYERS, HIDDEN, HIDDEN) / 4
BIASES = torch.randn(NUM_HEADS, NUM_LAYERS, HIDDEN)
OWN = torch.randn(NUM_HEADS, ROWS, HIDDEN)
TARGET = torch.randn(ROWS, HIDDEN)
STATES = torch.randn(5, HIDDEN)


def expected(lm_heads: list[torch.Tensor]) -> torch.Tensor:
    found = []
    for head in range(NUM_HEADS):
        x = STATES
        for layer in range(NUM_LAYERS):
            x = x + F.silu(x @ WEIGHTS[head, layer].T + BIASES[head, layer])
        found.append(x @ lm_heads[head].T)
    return torch.stack(found, dim=1)


def blocks(name: str) -> dict[str, torch.Tensor]:
    found = {}
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            key = name.format(head=head, layer=layer)
            found[f"{key}.weight"] = WEIGHTS[head, layer].clone()
            found[f"{key}.bias"] = BIASES[head, layer].clone()
    return found


FASTER = blocks("{head}.{layer}.linear")
FASTER_OWN = FASTER | {f"{i}.{NUM_LAYERS}.weight": OWN[i].clone() for i in range(NUM_HEADS)}
VLLM = blocks("blocks.{head}.layers.{layer}")
VLLM_OWN = VLLM | {f"lm_heads.{i}.weight": OWN[i].clone() for i in range(NUM_HEADS)}


def target_folder(folder: Path, name: str = "lm_head.weight") -> Path:
    made = folder / "target"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: TARGET}, made / "model.safetensors")
    return made


def own(target: Path) -> RunnerConfig:
    return RunnerConfig(target, torch.device("cpu"), torch.float32, 1, 64, VOCAB)


def loaded(folder: Path, tensors: dict[str, Any], file: str, **more: Any) -> MedusaHeads:
    (folder / "heads").mkdir()
    path = folder / "heads" / file
    if path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    target = target_folder(folder, **more)
    return load_heads(folder / "heads", own(target))


@pytest.mark.parametrize(
    ("tensors", "file"),
    [
        (FASTER_OWN, "medusa_lm_head.pt"),
        (FASTER_OWN, "medusa_lm_head.safetensors"),
        (VLLM_OWN, "model.safetensors"),
    ],
)
def test_layouts_with_lm_heads_of_their_own(
    tmp_path: Path, tensors: dict[str, torch.Tensor], file: str
) -> None:
    heads = loaded(tmp_path, tensors, file)
    assert (heads.num_heads, heads.hidden_size) == (NUM_HEADS, HIDDEN)
    torch.testing.assert_close(heads.logits(STATES), expected(list(OWN))[..., :VOCAB])


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_heads_that_share_the_targets_lm_head(tmp_path: Path, name: str) -> None:
    heads = loaded(tmp_path, FASTER, "medusa_lm_head.safetensors", name=name)
    torch.testing.assert_close(heads.logits(STATES), expected([TARGET] * NUM_HEADS)[..., :VOCAB])


def test_a_reduced_vocabulary(tmp_path: Path) -> None:
    tokens = torch.tensor([3, 35, 0, 7])
    small = {f"lm_heads.{i}.weight": OWN[i, tokens].clone() for i in range(NUM_HEADS)}
    heads = loaded(tmp_path, VLLM | small | {"token_map": tokens}, "model.safetensors")
    found, whole = heads.logits(STATES), expected(list(OWN))
    assert found.shape == (5, NUM_HEADS, VOCAB)
    torch.testing.assert_close(found[..., tokens], whole[..., tokens])
    assert int(found.isfinite().sum()) == 5 * NUM_HEADS * 4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": torch.zeros(1)}, "has no Medusa heads"),
        (VLLM_OWN | {"fc.weight": torch.zeros(1)}, "has the tensor fc.weight, which Medusa heads"),
        ({k: v for k, v in FASTER.items() if not k.startswith("0.")}, "tensors of heads 0"),
        ({k: v for k, v in VLLM_OWN.items() if k != "lm_heads.1.weight"}, "head 1 is not complete"),
        (
            FASTER | {"1.0.linear.weight": torch.zeros(8, 8)},
            r"another model than the target \(head 1 has hidden size 8, and the target's is 16\): "
            "give heads that were trained for this model, or leave `heads` out$",
        ),
        (FASTER | {"2.1.linear.bias": torch.full((HIDDEN,), torch.nan)}, "head 2 are not all fin"),
        (
            VLLM_OWN | {"lm_heads.0.weight": torch.zeros(30, HIDDEN)},
            r"LM head of head 0 has the shape \(30, 16\), and with this target .* \(40, 16\)",
        ),
        (
            VLLM_OWN | {"token_map": torch.tensor([3, 38])},
            "token_map has token 38, and the target has 36 tokens",
        ),
        (VLLM_OWN | {"token_map": torch.tensor([3, -1])}, "token_map has token -1"),
        (VLLM_OWN | {"token_map": torch.tensor([3, 3])}, "token_map must have tokens, each once"),
        (VLLM_OWN | {"token_map": torch.zeros(0)}, "token_map must have tokens"),
        (FASTER | {"1.0.linear.bias": torch.zeros(1)}, r"bias of head 1 has the shape \(1,\), but"),
        (FASTER | {"1.0.linear.weight": torch.zeros(16)}, r"has the shape \(16,\), and is no mat"),
        (FASTER | {"1.9.linear.bias": torch.zeros(16)}, "head 1 has a bias of layer 9 without"),
        (
            FASTER | {"1.0.linear.weight": torch.zeros(16, 16, dtype=torch.int8)},
            "1.0.linear.weight of the type int8",
        ),
    ],
)
def test_refused_checkpoints(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path, tensors, "medusa_lm_head.safetensors")


def test_refused_folders(tmp_path: Path) -> None:
    target = target_folder(tmp_path, name="other")
    with pytest.raises(ModelError, match="has no Medusa heads: it needs one of"):
        load_heads(target / "none", own(target))
    (tmp_path / "heads").mkdir()
    save_file(FASTER, tmp_path / "heads" / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match="has no LM heads and needs that of the target"):
        load_heads(tmp_path / "heads", own(target))
    (tmp_path / "heads" / "medusa_lm_head.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_heads(tmp_path / "heads", own(target))
