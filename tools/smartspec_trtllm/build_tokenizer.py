"""The tokenizer for the engines, and a comparison of the token ids of target and draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""The tokenizer files of a Hugging Face directory, and the two files that name the end token."""


class TokenizerError(ValueError):
    """The message is one sentence that names the file and what to do."""


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The existing files of `FILES`."""
    return tuple(folder / name for name in FILES if (folder / name).is_file())


def num_token_ids(folder: Path) -> int:
    """The highest token id plus one: the rows of the vocabulary without padding."""
    return max(token_ids(folder).values()) + 1


def token_ids(folder: Path) -> dict[str, int]:
    """The id of every token in tokenizer.json, including added tokens."""
    path = folder / "tokenizer.json"
    remedy = "save a fast tokenizer there, with AutoTokenizer.from_pretrained(...).save_pretrained"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        ids = _ids(document["model"]["vocab"])
        ids |= {str(added["content"]): int(added["id"]) for added in document["added_tokens"]}
    except FileNotFoundError:
        raise TokenizerError(f"{path} does not exist: {remedy}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        name = type(error).__name__
        raise TokenizerError(f"{path} is not a tokenizer ({name}: {error}): {remedy}") from error
    if not ids:
        raise TokenizerError(f"{path} has no tokens: {remedy}")
    return ids


def _ids(vocab: Any) -> dict[str, int]:
    """Ids by token. A unigram vocabulary is a list of (token, score) in the order of ids."""
    if hasattr(vocab, "items"):
        return {str(token): int(number) for token, number in vocab.items()}
    return {str(token): number for number, (token, _) in enumerate(vocab)}


def difference(target: dict[str, int], draft: dict[str, int]) -> str | None:
    """The lowest token id with different tokens, in words; None if there is none."""
    if target == draft:
        return None
    ours = {number: token for token, number in target.items()}
    theirs = {number: token for token, number in draft.items()}
    number = min(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    return f"token id {number} is {ours.get(number)!r}, and {theirs.get(number)!r} in the draft's"
