"""What is known of an engine before its model is loaded: its directory, and its limits."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tokenizers import Tokenizer

from smartspec_py.engines.base import TargetCapabilities
from smartspec_py.serving.config import ConfigError, LimitsConfig


def existing(key: str, path: Path) -> Path:
    """The path. Raises ConfigError, naming the key, where nothing is there."""
    if not path.exists():
        raise ConfigError(f"engine.json: {key}: {path} does not exist{_or_has_no_name(path)}")
    return path


def _or_has_no_name(path: Path) -> str:
    """Why a path that is there may not be found: Triton's stub may have no name for it."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return (
            ", or Triton's stub does not find it, which takes only ASCII paths: give it such a link"
        )
    return ""


def load_tokenizer(key: str, folder: Path) -> Tokenizer:
    """The tokenizer of a model directory."""
    path = existing(key, folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"engine.json: {key}: {folder} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    # Some files ask for cutting or padding, which suits training and would change a prompt here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def num_token_ids(tokenizer: Tokenizer) -> int:
    """One more than the highest id: ids may have gaps, so counting entries is not enough."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_tokens(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The tokens that end the model's texts, by its generation_config.json or else its config.json.

    Raises ConfigError, naming the file, where `eos_token_id` is no token or list of tokens.
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
    """Of an engine that runs one pass a poll, within the limits of engine.json."""
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
