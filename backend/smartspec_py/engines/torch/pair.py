"""Checks from the files alone whether a draft model can draft for a target.

Drafted token ids are used as the target's ids, so each id must mean the same token in both models.
The `vocab_size` of the models may differ, because checkpoints are padded beyond their tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartspec_py.engines.torch.checkpoint import (
    PairError,
    check_files,
    check_quantization,
    read_json,
)

__all__ = ["PairError", "check_pair", "check_pair_files"]

WINDOWED = ("gemma2", "gemma3_text", "mistral", "qwen2", "qwen3", "starcoder2")
"""Model types whose sliding windows match Transformers in tests. Other types mask differently."""

TOKENIZER_NAME = "tokenizer.json"
OTHER_TOKENIZER = "choose a draft that was trained with the target's tokenizer"


@dataclass(frozen=True)
class _Model:
    """The contents of one model's directory. role: target or draft, as messages name it."""

    role: str
    folder: Path
    config: Any
    tokenizer: dict[str, Any]
    token_ids: dict[str, int]
    end_token: str | None

    @property
    def name(self) -> str:
        return f"the {self.role} {self.folder}"


def check_pair(
    target_dir: Path, draft_dir: Path | None, max_context_len: int | None = None
) -> None:
    """Raise PairError unless the target and the draft, if any, can be served together.

    max_context_len: also check that the target supports requests of this many tokens. A draft with
    fewer positions does not draft beyond them.
    """
    # Checks without libraries come first: importing a library takes seconds.
    check_pair_files(target_dir, draft_dir)
    target = _read_model("target", target_dir)
    _check_context(target, max_context_len)
    if draft_dir is None:
        return
    draft = _read_model("draft", draft_dir, target)
    if draft.tokenizer is not target.tokenizer:
        _compare_vocabularies(target, draft)
        _compare_merges(target, draft)
    _compare_end_tokens(target, draft)


def check_pair_files(target_dir: Path, draft_dir: Path | None) -> None:
    """The part of `check_pair` without Transformers and PyTorch: missing or truncated files. Raises
    PairError."""
    for role, folder in _folders(target_dir, draft_dir).items():
        check_files(f"the {role} {folder}", folder)


def _folders(target_dir: Path, draft_dir: Path | None) -> dict[str, Path]:
    return {"target": target_dir} | ({} if draft_dir is None else {"draft": draft_dir})


def _read_model(role: str, folder: Path, other: _Model | None = None) -> _Model:
    """other: a model that is already read; equal tokenizer files are not parsed again."""
    name = f"the {role} {folder}"
    config = _read_config(name, folder)
    _check_layers(name, config)
    if other is not None and _has_same_tokenizer(folder, other.folder):
        tokenizer, token_ids = other.tokenizer, other.token_ids
    else:
        tokenizer, token_ids = _read_tokenizer(name, folder)
    model = _Model(role, folder, config, tokenizer, token_ids, _end_token(name, folder))
    _check_room(model)
    return model


def _has_same_tokenizer(folder: Path, other: Path) -> bool:
    """Many pairs have identical files of 10 MB or more. Parsing one takes half a second."""
    path = folder / TOKENIZER_NAME
    return path.is_file() and path.read_bytes() == (other / TOKENIZER_NAME).read_bytes()


def _read_tokenizer(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The parsed tokenizer.json, and the id of every token."""
    tokenizer = read_json(name, folder, TOKENIZER_NAME)
    if tokenizer is None:
        raise PairError(
            f"{name} has no tokenizer.json: save a fast tokenizer there, with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return tokenizer, _token_ids(name, folder)


def _read_config(name: str, folder: Path) -> Any:
    """The model's configuration, with the defaults of its class filled in."""
    from transformers import AutoConfig

    check_quantization(name, folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PairError(
            f"{name} has a config.json that Transformers cannot use ({reason}): "
            "use a model type that Transformers supports"
        ) from error
    return config


def _check_layers(name: str, config: Any) -> None:
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if has_window(config):
        layers.add("sliding_attention")
    if config.model_type in WINDOWED:
        layers.discard("sliding_attention")
    if layers:
        raise PairError(
            f"{name} is of the type {config.model_type} and has layers of type "
            f"{', '.join(sorted(layers))}, which the PyTorch engine does not support: use a model "
            f"with full attention in all layers, or one with sliding windows of these types: "
            f"{', '.join(WINDOWED)}"
        )


def has_window(config: Any) -> bool:
    """Whether a layer attends to a sliding window."""
    if layers := getattr(config, "layer_types", None):
        return "sliding_attention" in layers
    window = getattr(config, "sliding_window", None)
    return window is not None and getattr(config, "use_sliding_window", True) is not False


def _token_ids(name: str, folder: Path) -> dict[str, int]:
    """The id of every token, including added tokens."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
    except Exception as error:  # tokenizers raises no more specific type
        raise PairError(
            f"{name} has a tokenizer.json that cannot be used ({error}): replace it"
        ) from error
    return dict(tokenizer.get_vocab(with_added_tokens=True))


def _end_token(name: str, folder: Path) -> str | None:
    token = (read_json(name, folder, "tokenizer_config.json") or {}).get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def _check_room(model: _Model) -> None:
    highest = max(model.token_ids.values(), default=-1)
    if highest >= model.config.vocab_size:
        raise PairError(
            f"{model.name} has a vocab_size of {model.config.vocab_size}, but its tokenizer has "
            f"the token id {highest}: use the tokenizer that the model was trained with"
        )


def _check_context(model: _Model, max_context_len: int | None) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and max_context_len is not None and max_context_len > longest:
        raise PairError(
            f"{model.name} supports {longest} positions, fewer than the max_context_len of "
            f"{max_context_len}: lower it to at most {longest}"
        )


def _compare_vocabularies(target: _Model, draft: _Model) -> None:
    if target.token_ids == draft.token_ids:
        return
    if len(target.token_ids) != len(draft.token_ids):
        raise PairError(
            f"{target.name} has {len(target.token_ids)} tokens and {draft.name} has "
            f"{len(draft.token_ids)}: {OTHER_TOKENIZER}"
        )
    ours = {number: token for token, number in target.token_ids.items()}
    theirs = {number: token for token, number in draft.token_ids.items()}
    number = min(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    raise PairError(
        f"token id {number} is {ours.get(number)!r} in {target.name} and {theirs.get(number)!r} "
        f"in {draft.name}: {OTHER_TOKENIZER}"
    )


def _compare_merges(target: _Model, draft: _Model) -> None:
    """Equal vocabularies with merges in another order split the same text into other tokens."""
    ours, theirs = _merges(target.tokenizer), _merges(draft.tokenizer)
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), None)
    example = (
        f"{' + '.join(first[0])} against {' + '.join(first[1])}"
        if first
        else f"{len(ours)} against {len(theirs)} merges"
    )
    raise PairError(
        f"the tokenizers of {target.name} and {draft.name} merge differently ({example}): "
        f"{OTHER_TOKENIZER}"
    )


def _merges(tokenizer: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE tokenizer; empty for other kinds. Older files store one string each."""
    merges = tokenizer.get("model", {}).get("merges") or []
    return [_pair(merge) for merge in merges]


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _compare_end_tokens(target: _Model, draft: _Model) -> None:
    if None not in (target.end_token, draft.end_token) and target.end_token != draft.end_token:
        raise PairError(
            f"{target.name} ends a text with {target.end_token!r} and {draft.name} with "
            f"{draft.end_token!r}: choose a draft of the same kind, base or instruct"
        )
