"""Properties of an engine that are known before its model is loaded: its files and limits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from smartspec_py.engines.base import TargetCapabilities
from smartspec_py.serving.defaults import ConfigError

if TYPE_CHECKING:
    from smartspec_py.serving.config import LimitsConfig


def existing(key: str, path: Path) -> Path:
    """The path. Raises ConfigError, which names the key, if the path does not exist."""
    if not path.exists():
        raise ConfigError(f"engine.json: {key}: {path} does not exist{_or_has_no_name(path)}")
    return path


def _or_has_no_name(path: Path) -> str:
    """An explanation for non-ASCII paths, which Triton's stub may be unable to open."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return (
            ", or Triton's stub cannot open it because the path is not ASCII: use a symbolic link "
            "with an ASCII path"
        )
    return ""


def load_tokenizer(key: str, folder: Path) -> Tokenizer:
    """The tokenizer of a model directory."""
    path = existing(key, folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"engine.json: {key}: {folder} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    # Some files enable truncation or padding for training, which would change prompts here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def num_token_ids(tokenizer: Tokenizer) -> int:
    """The highest id plus one. Ids may have gaps, so the number of entries may be lower."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_tokens(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The tokens that end the model's text, from generation_config.json or else config.json.

    Raises ConfigError, which names the file, if `eos_token_id` is not a token or list of tokens.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = (
            json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if path.is_file()
            else None
        )
        if value is None:
            continue
        tokens = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
            raise ConfigError(
                f"{path}: eos_token_id: must be a token id in 0..{vocab_size - 1} or a list of "
                f"them, got {value!r}: correct the file"
            )
        return tuple(dict.fromkeys(tokens))
    return ()


def stepwise_capabilities(
    limits: LimitsConfig, vocab_size: int, bytes_per_token: int = 0
) -> TargetCapabilities:
    """Capabilities of an engine that runs one pass per poll, with the limits of engine.json."""
    return TargetCapabilities(
        max_sequences=limits.max_sequences,
        max_context_len=limits.context_len,
        max_draft_len=limits.max_draft_len,
        max_decode_tokens=1,
        max_prefill_tokens=limits.context_len,
        verifies_sampling=True,
        vocab_size=vocab_size,
        bytes_per_token=bytes_per_token,
    )
