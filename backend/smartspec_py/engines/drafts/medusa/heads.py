"""Medusa heads: loading them, and the logits that they guess.

A head is some residual blocks x + SiLU(W x + b) on the target's state after its last norm, and an
LM head. Two layouts are read: that of FasterDecoding (`medusa_lm_head.safetensors` or `.pt`) and
that of vLLM (`blocks.`, `lm_heads.`). Heads without LM heads of their own use that of the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.head_files import (
    LM_HEAD_NAMES,
    load_tensors,
    of_another_model,
    target_tensor,
)
from smartspec_py.engines.checkpoints.tensors import check_type
from smartspec_py.engines.runtimes.runner import RunnerConfig

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")

BLOCK = re.compile(r"^(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)\.(?:linear\.)?(weight|bias)$")
"""Head, layer and kind. In FasterDecoding's layout, the last layer of a head is its LM head."""

LM_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")
TOKEN_MAP = re.compile(r"^token_map$")


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
        guesses = []
        for blocks in self._blocks:
            guessed = states.to(self._lm_heads[0].dtype)
            for weight, bias in blocks:
                guessed = guessed + F.silu(F.linear(guessed, weight, bias))
            guesses.append(guessed)
        if all(head is self._lm_heads[0] for head in self._lm_heads):
            logits = F.linear(torch.stack(guesses, dim=1), self._lm_heads[0]).float()
        else:
            pairs = zip(guesses, self._lm_heads, strict=True)
            logits = torch.stack([F.linear(guess, head) for guess, head in pairs], dim=1).float()
        if self._token_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
        whole[..., self._token_ids] = logits
        return whole


def load_heads(folder: Path, run_config: RunnerConfig) -> MedusaHeads:
    """Load the heads of a target.

    run_config: how the target runs; logits beyond its `vocab_size` are removed. Raises ModelError,
    which names what does not fit.
    """
    tensors = load_tensors(folder, FILES, "Medusa heads")
    target = load_config(run_config.path, run_config.max_len)
    for name, tensor in tensors.items():
        if not TOKEN_MAP.match(name):
            check_type(name, tensor.dtype, folder)
    blocks, lm_heads = _parted(folder, tensors)
    if not blocks or sorted(blocks) != list(range(len(blocks))):
        raise ModelError(f"{folder} has no Medusa heads: {FILES[0]} must have tensors of heads 0..")
    known = (BLOCK, LM_HEAD, TOKEN_MAP)
    if others := [name for name in tensors if not any(pattern.match(name) for pattern in known)]:
        raise ModelError(f"{folder} has the tensor {others[0]}, which Medusa heads do not have")
    num_rows, num_kept, token_ids = target.vocab_size, run_config.vocab_size, None
    if "token_map" in tensors:
        token_ids = _token_map(folder, tensors["token_map"], run_config).to(run_config.device)
        num_rows = num_kept = len(token_ids)
    _check(folder, blocks, lm_heads, (num_rows, target.hidden_size))
    lm_heads = {head: rows[:num_kept] for head, rows in lm_heads.items()}
    if not lm_heads:
        shared = target_tensor(folder, run_config.path, LM_HEAD_NAMES, "LM heads")[:num_kept]
        lm_heads = dict.fromkeys(blocks, shared)

    @cache
    def placed(tensor: torch.Tensor) -> torch.Tensor:
        """On the device. Heads that share a tensor share its copy."""
        return tensor.to(run_config.device, run_config.dtype)

    return MedusaHeads(
        [
            [(placed(weight), placed(bias)) for _, (weight, bias) in sorted(layers.items())]
            for _, layers in sorted(blocks.items())
        ],
        [placed(lm_heads[head]) for head in sorted(blocks)],
        run_config.vocab_size,
        token_ids,
    )


def _token_map(folder: Path, stored: torch.Tensor, run_config: RunnerConfig) -> torch.Tensor:
    tokens = stored.flatten().tolist()
    if stored.ndim != 1 or not tokens or len(set(tokens)) < len(tokens):
        raise ModelError(f"{folder}: token_map must have tokens, each once: use other heads")
    if wrong := [token for token in tokens if token not in range(run_config.vocab_size)]:
        raise of_another_model(
            folder,
            f"token_map has token {wrong[0]}, and the target has {run_config.vocab_size} tokens",
        )
    return stored.long()


_Blocks = dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]]


def _parted(
    folder: Path, tensors: Mapping[str, torch.Tensor]
) -> tuple[_Blocks, dict[int, torch.Tensor]]:
    """Blocks by head and layer, and LM heads by head."""
    parts: dict[str, dict[tuple[int, int], torch.Tensor]] = {"weight": {}, "bias": {}}
    lm_heads, blocks = {}, _Blocks()
    for name, tensor in tensors.items():
        if match := BLOCK.match(name):
            parts[match[3]][int(match[1]), int(match[2])] = tensor
        elif match := LM_HEAD.match(name):
            lm_heads[int(match[1])] = tensor
    for (head, layer), weight in parts["weight"].items():
        if weight.ndim != 2:
            raise ModelError(
                f"{folder}: a weight of head {head} has the shape {tuple(weight.shape)}, and is no "
                "matrix: use other heads"
            )
        if weight.shape[0] != weight.shape[1]:
            lm_heads[head] = weight
            continue
        bias = parts["bias"].pop((head, layer), torch.zeros(len(weight)))
        blocks.setdefault(head, {})[layer] = (weight, bias)
    if parts["bias"]:
        head, layer = min(parts["bias"])
        raise ModelError(f"{folder}: head {head} has a bias of layer {layer} without a block")
    return blocks, lm_heads


def _check(
    folder: Path, blocks: _Blocks, lm_heads: Mapping[int, torch.Tensor], shape: tuple[int, int]
) -> None:
    """shape: of an LM head."""
    if lm_heads and lm_heads.keys() != blocks.keys():
        missing = min(blocks.keys() ^ lm_heads.keys())
        raise ModelError(f"{folder}: head {missing} is not complete: copy the whole checkpoint")
    for head, layers in blocks.items():
        for weight, bias in layers.values():
            if len(weight) != shape[1]:
                raise of_another_model(
                    folder,
                    f"head {head} has hidden size {len(weight)}, and the target's is {shape[1]}",
                )
            if bias.shape != weight.shape[:1]:
                raise ModelError(
                    f"{folder}: a bias of head {head} has the shape {tuple(bias.shape)}, but needs "
                    f"{tuple(weight.shape[:1])}: use other heads"
                )
            if not (weight.isfinite().all() and bias.isfinite().all()):
                raise ModelError(f"{folder}: the weights of head {head} are not all finite")
    for head, rows in lm_heads.items():
        if tuple(rows.shape) != shape:
            raise of_another_model(
                folder,
                f"the LM head of head {head} has the shape {tuple(rows.shape)}, and with this "
                f"target it must be {shape}",
            )
