"""Checks from the files alone whether a draft model can draft for a target.

Drafted token ids are used as the target's ids, so each id must mean the same token in both models.
The `vocab_size` of the models may differ, because checkpoints are padded beyond their tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from smartspec_py.engines.checkpoints.checks import (
    GEMMA_4,
    GPT_OSS,
    GRANITE_4,
    LFM2,
    RECURRENT,
    ModelError,
    check_files,
    check_model,
    check_quantization,
    read_json,
    wrong_field,
)
from smartspec_py.engines.checkpoints.gguf.folder import INDEX
from smartspec_py.engines.checkpoints.recurrent import CONV, LINEAR_ATTENTION
from smartspec_py.engines.checkpoints.sizes import check_sizes
from smartspec_py.faults import cut, shown

WINDOWED = (
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3_text",
    *GEMMA_4,
    GPT_OSS,
    "mistral",
    "mixtral",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)
"""Model types whose sliding windows match Transformers in tests. Those of phimoe and qwen2_moe do
not."""

TOKENIZER_NAME = "tokenizer.json"
UNUSUAL = "\ue000"
"""A character that no vocabulary has: it needs bytes or an unknown token."""

OTHER_TOKENIZER = "choose a draft that was trained with the target's tokenizer"


class CheckedTokenizer(NamedTuple):
    """tokenizer: of the library `tokenizers`. token_ids: with added tokens. added: the highest id
    that the tokenizer adds to texts."""

    tokenizer: Any
    token_ids: dict[str, int]
    added: int

    @property
    def num_ids(self) -> int:
        """The highest id plus one. Ids may have gaps."""
        return max(self.token_ids.values()) + 1


class _Model(NamedTuple):
    """One model's directory. name: as messages name it, with its role."""

    name: str
    folder: Path
    config: Any
    tokenizer: CheckedTokenizer
    end_token: str | None


def check_pair(
    target_dir: Path, draft_dir: Path | None, max_context_len: int | None = None
) -> CheckedTokenizer:
    """Raise ModelError unless the target and the draft, if any, can be served together.

    max_context_len: also check that the target supports requests of this many tokens. A draft with
    fewer positions does not draft beyond them.

    Returns the target's tokenizer, which takes half a second to read.
    """
    # Checks without libraries come first: importing a library takes seconds.
    check_pair_files(target_dir, draft_dir, max_context_len)
    return check_pair_settings(target_dir, draft_dir, max_context_len)


def check_pair_settings(
    target_dir: Path, draft_dir: Path | None, max_context_len: int | None = None
) -> CheckedTokenizer:
    """The part of `check_pair` that needs no weights. Raises ModelError."""
    for role, folder in (("target", target_dir), ("draft", draft_dir)):
        if folder is not None:
            check_model(_named(role, folder), folder)
    target = _read_model("target", target_dir, max_context_len)
    _check_context(target.name, positions_of(target.config.to_dict()), max_context_len)
    if draft_dir is not None:
        # Many pairs have identical files of 10 MB or more.
        of_target, of_draft = target_dir / TOKENIZER_NAME, draft_dir / TOKENIZER_NAME
        is_shared = of_draft.is_file() and of_draft.read_bytes() == of_target.read_bytes()
        tokenizer = target.tokenizer if is_shared else None
        draft = _read_model("draft", draft_dir, max_context_len, tokenizer)
        _compare(target, draft)
    return target.tokenizer


def check_pair_files(
    target_dir: Path, draft_dir: Path | None, max_context_len: int | None = None
) -> None:
    """The part of `check_pair` without Transformers and PyTorch: missing or truncated files, and
    too few positions, if config.json has their number. Raises ModelError."""
    for role, folder in (("target", target_dir), ("draft", draft_dir)):
        if folder is not None:
            check_files(_named(role, folder), folder)
            _check_has_tokenizer(_named(role, folder), folder)
    name = _named("target", target_dir)
    document = read_json(name, target_dir, "config.json") or {}
    # If it has no such number, Transformers knows.
    _check_context(name, positions_of(document), max_context_len)


def _named(role: str, folder: Path) -> str:
    """For messages. A folder that was made of a GGUF file has the name of the file."""
    is_made = (folder / INDEX).is_file()
    return f"the {role} {f'{folder.name}.gguf' if is_made else folder}"


def _check_has_tokenizer(name: str, folder: Path) -> None:
    if not (folder / TOKENIZER_NAME).is_file():
        raise ModelError(
            f"{name} has no tokenizer.json: save a fast tokenizer there, with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )


def _read_model(
    role: str, folder: Path, max_context_len: int | None, tokenizer: CheckedTokenizer | None = None
) -> _Model:
    """tokenizer: if it is already known."""
    name = _named(role, folder)
    config = _read_config(name, folder)
    _check_layers(name, config, max_context_len)
    tokenizer = tokenizer or _read_tokenizer(name, folder)
    highest = max(tokenizer.added, tokenizer.num_ids - 1)
    if highest >= config.vocab_size:
        raise ModelError(
            f"{name} has a vocab_size of {config.vocab_size}, but its tokenizer has "
            f"the token id {highest}: use the tokenizer that the model was trained with"
        )
    end = (read_json(name, folder, "tokenizer_config.json") or {}).get("eos_token")
    end_token = end.get("content") if isinstance(end, dict) else end
    return _Model(name, folder, config, tokenizer, end_token)


def _read_tokenizer(name: str, folder: Path) -> CheckedTokenizer:
    from smartspec_py.engines.tokenizer_file import read_tokenizer

    _check_has_tokenizer(name, folder)
    try:
        tokenizer = read_tokenizer(folder)
    except Exception as error:  # tokenizers raises no more specific type
        raise ModelError(
            f"{name} has a tokenizer.json that cannot be used ({error}): replace it"
        ) from error
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise ModelError(f"{name} has a tokenizer.json without tokens: replace it")
    return CheckedTokenizer(tokenizer, vocab, _tried(name, tokenizer))


def _merges(model: _Model) -> list[Any]:
    """Of a BPE tokenizer; empty for other kinds."""
    document = read_json(model.name, model.folder, TOKENIZER_NAME) or {}
    merges = document["model"].get("merges") or []
    # Older files store one string per merge.
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]


def _tried(name: str, tokenizer: Any) -> int:
    """The highest id of a text with UNUSUAL, and so of the tokens that are added to each text."""
    try:
        return max(tokenizer.encode(UNUSUAL).ids, default=-1)
    except Exception as error:  # tokenizers raises no more specific type
        raise ModelError(
            f"{name} has a tokenizer.json that cannot encode every text ({error}): replace it"
        ) from error


def _read_config(name: str, folder: Path) -> Any:
    """The model's configuration, with the defaults of its class filled in."""
    from smartspec_py.engines.checkpoints.config import text_config

    check_quantization(name, folder)
    try:
        config = text_config(folder)
    except Exception as error:  # Transformers checks few fields itself
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{name} has a config.json that Transformers cannot use ({cut(reason, 300)}): replace "
            "it, or use a model type that Transformers supports"
        ) from error
    check_sizes(name, config)
    return config


def _check_layers(name: str, config: Any, max_context_len: int | None) -> None:
    longest = max_context_len or getattr(config, "max_position_embeddings", None)
    layers = set(getattr(config, "layer_types", None) or ())
    layers -= {"full_attention", "sliding_attention"}
    if config.model_type in (*RECURRENT, GRANITE_4):
        layers.discard(LINEAR_ATTENTION)
    if config.model_type in LFM2:
        layers.discard(CONV)
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 1 and has_window(config, longest):
        raise wrong_field(name, "sliding_window", window, "a whole number above 0, or null")
    if has_window(config, longest) and config.model_type not in WINDOWED:
        layers.add("sliding_attention")
    if layers == {"sliding_attention"} and window is not None:
        raise ModelError(
            f"{name} is of the type {config.model_type} and has a sliding window of "
            f"{window} tokens, which is supported only for the types "
            f"{', '.join(WINDOWED)}: set limits.max_context_len to at most "
            f"{window}, or use another model"
        )
    if layers:
        raise ModelError(
            f"{name} is of the type {config.model_type} and has layers of type "
            f"{cut(', '.join(sorted(layers)))}, which the local engine does not support: use a "
            "model with full attention or sliding windows"
        )


def has_window(config: Any, context_len: int | None) -> bool:
    """Whether a layer attends to a sliding window. One that is not shorter than the longest context
    is none: some files have windows longer than all positions. context_len: None if not known."""
    window = getattr(config, "sliding_window", None)
    if window is not None and context_len is not None and window >= context_len:
        return False
    if layers := getattr(config, "layer_types", None):
        return "sliding_attention" in layers
    return window is not None and getattr(config, "use_sliding_window", True) is not False


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Positions that a model can be served with; None if it sets no limit.

    With YaRN, those of its training times its factor: whoever adds YaRN as Qwen's model cards say
    leaves `max_position_embeddings` as it is.

    config: as in config.json, or as Transformers has completed it.
    """
    longest = config.get("max_position_embeddings")
    if type(longest) is not int:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
        return longest
    trained, factor = rope.get("original_max_position_embeddings", longest), rope.get("factor", 1)
    is_valid = type(trained) is int and type(factor) in (int, float) and math.isfinite(factor)
    return max(longest, int(trained * factor)) if is_valid else longest


def _check_context(name: str, longest: int | None, max_context_len: int | None) -> None:
    """longest: positions of the model; None if they are not known."""
    if longest is not None and max_context_len is not None and max_context_len > longest:
        raise ModelError(
            f"{name} supports {longest} positions, fewer than the max_context_len of "
            f"{max_context_len}: lower it to at most {longest}"
        )


def _compare(target: _Model, draft: _Model) -> None:
    if target.tokenizer is not draft.tokenizer:
        _compare_tokenizers(target, draft)
    if None not in (target.end_token, draft.end_token) and target.end_token != draft.end_token:
        raise ModelError(
            f"{target.name} ends a text with {shown(target.end_token)} and {draft.name} with "
            f"{shown(draft.end_token)}: choose a draft of the same kind, base or instruct"
        )


def _compare_tokenizers(target: _Model, draft: _Model) -> None:
    if target.tokenizer.token_ids != draft.tokenizer.token_ids:
        ours, theirs = (
            {number: token for token, number in model.tokenizer.token_ids.items()}
            for model in (target, draft)
        )
        number = min(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        raise ModelError(
            f"token id {number} is {shown(ours.get(number))} in {target.name} and "
            f"{shown(theirs.get(number))} in {draft.name}: {OTHER_TOKENIZER}"
        )
    # Merges in another order split the same text into other tokens.
    if _merges(target) != _merges(draft):
        raise ModelError(
            f"the tokenizers of {target.name} and {draft.name} merge differently: {OTHER_TOKENIZER}"
        )
