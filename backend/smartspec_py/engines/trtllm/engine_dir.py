"""An engine directory as `trtllm-build` writes it, and why it cannot be served. Never run with one.

The rules are those of TensorRT-LLM's external-draft mode, from its documentation and source
(docs/tensorrt-llm/build-engines.md names them). Every verification is a new request with the whole
text as its prompt, so all lengths refer to whole sequences. A key of `config.json` whose value has
an unexpected type counts as missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from smartspec_py.serving.config import ConfigError, LimitsConfig

TRTLLM_VERSION = "1.2.1"
"""The TensorRT-LLM version that this project supports; it is in containers 26.04 to 26.07."""

Devices = tuple[int, ...]
"""Numbers of GPUs, one per rank of an engine."""


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


NO_SPECULATION, EXTERNAL_DRAFTS = 1, 2
"""Values of `build_config.speculative_decoding_mode`: NONE and DRAFT_TOKENS_EXTERNAL."""


class _Rule(NamedTuple):
    """A check of one key of config.json. remedy: a flag of trtllm-build or build_engines.sh."""

    key: str
    is_met: Callable[[Any], bool]
    needed: str
    remedy: str


_RULES = (
    _Rule(
        "build_config.plugin_config.use_paged_context_fmha",
        lambda value: value is True,
        "true: without it block reuse is off, which external drafts need",
        "trtllm-build --use_paged_context_fmha enable",
    ),
    _Rule(
        "build_config.gather_context_logits",
        lambda value: not value,
        "false: it turns block reuse off, which external drafts need",
        "trtllm-build without --gather_context_logits",
    ),
)
"""The executor itself refuses engines that are not built for in-flight batching."""

_MODE = "build_config.speculative_decoding_mode"
_MODES = {
    Role.TARGET: _Rule(
        _MODE,
        lambda value: value == EXTERNAL_DRAFTS,
        f"{EXTERNAL_DRAFTS}, external drafts",
        "trtllm-build --speculative_decoding_mode draft_tokens_external",
    ),
    Role.DRAFT: _Rule(
        _MODE,
        lambda value: value in (None, NO_SPECULATION),
        f"{NO_SPECULATION}, none: a draft engine does not verify drafts",
        "trtllm-build without --speculative_decoding_mode",
    ),
}


def faults_of(
    engines: Mapping[Role, Engine], limits: LimitsConfig, num_tokens: int
) -> Iterator[str]:
    """The reasons why the engines cannot serve these limits, each with what to rebuild.

    num_tokens: token ids of the tokenizer.
    """
    target = engines[Role.TARGET]
    whole = min(target.built("max_input_len"), target.built("max_seq_len"))
    longest = limits.max_context_len or max(whole - target.built("max_draft_len"), 0)
    for engine in engines.values():
        yield from _missing_ranks(engine)
        sizes = _size_rules(engine, limits, longest)
        for rule in (*_RULES, _MODES[engine.role], *sizes):
            value = engine.get(rule.key)
            if not rule.is_met(value):
                shown = "missing" if value is None else value
                yield (
                    f"engine.{engine.role}: {rule.key} is {shown}, must be {rule.needed}; "
                    f"{rule.remedy}"
                )
    draft = engines.get(Role.DRAFT, target)
    if draft.get("version") != (version := target.get("version")):
        yield f"engine.draft: version is {draft.get('version')}, must be {version}, the target's"
    if draft.vocab_size != (size := target.vocab_size) and min(draft.vocab_size, size) < num_tokens:
        yield (
            f"engine.draft: vocab_size is {draft.vocab_size}, must be {size}, the target's, or "
            f"both at least {num_tokens}, the ids of the tokenizer; choose a draft of its family"
        )


def _missing_ranks(engine: Engine) -> Iterator[str]:
    files = [f"rank{rank}.engine" for rank in range(engine.num_ranks)]
    if missing := [name for name in files if not engine.rank_sizes.get(name)]:
        yield (
            f"engine.{engine.role}: {missing[0]} is missing or empty, must be one file for each of "
            f"{engine.num_ranks} ranks; build_engines.sh --force"
        )


def _size_rules(engine: Engine, limits: LimitsConfig, longest: int) -> Iterator[_Rule]:
    """Length limits. The target resends text and drafts as a prompt, and reserves max_draft_len
    even without drafts. The token limit of an iteration counts each whole prompt, cached or not."""
    k, is_target = limits.max_draft_len, engine.role is Role.TARGET
    whole = longest + (max(k, engine.built("max_draft_len")) if is_target else 0)
    of = f"a sequence of {longest} tokens" + (" and its drafts" if is_target else "")
    lengths = f"--max-context-len {longest}"
    rows = limits.max_sequences
    if is_target:
        yield _at_least("max_draft_len", max(k, 1), "the longest draft", f"--max-draft-len {k}")
    yield _at_least("max_input_len", whole, of, lengths)
    yield _at_least("max_seq_len", whole, of, lengths)
    yield _at_least("max_batch_size", rows, "limits.max_sequences", f"--max-batch-size {rows}")
    charged = longest + (k if is_target else 0)
    yield _at_least("max_num_tokens", charged, of, f"--max-num-tokens {charged}")


def _at_least(name: str, least: int, why: str, flag: str) -> _Rule:
    return _Rule(
        f"build_config.{name}",
        lambda value: type(value) is int and value >= least,
        f"at least {least}: {why}",
        f"build_engines.sh {flag}",
    )
