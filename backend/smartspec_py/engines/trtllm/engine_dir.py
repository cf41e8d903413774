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

from smartspec_py.config import ConfigError, LimitsConfig

TRTLLM_VERSION = "1.2.1"
"""The TensorRT-LLM version that this project supports; it is in containers 26.04 to 26.07."""

Devices = tuple[int, ...]
"""Numbers of GPUs, one per rank of an engine."""


class Role(StrEnum):
    """The purpose of an engine."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True)
class EngineFiles:
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
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("rank*.engine"))}
    return EngineFiles(role, folder, config, sizes)


NO_SPECULATION, EXTERNAL_DRAFTS = 1, 2
"""Values of `build_config.speculative_decoding_mode`."""


def faults_of(
    engines: Mapping[Role, EngineFiles], limits: LimitsConfig, num_tokens: int
) -> Iterator[str]:
    """The reasons why the engines cannot serve these limits, each with what to rebuild.

    num_tokens: token ids of the tokenizer. What in-flight batching needs is not checked, because
    the executor refuses such engines when it loads them.
    """
    target = engines[Role.TARGET]
    whole = min(target.built("max_input_len"), target.built("max_seq_len"))
    longest = limits.max_context_len or max(whole - target.built("max_draft_len"), 0)
    for engine in engines.values():
        files = [f"rank{rank}.engine" for rank in range(engine.num_ranks)]
        if missing := [name for name in files if not engine.rank_sizes.get(name)]:
            yield f"engine.{engine.role}: {missing[0]} is missing or empty; build it again"
        for key, is_met, needed, remedy in (*_mode(engine), *_sizes(engine, limits, longest)):
            value = engine.get(f"build_config.{key}")
            shown = "missing" if value is None else value
            if not is_met:
                name = f"engine.{engine.role}: build_config.{key}"
                yield f"{name} is {shown}, must be {needed}; {remedy}"
    draft = engines.get(Role.DRAFT, target)
    if draft.get("version") != (version := target.get("version")):
        yield f"engine.draft: version is {draft.get('version')}, must be {version}, the target's"
    if draft.vocab_size != (size := target.vocab_size) and min(draft.vocab_size, size) < num_tokens:
        yield (
            f"engine.draft: vocab_size is {draft.vocab_size}, must be {size}, the target's, or "
            f"both at least {num_tokens}, the ids of the tokenizer; choose a draft of its family"
        )


Check = tuple[str, bool, str, str]
"""A key of build_config, whether its value is right, what is needed, and the flag to rebuild."""


def _mode(engine: EngineFiles) -> Iterator[Check]:
    """What external drafts need; they need block reuse."""
    key, flag = "speculative_decoding_mode", "--speculative_decoding_mode"
    mode = engine.get(f"build_config.{key}")
    if engine.role is Role.TARGET:
        is_met = mode == EXTERNAL_DRAFTS
        yield key, is_met, "2, external drafts", f"trtllm-build {flag} draft_tokens_external"
    else:
        yield key, mode in (None, NO_SPECULATION), "1, none", f"trtllm-build without {flag}"
    key, needed = "plugin_config.use_paged_context_fmha", "true, or blocks are not reused"
    is_met = engine.get(f"build_config.{key}") is True
    yield key, is_met, needed, "trtllm-build --use_paged_context_fmha enable"
    key, needed = "gather_context_logits", "false, or blocks are not reused"
    is_met = not engine.get(f"build_config.{key}")
    yield key, is_met, needed, "trtllm-build without --gather_context_logits"


def _sizes(engine: EngineFiles, limits: LimitsConfig, longest: int) -> Iterator[Check]:
    """Length limits. The target resends text and drafts as a prompt, and reserves max_draft_len
    even without drafts. The token limit of an iteration counts each whole prompt, cached or not."""
    is_target = engine.role is Role.TARGET
    k = limits.max_draft_len if is_target else 0
    whole = longest + max(k, engine.built("max_draft_len") if is_target else 0)
    least = {
        "max_draft_len": (max(k, 1) if is_target else 0, f"--max-draft-len {k}"),
        "max_input_len": (whole, f"--max-context-len {longest}"),
        "max_seq_len": (whole, f"--max-context-len {longest}"),
        "max_batch_size": (limits.max_sequences, f"--max-batch-size {limits.max_sequences}"),
        "max_num_tokens": (longest + k, f"--max-num-tokens {longest + k}"),
    }
    for name, (size, flag) in least.items():
        yield name, engine.built(name) >= size, f"at least {size}", f"build_engines.sh {flag}"
