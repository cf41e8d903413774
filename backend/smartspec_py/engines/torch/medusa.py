"""Medusa heads: loading them, and the logits that they guess.

A head is some residual blocks x + SiLU(W x + b) on the target's state after its last norm, and an
LM head. Two layouts are read: that of FasterDecoding (`medusa_lm_head.safetensors` or `.pt`) and
that of vLLM (`blocks.`, `lm_heads.`). Heads without LM heads of their own use that of the target.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from smartspec_py.engines.torch.checkpoint import ModelError
from smartspec_py.engines.torch.head_files import LM_HEAD_NAMES, load_tensors, target_tensor

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")

BLOCK = re.compile(r"^(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)\.(?:linear\.)?(weight|bias)$")
"""Head, layer and kind. In FasterDecoding's layout, the last layer of a head is its LM head."""

LM_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")


class MedusaHeads:
    """blocks: for each head its blocks, (weight [H, H], bias [H]). lm_heads: for each head
    [vocab_size, H]; the same tensor if heads share it. token_ids: for a reduced vocabulary, the
    target's token of each row of lm_heads."""

    def __init__(
        self,
        blocks: list[list[tuple[torch.Tensor, torch.Tensor]]],
        lm_heads: list[torch.Tensor],
        vocab_size: int,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        self._blocks = blocks
        self._lm_heads = lm_heads
        self._token_ids = token_ids
        self.vocab_size = vocab_size

    @property
    def num_heads(self) -> int:
        return len(self._blocks)

    @property
    def hidden_size(self) -> int:
        return self._lm_heads[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self._lm_heads[0].device

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """states [n, H] after the last norm -> [n, num_heads, vocab_size], float32. Head i guesses
        the token i + 2 positions after that of the state."""
        found = []
        for blocks in self._blocks:
            guessed = states.to(self._lm_heads[0].dtype)
            for weight, bias in blocks:
                guessed = guessed + F.silu(F.linear(guessed, weight, bias))
            found.append(guessed)
        if all(one is self._lm_heads[0] for one in self._lm_heads):
            logits = F.linear(torch.stack(found, dim=1), self._lm_heads[0]).float()
        else:
            pairs = zip(found, self._lm_heads, strict=True)
            logits = torch.stack([F.linear(one, head) for one, head in pairs], dim=1).float()
        if self._token_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
        whole[..., self._token_ids] = logits
        return whole


def load_heads(
    folder: Path, target: Path, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> MedusaHeads:
    """Load the heads of a target.

    target: directory of the target model. vocab_size: tokens of the tokenizer; logits beyond it are
    removed. Raises ModelError, which names what does not fit.
    """
    tensors = load_tensors(folder, FILES, "Medusa heads")
    config = _config(target)
    hidden_size, num_rows = config["hidden_size"], config["vocab_size"]
    blocks, lm_heads = _parted(tensors)
    if not blocks or sorted(blocks) != list(range(len(blocks))):
        raise ModelError(f"{folder} has no Medusa heads: {FILES[0]} must have tensors of heads 0..")
    token_map = tensors.get("token_map")
    num_rows = num_rows if token_map is None else len(token_map)
    _check(folder, blocks, lm_heads, hidden_size, num_rows)
    token_ids = None
    if token_map is not None:
        token_ids = token_map.to(device, torch.long)
        if int(token_ids.max()) >= vocab_size:
            raise ModelError(
                f"{folder}: token_map has token {int(token_ids.max())}, but {target.name} has "
                f"{vocab_size} tokens: use heads that were trained for this target"
            )
    most = num_rows if token_map is not None else vocab_size
    shared = None
    if not lm_heads:
        shared = target_tensor(folder, target, LM_HEAD_NAMES, "LM heads")[:most].to(device, dtype)
    rows = [
        shared if shared is not None else lm_heads[i][:most].to(device, dtype)
        for i in range(len(blocks))
    ]
    placed = [
        [(weight.to(device, dtype), bias.to(device, dtype)) for _, (weight, bias) in layers]
        for layers in (sorted(blocks[i].items()) for i in range(len(blocks)))
    ]
    return MedusaHeads(placed, rows, vocab_size, token_ids)


_Blocks = dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]]


def _parted(tensors: Mapping[str, torch.Tensor]) -> tuple[_Blocks, dict[int, torch.Tensor]]:
    """Blocks by head and layer, and LM heads by head."""
    weights: dict[tuple[int, int], torch.Tensor] = {}
    biases: dict[tuple[int, int], torch.Tensor] = {}
    lm_heads = {}
    for name, tensor in tensors.items():
        if found := BLOCK.match(name):
            place = (int(found[1]), int(found[2]))
            (weights if found[3] == "weight" else biases)[place] = tensor
        elif found := LM_HEAD.match(name):
            lm_heads[int(found[1])] = tensor
    blocks: _Blocks = {}
    for (head, layer), weight in weights.items():
        if weight.shape[0] != weight.shape[1]:
            lm_heads[head] = weight
            continue
        bias = biases.get((head, layer), torch.zeros(len(weight)))
        blocks.setdefault(head, {})[layer] = (weight, bias)
    return blocks, lm_heads


def _check(
    folder: Path,
    blocks: _Blocks,
    lm_heads: Mapping[int, torch.Tensor],
    hidden_size: int,
    num_rows: int,
) -> None:
    if lm_heads and lm_heads.keys() != blocks.keys():
        missing = min(blocks.keys() ^ lm_heads.keys())
        raise ModelError(f"{folder}: head {missing} is not complete: copy the whole checkpoint")
    for head, layers in blocks.items():
        for weight, bias in layers.values():
            if len(weight) != hidden_size:
                raise ModelError(
                    f"{folder}: head {head} has hidden size {len(weight)}, but the target has "
                    f"{hidden_size}: use heads that were trained for this target"
                )
            if not (weight.isfinite().all() and bias.isfinite().all()):
                raise ModelError(f"{folder}: the weights of head {head} are not all finite")
    for head, rows in lm_heads.items():
        if tuple(rows.shape) != (num_rows, hidden_size):
            raise ModelError(
                f"{folder}: the LM head of head {head} is {tuple(rows.shape)}, but the target "
                f"needs ({num_rows}, {hidden_size}): use heads that were trained for this target"
            )


def _config(target: Path) -> Any:
    return json.loads((target / "config.json").read_text(encoding="utf-8"))
