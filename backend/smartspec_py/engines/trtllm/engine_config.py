"""An engine directory as `trtllm-build` writes it. Never run with a real engine.

A key of `config.json` whose value has an unexpected type counts as missing; `engine_dir` reports
the consequences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from smartspec_py.serving.config import ConfigError

TRTLLM_VERSION = "1.2.1"
"""The TensorRT-LLM version that this project supports; it is in containers 26.04 to 26.07."""


class Role(StrEnum):
    """The purpose of an engine."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True)
class Engine:
    """config: the content of config.json. rank_sizes: bytes of each rankN.engine, by file name."""

    role: Role
    folder: Path
    config: Mapping[str, Any]
    rank_sizes: Mapping[str, int]

    def get(self, key: str) -> Any:
        """The value at a dotted key such as `build_config.max_draft_len`; None if it is missing."""
        value: Any = self.config
        for name in key.split("."):
            if not hasattr(value, "get"):
                return None
            value = value.get(name)
        return value

    def count(self, key: str, default: int = 0) -> int:
        """The value at a key that holds a count; default if it is not an integer."""
        value = self.get(key)
        return value if type(value) is int else default

    def built(self, name: str) -> int:
        """A count of `build_config`."""
        return self.count(f"build_config.{name}")

    def model(self, name: str, default: int = 0) -> int:
        """A count of `pretrained_config`."""
        return self.count(f"pretrained_config.{name}", default)

    @property
    def tp_size(self) -> int:
        return self.model("mapping.tp_size", 1)

    @property
    def num_ranks(self) -> int:
        """Number of GPUs and of files: tensor times pipeline times context parallel ranks."""
        return math.prod(self.model(f"mapping.{name}_size", 1) for name in ("tp", "pp", "cp"))

    @property
    def longest_text(self) -> int:
        """Tokens of the longest request, including its drafts and generated tokens."""
        return min(map(self.built, ("max_input_len", "max_seq_len", "max_num_tokens")))

    @property
    def vocab_size(self) -> int:
        return self.model("vocab_size")

    @property
    def padded_vocab_size(self) -> int:
        """Columns of the logits: the vocabulary, rounded up to a multiple of tp_size."""
        return math.ceil(self.vocab_size / self.tp_size) * self.tp_size


def read_engine(role: Role, folder: Path) -> Engine:
    """Raises ConfigError if config.json is missing, unreadable or not of an engine."""
    name, path = f"engine.json: engine.{role}", folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {path} cannot be read ({error}): build it again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{name}: {path} is not a JSON object: build it again")
    if "model_type" in config and "build_config" not in config:
        raise ConfigError(
            f"{name}: {folder} is a Hugging Face checkpoint ({config['model_type']}), not an "
            "engine: build one with engines_build/build_engines.sh, or serve the checkpoint with "
            "`smartspec serve --model`"
        )
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("rank*.engine"))}
    return Engine(role, folder, config, sizes)
