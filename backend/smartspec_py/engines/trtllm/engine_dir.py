"""Finds engine directories that cannot be served, from their files and without TensorRT.

The rules are those of TensorRT-LLM's external-draft mode. They were taken from its documentation
and source (docs/tensorrt-llm/build-engines.md names them). This project tested none of them on a
GPU. Every verification is a new request with the whole text as its prompt, so all lengths refer to
whole sequences. Settings that work but are not recommended are reported by
`smartspec check-engines` (`smartspec_trtllm.findings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smartspec_py.engines.trtllm.engine_config import (
    TRTLLM_VERSION,
    Engine,
    EngineDirError,
    Role,
    read_engine,
)

NO_SPECULATION, EXTERNAL_DRAFTS = 1, 2
"""Values of `build_config.speculative_decoding_mode`: NONE and DRAFT_TOKENS_EXTERNAL."""


LENGTHS = ("max_input_len", "max_seq_len")
"""Keys in `build_config` for the length of a sequence."""


class Fault(NamedTuple):
    """A reason why engines cannot be served.

    engine: target, draft or pair. key: a key in config.json, or a file. value: the value found.
    needed: the required value, and why. remedy: what to rebuild, with the flag; may be empty.
    """

    engine: str
    key: str
    value: str
    needed: str
    remedy: str

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"engine.{self.engine}: {self.key} is {self.value}, must be {self.needed}{remedy}"


@dataclass(frozen=True)
class Load:
    """The planned use of the engines.

    k: tokens of the longest draft. sequences: number served at the same time.
    context_len: tokens of the longest sequence, prompt and text; None means the target's maximum.
    num_tokens: highest token id of the tokenizer plus one; None if unknown.
    uses_logits: whether drafts are accepted by the draft's logits, not by tokens only.
    """

    k: int
    sequences: int
    context_len: int | None = None
    num_tokens: int | None = None
    uses_logits: bool = False

    def longest(self, target: Engine | None) -> int:
        """Tokens of the longest sequence; 0 if unknown."""
        if self.context_len or target is None:
            return self.context_len or 0
        lengths = [target.count(f"build_config.{name}") for name in LENGTHS]
        return max(min(lengths) - target.count("build_config.max_draft_len"), 0)


class _Rule(NamedTuple):
    """A check of one key. is_met: tests the value at `key`. flag: the flag of trtllm-build."""

    key: str
    is_met: Callable[[Any], bool]
    needed: str
    flag: str

    def check(self, engine: Engine) -> Iterator[Fault]:
        value = engine.get(self.key)
        if not self.is_met(value):
            yield fault(engine, self.key, value, self.needed, f"trtllm-build {self.flag}")


def _plugin(name: str, needed: str) -> _Rule:
    key = f"build_config.plugin_config.{name}"
    return _Rule(key, lambda value: value is True, f"true: {needed}", f"--{name} enable")


_MODE = "build_config.speculative_decoding_mode"

_RULES = (
    _Rule(
        "build_config.kv_cache_type",
        lambda value: str(value).upper() == "PAGED",
        "PAGED: in-flight batching and block reuse need pages",
        "--kv_cache_type paged",
    ),
    _plugin("use_paged_context_fmha", "without it block reuse is off, which external drafts need"),
    _plugin("context_fmha", "paged context attention needs it"),
    _plugin("remove_input_padding", "in-flight batching needs packed input"),
    _Rule(
        "build_config.plugin_config.gpt_attention_plugin",
        lambda value: bool(value) and value != "disable",
        "a dtype: in-flight batching needs the plugin",
        "--gpt_attention_plugin auto",
    ),
    _Rule(
        "build_config.gather_context_logits",
        lambda value: not value,
        "false: it turns block reuse off, which external drafts need",
        "without --gather_context_logits",
    ),
)

_MODES = {
    Role.TARGET: _Rule(
        _MODE,
        lambda value: value == EXTERNAL_DRAFTS,
        f"{EXTERNAL_DRAFTS}, external drafts",
        "--speculative_decoding_mode draft_tokens_external",
    ),
    Role.DRAFT: _Rule(
        _MODE,
        lambda value: value in (None, NO_SPECULATION),
        f"{NO_SPECULATION}, none: a draft engine does not verify drafts",
        "without --speculative_decoding_mode",
    ),
}


def read_engines(paths: Mapping[Role, Path]) -> tuple[dict[Role, Engine], list[Fault]]:
    """The readable engines, and the reasons why others cannot be read."""
    engines, faults = {}, []
    for role, folder in paths.items():
        try:
            engines[role] = read_engine(role, folder)
        except EngineDirError as error:
            remedy = error.remedy or f"build {folder} with trtllm-build"
            faults.append(Fault(role, error.key, error.reason, "what trtllm-build writes", remedy))
    return engines, faults


def faults_of(engines: Mapping[Role, Engine], load: Load) -> Iterator[Fault]:
    """The reasons why the engines cannot serve this load."""
    longest = load.longest(engines.get(Role.TARGET))
    for engine in engines.values():
        yield from _check_files(engine)
        for rule in (*_RULES, _MODES[engine.role]):
            yield from rule.check(engine)
        yield from _check_sizes(engine, load, longest)
    if len(engines) == 2:
        yield from _check_both(engines[Role.TARGET], engines[Role.DRAFT], load)


def _check_files(engine: Engine) -> Iterator[Fault]:
    if not engine.get("version"):
        needed = f"a version, {TRTLLM_VERSION}: an engine without one is from an old builder"
        yield fault(engine, "version", None, needed, "rebuild it with trtllm-build")
    lacking = [name for name in engine.rank_files if not engine.rank_sizes.get(name)]
    if lacking:
        needed = f"{engine.num_ranks} files that are not empty, one for each of tp * pp * cp ranks"
        remedy = "rebuild it: build_engines.sh --force"
        yield fault(engine, lacking[0], "missing or empty", needed, remedy)


def _check_sizes(engine: Engine, load: Load, longest: int) -> Iterator[Fault]:
    """Check the length limits. The target resends text and drafts as a prompt, and reserves
    max_draft_len even without drafts. The token limit of an iteration counts each whole prompt,
    cached or not."""
    is_target = engine.role is Role.TARGET
    draft_len = engine.count("build_config.max_draft_len")
    reserve = max(load.k, draft_len) if is_target else 0
    whole = longest + reserve
    drafts, work = (f" and {reserve} drafts", "verification") if is_target else ("", "draft")
    charged = longest and longest + (load.k if is_target else 0)
    sizes = {
        "max_draft_len": (max(load.k, 1), "the longest draft: longer drafts are rejected"),
        "max_input_len": (whole, f"a whole sequence of {longest}{drafts}"),
        "max_seq_len": (whole, f"a whole sequence of {longest}{drafts}"),
        "max_batch_size": (load.sequences, "sequences at once"),
        "max_num_tokens": (charged, f"one {work} of {longest} tokens counts in full"),
    }
    if not is_target:
        del sizes["max_draft_len"]
    for name, (least, why) in sizes.items():
        key = f"build_config.{name}"
        if engine.count(key) < least:
            is_length = name in LENGTHS
            asked = ("max-context-len", longest) if is_length else (name.replace("_", "-"), least)
            remedy = f"build_engines.sh --{asked[0]} {asked[1]} (trtllm-build --{name})"
            yield fault(engine, key, engine.get(key), f"at least {least}: {why}", remedy)


def _check_both(target: Engine, draft: Engine, load: Load) -> Iterator[Fault]:
    versions = (target.get("version"), draft.get("version"))
    if all(versions) and versions[0] != versions[1]:
        needed = "the same in both, because one process loads one version of TensorRT-LLM"
        yield of_both("version", versions, needed, "build both in one container")
    if not share_vocabulary(target, draft, load):
        known = "" if load.num_tokens is None else f", from {load.num_tokens}, the tokenizer's"
        needed = f"the same in both{known}: drafted ids are the target's"
        remedy = "choose a draft of the target's family; if only the padding differs, set the "
        remedy += "tokenizer with --tokenizer"
        sizes = (target.vocab_size, draft.vocab_size)
        yield of_both("pretrained_config.vocab_size", sizes, needed, remedy)
    if load.uses_logits:
        yield from logits_faults(target, draft, load)


def share_vocabulary(target: Engine, draft: Engine, load: Load) -> bool:
    """Whether the vocabularies are equal, except for padding beyond the tokenizer's tokens."""
    sizes = (target.vocab_size, draft.vocab_size)
    return sizes[0] == sizes[1] or min(sizes) >= (load.num_tokens or max(sizes))


def logits_faults(target: Engine, draft: Engine, load: Load) -> Iterator[Fault]:
    """The reasons why drafts cannot be accepted by logits."""
    dtypes = (target.logits_dtype, draft.logits_dtype)
    if dtypes[0] != dtypes[1]:
        needed = "the same in both if drafts are accepted by logits"
        remedy = "trtllm-build --logits_dtype float32"
        yield of_both("pretrained_config.logits_dtype", dtypes, needed, remedy)
    padded = (target.padded_vocab_size, draft.padded_vocab_size)
    if padded[0] != padded[1] and share_vocabulary(target, draft, load):
        needed = (
            f"the same width of logits (padded {padded[0]}, {padded[1]}) if drafts are accepted by "
            "logits; acceptance by tokens ignores padding beyond the tokenizer"
        )
        remedy = "accept drafts by tokens" if load.uses_logits else ""
        sizes = (target.vocab_size, draft.vocab_size)
        yield of_both("pretrained_config.vocab_size", sizes, needed, remedy)


def fault(engine: Engine, key: str, value: Any, needed: str, remedy: str) -> Fault:
    return Fault(engine.role, key, "missing" if value is None else str(value), needed, remedy)


def of_both(key: str, values: Sequence[Any], needed: str, remedy: str) -> Fault:
    return Fault("pair", key, ", ".join(map(str, values)), needed, remedy)
