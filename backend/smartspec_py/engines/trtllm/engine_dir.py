"""Which engine directories cannot be served? Answered from their files, without TensorRT.

The rules are those of TensorRT-LLM's external-draft mode, read in its documentation and source
(docs/tensorrt-llm/build-engines.md names them); none was tried on a GPU by this project. Every
verification is a new request that brings the whole text as its prompt, so lengths are those of
whole sequences. What is served, but not as intended, `smartspec check-engines` says
(`smartspec_trtllm.findings`).
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
"""Bits of `build_config.speculative_decoding_mode`: NONE and DRAFT_TOKENS_EXTERNAL."""


LENGTHS = ("max_input_len", "max_seq_len")
"""Of a sequence, in `build_config`."""


class Fault(NamedTuple):
    """engine: target, draft or pair. key: where in config.json, or a file. value: what is there.
    needed: what must be there, and why. remedy: what to rebuild, by its flag; may be empty."""

    engine: str
    key: str
    value: str
    needed: str
    remedy: str

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"engine.{self.engine}: {self.key} is {self.value}, needed is {self.needed}{remedy}"


@dataclass(frozen=True)
class Load:
    """What is to be served. k: longest draft, tokens. sequences: at once. context_len: tokens of
    the longest sequence, prompt and text; None: as long as the target allows.
    num_tokens: ids that the tokenizer knows, the highest plus one; None: not known.
    uses_logits: whether drafts are accepted by the draft's logits, not by tokens alone."""

    k: int
    sequences: int
    context_len: int | None = None
    num_tokens: int | None = None
    uses_logits: bool = False

    def longest(self, target: Engine | None) -> int:
        """Tokens of the longest sequence; 0 where that is not known."""
        if self.context_len or target is None:
            return self.context_len or 0
        lengths = [target.count(f"build_config.{name}") for name in LENGTHS]
        return max(min(lengths) - target.count("build_config.max_draft_len"), 0)


class _Rule(NamedTuple):
    """is_met: of the value at `key`. flag: of trtllm-build."""

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
        "PAGED: in-flight batching and block reuse work on pages",
        "--kv_cache_type paged",
    ),
    _plugin(
        "use_paged_context_fmha", "without it block reuse is turned off, which external drafts need"
    ),
    _plugin("context_fmha", "paged context attention is a part of it"),
    _plugin("remove_input_padding", "in-flight batching packs its input"),
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
        f"{EXTERNAL_DRAFTS}, drafts from outside",
        "--speculative_decoding_mode draft_tokens_external",
    ),
    Role.DRAFT: _Rule(
        _MODE,
        lambda value: value in (None, NO_SPECULATION),
        f"{NO_SPECULATION}, none: it drafts, and verifies nothing",
        "without --speculative_decoding_mode",
    ),
}


def read_engines(paths: Mapping[Role, Path]) -> tuple[dict[Role, Engine], list[Fault]]:
    """The engines that can be read, and why the others cannot."""
    engines, faults = {}, []
    for role, folder in paths.items():
        try:
            engines[role] = read_engine(role, folder)
        except EngineDirError as error:
            remedy = error.remedy or f"build {folder} with trtllm-build"
            faults.append(Fault(role, error.key, error.reason, "what trtllm-build writes", remedy))
    return engines, faults


def faults_of(engines: Mapping[Role, Engine], load: Load) -> Iterator[Fault]:
    """Why the engines cannot serve this."""
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
        needed = f"a version, {TRTLLM_VERSION}: without one it is of an old builder"
        yield fault(engine, "version", None, needed, "build it anew with trtllm-build")
    lacking = [name for name in engine.rank_files if not engine.rank_sizes.get(name)]
    if lacking:
        needed = f"{engine.num_ranks} files that are not empty, one for each of tp * pp * cp ranks"
        remedy = "build it anew: build_engines.sh --force"
        yield fault(engine, lacking[0], "missing or empty", needed, remedy)


def _check_sizes(engine: Engine, load: Load, longest: int) -> Iterator[Fault]:
    """The target resends text and drafts as a prompt, and reserves max_draft_len without drafts.
    Each prompt is charged in full, cached or not, against the tokens of one iteration."""
    is_target = engine.role is Role.TARGET
    draft_len = engine.count("build_config.max_draft_len")
    reserve = max(load.k, draft_len) if is_target else 0
    whole = longest + reserve
    drafts, work = (f" and {reserve} drafts", "verification") if is_target else ("", "draft")
    charged = longest and longest + (load.k if is_target else 0)
    sizes = {
        "max_draft_len": (max(load.k, 1), "the longest draft: longer ones are refused"),
        "max_input_len": (whole, f"a whole sequence of {longest}{drafts}"),
        "max_seq_len": (whole, f"a whole sequence of {longest}{drafts}"),
        "max_batch_size": (load.sequences, "sequences at once"),
        "max_num_tokens": (charged, f"one {work} of {longest} tokens is charged whole"),
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
        needed = "the same in both: one process loads one TensorRT-LLM"
        yield of_both("version", versions, needed, "build both in one container")
    if not share_vocabulary(target, draft, load):
        known = "" if load.num_tokens is None else f", from {load.num_tokens}, the tokenizer's"
        needed = f"the same in both{known}: drafted ids are the target's"
        remedy = "choose a draft of the target's family; name the tokenizer with --tokenizer if "
        remedy += "only the padding differs"
        sizes = (target.vocab_size, draft.vocab_size)
        yield of_both("pretrained_config.vocab_size", sizes, needed, remedy)
    if load.uses_logits:
        yield from logits_faults(target, draft, load)


def share_vocabulary(target: Engine, draft: Engine, load: Load) -> bool:
    """Whether sizes differ beyond the tokenizer's at most, by padding."""
    sizes = (target.vocab_size, draft.vocab_size)
    return sizes[0] == sizes[1] or min(sizes) >= (load.num_tokens or max(sizes))


def logits_faults(target: Engine, draft: Engine, load: Load) -> Iterator[Fault]:
    """What stands against accepting drafts by logits."""
    dtypes = (target.logits_dtype, draft.logits_dtype)
    if dtypes[0] != dtypes[1]:
        needed = "the same in both, where drafts are accepted by logits"
        remedy = "trtllm-build --logits_dtype float32"
        yield of_both("pretrained_config.logits_dtype", dtypes, needed, remedy)
    padded = (target.padded_vocab_size, draft.padded_vocab_size)
    if padded[0] != padded[1] and share_vocabulary(target, draft, load):
        needed = (
            f"the same width of logits (padded {padded[0]}, {padded[1]}), where drafts are "
            "accepted by logits; by tokens, padding beyond the tokenizer does no harm"
        )
        remedy = "accept drafts by tokens" if load.uses_logits else ""
        sizes = (target.vocab_size, draft.vocab_size)
        yield of_both("pretrained_config.vocab_size", sizes, needed, remedy)


def fault(engine: Engine, key: str, value: Any, needed: str, remedy: str) -> Fault:
    return Fault(engine.role, key, "missing" if value is None else str(value), needed, remedy)


def of_both(key: str, values: Sequence[Any], needed: str, remedy: str) -> Fault:
    return Fault("pair", key, ", ".join(map(str, values)), needed, remedy)
