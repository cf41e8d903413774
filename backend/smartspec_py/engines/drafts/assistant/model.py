"""The files of an assistant of Gemma 4, and its structure.

An assistant is a small Gemma 4 without keys and values of its own: each of its layers attends to
those of the target's last layer of its kind. It reads a token, by the target's embedding, and the
target's state after the last norm from which this token was drawn. For further drafts, its own
state takes the place of the target's. The position stays the same, and so do the keys.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from smartspec_py.engines.checkpoints.checks import (
    ASSISTANTS,
    GEMMA_4,
    ModelError,
    read_json,
    wrong_field,
)
from smartspec_py.engines.checkpoints.config import key_shape, model_without_weights
from smartspec_py.engines.checkpoints.head_files import of_another_model
from smartspec_py.engines.checkpoints.sizes import check_sizes

ORDERING = "masked_embedding.token_ordering"
"""Of the files: the tokens of each cluster, [clusters * tokens of a cluster]."""


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """folder: of the assistant. text: the Transformers config of its layers. backbone: width of the
    target's states. num_clusters, num_chosen: clusters of tokens, and those whose tokens are
    drafted; 0 if all tokens are. keys: by type of layer in their order, which layer of the target
    it attends to, and how many numbers a token's keys have there.
    """

    folder: Path
    text: Any
    backbone: int
    num_clusters: int
    num_chosen: int
    keys: dict[str, tuple[int, int]]

    @property
    def states_width(self) -> int:
        """Of a token's state and its keys and values, as the target gives them."""
        return self.backbone + 2 * sum(width for _, width in self.keys.values())


def is_assistant(folder: Path) -> bool:
    """Whether the directory has such a model. Raises ModelError."""
    document = read_json(f"the head {folder}", folder, "config.json") or {}
    return document.get("model_type") in ASSISTANTS


def read_assistant(folder: Path, target: Any) -> AssistantConfig:
    """target: the target's Transformers config. Raises ModelError, which names the field."""
    if target.model_type not in GEMMA_4:
        difference = f"the target is of the type {target.model_type}, not {' or '.join(GEMMA_4)}"
        raise of_another_model(folder, difference)
    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = deepcopy(whole.get_text_config())
        text.num_kv_shared_layers = 0  # for Transformers; see `assistant_model`
    except Exception as error:  # Transformers checks few fields itself
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder} has a config.json that cannot be used ({reason})") from error
    check_sizes(str(folder), text)
    if whole.backbone_hidden_size != target.hidden_size:
        difference = f"backbone_hidden_size is {whole.backbone_hidden_size}"
        raise of_another_model(folder, f"{difference}, and the target's is {target.hidden_size}")
    if text.vocab_size != target.vocab_size:
        difference = f"vocab_size is {text.vocab_size}, and the target's is {target.vocab_size}"
        raise of_another_model(folder, difference)
    num_clusters = num_chosen = 0
    if whole.use_ordered_embeddings:
        num_clusters, num_chosen = whole.num_centroids, whole.centroid_intermediate_top_k
        if num_clusters < 1 or text.vocab_size % num_clusters:
            rule = f"a divisor of the vocab_size of {text.vocab_size}"
            raise wrong_field(str(folder), "num_centroids", num_clusters, rule)
        if not 1 <= num_chosen <= num_clusters:
            rule = f"a whole number in 1..{num_clusters}"
            raise wrong_field(str(folder), "centroid_intermediate_top_k", num_chosen, rule)
    return AssistantConfig(
        folder, text, target.hidden_size, num_clusters, num_chosen, _keys(folder, text, target)
    )


def _keys(folder: Path, text: Any, target: Any) -> dict[str, tuple[int, int]]:
    """`AssistantConfig.keys`."""
    num_own = target.num_hidden_layers - target.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(target.layer_types[:num_own])}
    for index, kind in enumerate(text.layer_types):
        ours, theirs = key_shape(text, index), key_shape(target, last[kind])
        if ours[1] != theirs[1] or text.num_attention_heads % theirs[0]:
            raise of_another_model(
                folder,
                f"heads of its layer {index} are {ours[1]} wide, and the target has {theirs[0]} "
                f"heads of {theirs[1]} there",
            )
    return {kind: (last[kind], _product(key_shape(target, last[kind]))) for kind in sorted(last)}


def _product(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def assistant_model(config: AssistantConfig) -> Any:
    """The assistant as a model of Transformers without weights. It has further modules:
    `pre_projection`, `post_projection` and, with clusters, `masked_embedding.centroids`."""
    model = model_without_weights(config.text)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.is_kv_shared_layer = True
        if attention.sliding_window:  # it asks as the token before its own
            attention.sliding_window = max(1, attention.sliding_window - 1)
        for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
            delattr(attention, part)
    width = config.text.hidden_size
    with torch.device("meta"):
        model.pre_projection = torch.nn.Linear(2 * config.backbone, width, bias=False)
        model.post_projection = torch.nn.Linear(width, config.backbone, bias=False)
        if config.num_clusters:
            centroids = torch.nn.Linear(width, config.num_clusters, bias=False)
            model.masked_embedding = torch.nn.ModuleDict({"centroids": centroids})
    return model
