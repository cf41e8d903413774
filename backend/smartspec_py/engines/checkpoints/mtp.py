"""The layer of Qwen3.5 that drafts (multi-token prediction, MTP), in the files of the model.

It is one layer with attention. It reads a token and the model's state at the token before, after
the last norm, and shares embedding and output layer with the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from smartspec_py.engines.checkpoints.checks import RECURRENT
from smartspec_py.engines.checkpoints.config import model_without_weights
from smartspec_py.engines.checkpoints.tensors import file_tensors

MTP = "mtp"
"""How the names of its weights begin."""

NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
"""Of what it reads."""

OF_MODEL = "model."
SHARED = ("model.embed_tokens.weight", "lm_head.weight")


def has_mtp(folder: Path, hf_config: Any) -> bool:
    """Whether the files of this model have such a layer. Many that were quantised lack it."""
    return hf_config.model_type in RECURRENT and f"{MTP}.fc.weight" in set(file_tensors(folder))


def mtp_model(hf_config: Any) -> Any:
    """The layer as a model of Transformers with one layer, without weights. It has further modules:
    `fc`, which joins what is read, and NORMS. hf_config: of the whole model."""
    config = deepcopy(hf_config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    model, width = model_without_weights(config), config.hidden_size
    with torch.device("meta"):
        model.fc = torch.nn.Linear(2 * width, width, bias=False)
        for name in NORMS:
            setattr(model, name, type(model.model.norm)(width, eps=config.rms_norm_eps))
    return model


def mtp_parameters(hf_config: Any) -> Mapping[str, torch.Tensor]:
    """Its own parameters by their names in files, without memory."""
    return {
        f"{MTP}.{name.removeprefix(OF_MODEL)}": parameter
        for name, parameter in mtp_model(hf_config).named_parameters()
        if name not in SHARED
    }


def num_own_weights(hf_config: Any) -> int:
    """Of `mtp_parameters`."""
    return sum(parameter.numel() for parameter in mtp_parameters(hf_config).values())
