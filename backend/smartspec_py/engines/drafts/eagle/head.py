"""EAGLE-3 heads (Li et al., arXiv 2503.01840): loading one, and running its passes.

The head is a draft model of one decoder layer whose input also has hidden states. Slot j of its
cache holds token j together with the target's states at token j - 1: the inputs of some layers of
the target, fused into one vector. After these tokens it drafts the token at j + 1. For further
drafts, its own last state takes the place of the fused one.

A row has no key at slot 0, because token 0 has no state before it. If states of later tokens are
missing too, the row begins at a later slot; see `engines.drafts.eagle.proposer`.

Two layouts are read: that of the EAGLE project (`midlayer.`) and that of speculators (`layers.0.`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from smartspec_py.engines.checkpoints import checks
from smartspec_py.engines.checkpoints.checks import (
    ROTATIONS,
    ModelError,
    read_json,
    wrong_field,
)
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.head_files import (
    LM_HEAD_NAMES,
    load_tensors,
    of_another_model,
    target_tensor,
)
from smartspec_py.engines.checkpoints.rope import IS_OLD, rope_of, use_new_rope
from smartspec_py.engines.checkpoints.sizes import check_sizes
from smartspec_py.engines.checkpoints.tensors import check_finite, check_type
from smartspec_py.engines.runtimes.pytorch.packed import (
    ATTENTION_NAME,
    PackedBatch,
    RowCache,
)
from smartspec_py.engines.runtimes.runner import RunnerConfig
from smartspec_py.faults import cut

FILES = ("model.safetensors", "pytorch_model.bin")
EMBEDDING_NAMES = ("model.embed_tokens.weight",)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NOT_WEIGHTS = ("d2t", "t2d", "verifier_")
"""How tensors begin that are not weights of the head."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """folder: of the head. layer: of its decoder layer. layer_ids: the target's layers whose inputs
    it reads. states_width: of these inputs together. num_drafted: tokens of its vocabulary. The
    flags are those of speculators."""

    folder: Path
    layer: LlamaConfig
    layer_ids: tuple[int, ...]
    states_width: int
    num_drafted: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


def is_eagle(folder: Path) -> bool:
    """Whether the directory has an EAGLE or speculators head."""
    return checks.is_eagle(_document(folder))


def read_config(folder: Path, target: Any) -> EagleConfig:
    """The head's configuration. target: the target's Transformers config.

    Raises ModelError, which names the field that is not supported.
    """
    document = _document(folder)
    of_layer = document.get("transformer_layer_config") or document
    nested = document.get("eagle_config") or {}
    for name, part in (("transformer_layer_config", of_layer), ("eagle_config", nested)):
        if not isinstance(part, dict):
            raise wrong_field(str(folder), name, part, "an object")
    flags = document | nested
    for name in FLAGS:
        if not isinstance(flags.get(name), bool | None):
            raise wrong_field(str(folder), name, flags[name], "true or false")
    layer = _layer(folder, of_layer)
    _check_supported(folder, document, of_layer, layer)
    width = document.get("target_hidden_size")
    if width not in (None, target.hidden_size):
        difference = f"target_hidden_size is {width}, and the target's is {target.hidden_size}"
        raise of_another_model(folder, difference)
    num_drafted = document.get("draft_vocab_size") or target.vocab_size
    if type(num_drafted) is not int or num_drafted < 1:
        rule = "a whole number above 0"
        raise wrong_field(str(folder), "draft_vocab_size", num_drafted, rule)
    if num_drafted > target.vocab_size:
        raise of_another_model(
            folder,
            f"draft_vocab_size is {num_drafted}, and the target has {target.vocab_size} tokens",
        )
    layer_ids = _layer_ids(folder, document, nested, target.num_hidden_layers)
    if not all(0 <= layer_id < target.num_hidden_layers for layer_id in layer_ids):
        raise of_another_model(
            folder,
            f"they read the inputs of the layers {layer_ids}, and the target has layers 0 to "
            f"{target.num_hidden_layers - 1}",
        )
    return EagleConfig(
        folder=folder,
        layer=layer,
        layer_ids=layer_ids,
        states_width=len(layer_ids) * target.hidden_size,
        num_drafted=num_drafted,
        **{name: bool(flags.get(name)) for name in FLAGS},
    )


def _document(folder: Path) -> dict[str, Any]:
    """config.json; empty if there is none. Raises ModelError."""
    return read_json(f"the head {folder}", folder, "config.json") or {}


def _layer(folder: Path, document: Mapping[str, Any]) -> LlamaConfig:
    try:
        layer = LlamaConfig.from_dict(dict(document))
        if IS_OLD:
            use_new_rope(layer, folder)
        LlamaRotaryEmbedding(layer)
    except Exception as error:  # Transformers checks few fields itself
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{folder} has a config.json that Transformers cannot use ({cut(reason, 300)}): "
            "replace it"
        ) from error
    check_sizes(str(folder), layer)
    return layer


def _layer_ids(
    folder: Path, document: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int
) -> tuple[int, ...]:
    """speculators counts the layers whose inputs are read. Configs with `eagle_config` count those
    whose outputs are read, which are one lower."""
    for part, added in ((document, 0), (nested, 1)):
        if ids := part.get(LAYER_IDS):
            if not isinstance(ids, list) or not all(type(layer_id) is int for layer_id in ids):
                raise wrong_field(str(folder), LAYER_IDS, ids, "a list of numbers of layers")
            return tuple(layer_id + added for layer_id in ids)
    return (2, num_layers // 2, num_layers - 3)


def _check_supported(
    folder: Path, document: Mapping[str, Any], of_layer: Mapping[str, Any], layer: LlamaConfig
) -> None:
    """Raise ModelError for the first field with an unsupported value."""
    quantization = document.get("quantization_config") or of_layer.get("quantization_config")
    windows = "sliding_attention" in (of_layer.get("layer_types") or ())
    fields: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("speculators_model_type", document.get("speculators_model_type", "eagle3"), ("eagle3",)),
        ("model_type", of_layer.get("model_type", "llama"), ("llama",)),
        ("num_hidden_layers", layer.num_hidden_layers, (1,)),
        ("hidden_act", layer.hidden_act, ("silu",)),
        ("rope_type", rope_of(layer)["rope_type"], ROTATIONS),
        ("use_sliding_window", bool(of_layer.get("use_sliding_window") or windows), (False,)),
        ("quantization_config", quantization, (None,)),
    )
    for name, value, allowed in fields:
        if value not in allowed:
            names = ", ".join(map(str, allowed))
            raise ModelError(
                f"{folder}: {name} is {value}, but for EAGLE heads only {names} is supported: use "
                "another head"
            )


class EagleHead(torch.nn.Module):
    """The head as a `PackedModel`. `config` is that of its layer, with the target's vocabulary.

    token_ids: the target's token of each row of the LM head; None if these are the first tokens.
    """

    config: LlamaConfig
    reads_states: bool = True

    def __init__(self, weights: Any, config: EagleConfig, token_ids: torch.Tensor | None) -> None:
        """weights: a result of `empty_head` with its weights."""
        super().__init__()
        self.config, self.of, self.token_ids = config.layer, config, token_ids
        self.parts, self._rotary = weights, LlamaRotaryEmbedding(config.layer)

    @property
    def model(self) -> Any:
        """The layers and their rotation, as Transformers' models have them."""
        return SimpleNamespace(layers=self.parts.layers, rotary_emb=self._rotary)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [N, width of all layers] -> [N, hidden_size]."""
        if self.of.norm_before_fc:
            states = self.parts.input_norm(states)
        if self.of.fc_norm:
            norms = self.parts.fc_norm
            pairs = zip(norms, states.chunk(len(norms), dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        fused: torch.Tensor = self.parts.fc(states)
        return fused

    def forward(self, packed: PackedBatch, cache: RowCache) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PackedModel`. The states that it reads are fused or its own, [N, hidden_size]; those
        that it returns are to be fed back."""
        states = packed.states
        assert states is not None
        layer = self.parts.layers[0]
        normed = layer.hidden_norm(states)
        embedded = layer.input_layernorm(self.parts.embed_tokens(packed.token_ids[0]))
        cache.slots, cache.write = packed.slots, packed.write
        attended, _ = layer.self_attn(
            torch.cat([embedded, normed], -1)[None],
            position_embeddings=self._rotary(states, packed.positions),
            attention_mask=None,
            past_key_values=cache,
            attention=packed.attention,
        )
        states = (normed if self.of.norm_before_residual else states) + attended[0]
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        normed = self.parts.norm(states)
        return normed, normed if self.of.norm_output else states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `PackedModel`."""
        return self.all_logits(self.parts.lm_head(hidden).float())

    def all_logits(self, drafted: torch.Tensor) -> torch.Tensor:
        """Logits of the target's vocabulary. Tokens that the head lacks are never drafted."""
        if self.token_ids is None:
            return drafted
        logits = drafted.new_full((len(drafted), self.config.vocab_size), -torch.inf)
        logits[:, self.token_ids] = drafted
        return logits


def load_eagle(config: EagleConfig, run_config: RunnerConfig) -> EagleHead:
    """Load the head of a target.

    run_config: how it is run; `path` is the directory of the target. Raises ModelError, which names
    what does not fit.
    """
    folder, target = config.folder, load_config(run_config.path, run_config.max_len)
    stored = load_tensors(folder, FILES, "EAGLE head")
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
    if len(tensors) < len(stored):
        raise ModelError(f"{folder} has tensors of both midlayer and layers.0: use another head")
    token_ids = _token_ids(folder, tensors, config.num_drafted, target.vocab_size)
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(NOT_WEIGHTS)}
    for name, names in (("embed_tokens", EMBEDDING_NAMES), ("lm_head", LM_HEAD_NAMES)):
        if f"{name}.weight" not in weights:
            of_target = target_tensor(folder, run_config.path, names, name)
            if of_target.shape[1] != config.layer.hidden_size:
                raise of_another_model(
                    folder,
                    f"they have no {name}, and their hidden_size is {config.layer.hidden_size}, "
                    f"but the target's is {of_target.shape[1]}",
                )
            weights[f"{name}.weight"] = of_target[token_ids] if name == "lm_head" else of_target
    config.layer.vocab_size = min(run_config.vocab_size, target.vocab_size)
    module = empty_head(config, target)
    for name, tensor in weights.items():
        check_type(name, tensor.dtype, folder)
    placed = {
        name: tensor.to(run_config.device, run_config.dtype) for name, tensor in weights.items()
    }
    for name, tensor in placed.items():
        check_finite(name, tensor, run_config.dtype, folder)
    _check_shapes(folder, placed, module)
    try:
        module.load_state_dict(placed, assign=True)
    except RuntimeError as error:
        # PyTorch names missing and unknown weights, and those of other shapes.
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{folder}: the weights are not those of an EAGLE-3 head ({reason}): use another head"
        ) from error
    ids = token_ids[token_ids < run_config.vocab_size].to(run_config.device)
    rows = module.lm_head.weight.detach()[(token_ids < run_config.vocab_size).to(run_config.device)]
    module.lm_head.weight = torch.nn.Parameter(rows, requires_grad=False)
    has_all = ids.tolist() == list(range(run_config.vocab_size))
    head = EagleHead(module, config, None if has_all else ids).to(run_config.device)
    return head.eval()


def _check_shapes(folder: Path, weights: Mapping[str, torch.Tensor], module: Any) -> None:
    """Check the weights whose shapes the target decides. module: a result of `empty_head`."""
    for name, part in (("embed_tokens.weight", module.embed_tokens), ("fc.weight", module.fc)):
        needed = tuple(part.weight.shape)
        found = tuple(weights[name].shape) if name in weights else needed
        if found != needed:
            raise of_another_model(
                folder, f"{name} has the shape {found}, and with this target it must be {needed}"
            )


def _token_ids(
    folder: Path, tensors: Mapping[str, torch.Tensor], num_drafted: int, vocab_size: int
) -> torch.Tensor:
    """The target's token of each of the head's tokens. d2t holds the differences between both."""
    if "d2t" not in tensors and num_drafted != vocab_size:
        raise ModelError(
            f"{folder}: draft_vocab_size is {num_drafted}, but the target has {vocab_size} tokens "
            "and the weight file lacks d2t: copy the whole checkpoint, or give heads that were "
            "trained for this model"
        )
    offsets = tensors.get("d2t", torch.zeros(num_drafted, dtype=torch.long))
    if offsets.shape != (num_drafted,):
        raise ModelError(
            f"{folder}: d2t has {' x '.join(map(str, offsets.shape))} entries, but needs "
            f"{num_drafted}, the draft_vocab_size: copy the whole checkpoint"
        )
    tokens = torch.arange(num_drafted) + offsets.long()
    if not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        raise of_another_model(
            folder,
            f"d2t has tokens {int(tokens.min())} to {int(tokens.max())}, and the target has "
            f"{vocab_size} tokens",
        )
    drafted = sorted(tokens.tolist())
    # The mask t2d may be padded in another way.
    known = tensors["t2d"].nonzero().flatten().tolist() if "t2d" in tensors else drafted
    if drafted != known or len(set(drafted)) < num_drafted:
        raise ModelError(
            f"{folder}: d2t must have the tokens of t2d, each once, as differences to 0, 1, 2, ..: "
            "use another head"
        )
    return tokens


def empty_head(config: EagleConfig, target: Any) -> Any:
    """The head's modules by the names of speculators, without memory. target: its config."""
    layer, width = config.layer, config.layer.hidden_size
    eps = layer.rms_norm_eps
    made: Any = torch.nn.Module()
    with torch.device("meta"):
        made.embed_tokens = torch.nn.Embedding(target.vocab_size, width)
        made.fc = torch.nn.Linear(config.states_width, width, bias=False)
        made.lm_head = torch.nn.Linear(width, config.num_drafted, bias=False)
        made.norm = LlamaRMSNorm(width, eps)
        if config.norm_before_fc:
            made.input_norm = LlamaRMSNorm(config.states_width, eps)
        if config.fc_norm:
            norms = [LlamaRMSNorm(target.hidden_size, eps) for _ in config.layer_ids]
            made.fc_norm = torch.nn.ModuleList(norms)
        layer._attn_implementation = ATTENTION_NAME
        only: Any = LlamaDecoderLayer(layer, 0)
        only.hidden_norm = LlamaRMSNorm(width, eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(only.self_attn, name)
            has_bias = old.bias is not None
            new = torch.nn.Linear(2 * width, old.out_features, bias=has_bias)
            setattr(only.self_attn, name, new)
        made.layers = torch.nn.ModuleList([only])
    return made
