"""An engine directory as `trtllm-build` writes it, and why it cannot be served. Never run with one.

The rules are those of TensorRT-LLM's external-draft mode, from its documentation and source
(docs/tensorrt-llm/build-engines.md names them). Every verification is a new request with the whole
text as its prompt, so all lengths refer to whole sequences. A key of `config.json` whose value has
an unexpected type counts as missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from smartspec_py.config import LimitsConfig
from smartspec_py.faults import ConfigError

EXTERNAL_DRAFTS = 2
"""The value of `build_config.speculative_decoding_mode` of a target."""


class Role(StrEnum):
    """The purpose of an engine."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True)
class EngineFiles:
    """config: the content of config.json."""

    role: Role
    folder: Path
    config: Mapping[str, Any]

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


def read_engine(role: Role, folder: Path) -> EngineFiles:
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
    engine = EngineFiles(role, folder, config)
    for rank in range(engine.num_ranks):
        if not (folder / f"rank{rank}.engine").is_file():
            raise ConfigError(f"{name}: {folder} has no rank{rank}.engine: build it again")
    return engine


def faults_of(
    engines: Mapping[Role, EngineFiles], limits: LimitsConfig, num_tokens: int
) -> Iterator[str]:
    """The reasons why the engines cannot serve these limits, each with what to rebuild.

    num_tokens: token ids of the tokenizer. What the executor itself refuses when it loads an engine
    is not checked here.
    """
    target = engines[Role.TARGET]
    built = target.built("max_draft_len")
    whole = min(target.built("max_input_len"), target.built("max_seq_len"))
    longest = limits.max_context_len or max(whole - built, 0)
    key = "speculative_decoding_mode"
    if (mode := target.get(f"build_config.{key}")) != EXTERNAL_DRAFTS:
        needed = f"{EXTERNAL_DRAFTS}; trtllm-build --{key} draft_tokens_external"
        yield f"engine.target: build_config.{key} is {mode}, must be {needed}"
    for engine in engines.values():
        # The target resends text and drafts as a prompt, and reserves the max_draft_len of its
        # build even without drafts. An iteration counts each whole prompt, cached or not.
        is_target = engine.role is Role.TARGET
        k, reserve = (limits.max_draft_len, built) if is_target else (0, 0)
        least = {
            "max_draft_len": (max(k, int(is_target)), f"--max-draft-len {k}"),
            "max_input_len": (longest + max(k, reserve), f"--max-context-len {longest}"),
            "max_seq_len": (longest + max(k, reserve), f"--max-context-len {longest}"),
            "max_batch_size": (limits.max_sequences, f"--max-batch-size {limits.max_sequences}"),
            "max_num_tokens": (longest + k, f"--max-num-tokens {longest + k}"),
        }
        name = f"engine.{engine.role}: build_config"
        for key, (size, flag) in least.items():
            if engine.built(key) < size:
                value = engine.get(f"build_config.{key}")
                yield f"{name}.{key} is {value}, must be at least {size}; build_engines.sh {flag}"
        key = "use_paged_context_fmha"
        if engine.get(f"build_config.plugin_config.{key}") is not True:
            yield f"{name}.plugin_config.{key} must be true, or blocks are not reused"
        if engine.get("build_config.gather_context_logits"):
            yield f"{name}.gather_context_logits must be false, or blocks are not reused"
    draft = engines.get(Role.DRAFT, target)
    if draft.vocab_size != (size := target.vocab_size) and min(draft.vocab_size, size) < num_tokens:
        yield (
            f"engine.draft: vocab_size is {draft.vocab_size}, must be {size}, the target's, or "
            f"both at least {num_tokens}, the ids of the tokenizer; choose a draft of its family"
        )
