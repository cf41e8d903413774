"""Reads the weights of heads, and weights that they share with the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from smartspec_py.engines.checkpoints.checks import ModelError, first_line
from smartspec_py.engines.checkpoints.tensors import check_tensors, file_tensors

LM_HEAD_NAMES = ("lm_head.weight", "model.embed_tokens.weight", "embed_out.weight")
"""Where a target's LM head is: the second one if it is tied to the embedding."""


def of_another_model(folder: Path, difference: str) -> ModelError:
    """The error for heads that do not fit the target. difference: with both values."""
    return ModelError(
        f"the heads {folder} were trained for another model than the target ({difference}): give "
        "heads that were trained for this model, or leave `heads` out"
    )


def load_tensors(folder: Path, files: Sequence[str], kind: str) -> dict[str, torch.Tensor]:
    """The tensors of the first of the files that exists. Raises ModelError.

    kind: what the file has, for messages.
    """
    path = next((folder / name for name in files if (folder / name).is_file()), None)
    if path is None:
        raise ModelError(f"{folder} has no {kind}: it needs one of {', '.join(files)}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise any exception of pickle
        reason = first_line(error)
        raise ModelError(f"{path} cannot be loaded ({reason}): replace the file") from error
    check_tensors(path, loaded)
    tensors: dict[str, torch.Tensor] = loaded
    return tensors


def target_tensor(folder: Path, target: Path, names: Sequence[str], kind: str) -> torch.Tensor:
    """The first of these tensors of the target, from its files. Raises ModelError.

    folder: the heads that need it. kind: what the tensor is, for messages.
    """
    tensors = file_tensors(target)
    known = set(tensors)  # `in` would read a tensor
    if found := next((name for name in names if name in known), None):
        return tensors[found]
    raise ModelError(
        f"{folder} has no {kind} and needs that of the target, but {target} has no "
        f"{names[0]}: copy the whole target"
    )
