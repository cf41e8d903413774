"""Properties of an engine that are known before its model is loaded: its files and limits."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from smartspec_py.engines.base import TargetCapabilities
from smartspec_py.engines.tokenizer_file import read_tokenizer
from smartspec_py.faults import ConfigError, shown

if TYPE_CHECKING:
    from smartspec_py.config import LimitsConfig

logger = logging.getLogger(__name__)


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
    if not (existing(key, folder) / "tokenizer.json").is_file():
        raise ConfigError(f"engine.json: {key}: {folder} has no tokenizer.json")
    return read_tokenizer(folder)


def end_tokens(folder: Path, vocab_size: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end the model's text.

    They are `eos_token_id` of generation_config.json, or else of config.json, and the tokenizer's
    `eos_token`, which in some chat models is the only one that ends a turn. Raises ConfigError,
    which names the file, if `eos_token_id` is not a token or a list of tokens.
    """
    tokens: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        if value is None:
            continue
        tokens = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
            raise ConfigError(
                f"{folder / name}: eos_token_id: must be a token id in 0..{vocab_size - 1} or a "
                f"list of them, got {shown(value)}: correct the file"
            )
        break
    value = _json(folder / "tokenizer_config.json").get("eos_token")
    text = value.get("content") if isinstance(value, dict) else value
    named = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return tuple(dict.fromkeys(tokens if named is None else [*tokens, named]))


def _json(path: Path) -> dict[str, Any]:
    """The document in the file; empty if there is no file. Raises ConfigError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): replace it") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a JSON object: replace it")
    return document


SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def log_unused_defaults(folder: Path) -> None:
    """Log the sampling defaults in generation_config.json, which requests do not get."""
    config = _json(folder / "generation_config.json")
    unused = [f"{key} {config[key]}" for key in SAMPLING_DEFAULTS if config.get(key) is not None]
    if unused:
        logger.info("generation_config.json: not used: %s", ", ".join(unused))


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
