"""Can these engine directories serve speculation? Answered from their files, without TensorRT.

The rules are those of TensorRT-LLM's external-draft mode, read in its documentation and source
(docs/build_engines.md names them); none was tried on a GPU by this project. Every verification is
a new request that brings the whole text as its prompt, so lengths are those of whole sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from smartspec_py.engines.trtllm.engine_config import (
    TRTLLM_VERSION,
    Engine,
    EngineDirError,
    Role,
    read_engine,
)

NO_SPECULATION, EXTERNAL_DRAFTS = 1, 2
"""Bits of `build_config.speculative_decoding_mode`: NONE and DRAFT_TOKENS_EXTERNAL."""


class Severity(StrEnum):
    """error: will not be served. warning: served, but not as intended. note: good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """engine: target, draft or pair. key: where in config.json, or a file. value: what is there.
    needed: what must be there, and why. remedy: what to rebuild, by its flag; may be empty."""

    severity: Severity
    engine: str
    key: str
    value: str
    needed: str
    remedy: str


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


@dataclass(frozen=True)
class _Rule:
    """is_met: of the value at `key`."""

    key: str
    is_met: Callable[[Any], bool]
    needed: str
    remedy: str
    severity: Severity = Severity.ERROR

    def check(self, engine: Engine) -> Iterator[Finding]:
        value = engine.get(self.key)
        if not self.is_met(value):
            yield _finding(engine, self.key, value, self.needed, self.remedy, self.severity)


def _is_on(value: Any) -> bool:
    return value is True


_PLUGINS = "build_config.plugin_config"

_BOTH_RULES = (
    _Rule(
        "build_config.kv_cache_type",
        lambda value: str(value).upper() == "PAGED",
        "PAGED: in-flight batching and block reuse work on pages",
        "trtllm-build --kv_cache_type paged",
    ),
    _Rule(
        f"{_PLUGINS}.use_paged_context_fmha",
        _is_on,
        "true: without it block reuse is turned off, which external drafts need",
        "trtllm-build --use_paged_context_fmha enable",
    ),
    _Rule(
        f"{_PLUGINS}.context_fmha",
        _is_on,
        "true: paged context attention is a part of it",
        "trtllm-build --context_fmha enable",
    ),
    _Rule(
        f"{_PLUGINS}.remove_input_padding",
        _is_on,
        "true: in-flight batching packs its input",
        "trtllm-build --remove_input_padding enable",
    ),
    _Rule(
        f"{_PLUGINS}.gpt_attention_plugin",
        lambda value: bool(value) and value != "disable",
        "a dtype: in-flight batching needs the plugin",
        "trtllm-build --gpt_attention_plugin auto",
    ),
    _Rule(
        "build_config.gather_context_logits",
        lambda value: not value,
        "false: it turns block reuse off, which external drafts need",
        "trtllm-build without --gather_context_logits",
    ),
    _Rule(
        "build_config.max_beam_width",
        lambda value: value == 1,
        "1: external drafts know no beam search; more takes memory for nothing",
        "trtllm-build --max_beam_width 1",
        Severity.WARNING,
    ),
    _Rule(
        "pretrained_config.mapping.pp_size",
        lambda value: value in (None, 1),
        "1: external drafts are documented for tensor parallel engines alone",
        "convert_checkpoint.py --pp_size 1",
        Severity.WARNING,
    ),
)

_TARGET_RULES = (
    _Rule(
        "build_config.speculative_decoding_mode",
        lambda value: value == EXTERNAL_DRAFTS,
        f"{EXTERNAL_DRAFTS}, drafts from outside",
        "trtllm-build --speculative_decoding_mode draft_tokens_external",
    ),
)

_DRAFT_RULES = (
    _Rule(
        "build_config.speculative_decoding_mode",
        lambda value: value in (None, NO_SPECULATION),
        f"{NO_SPECULATION}, none: it drafts, and verifies nothing",
        "trtllm-build without --speculative_decoding_mode",
    ),
    _Rule(
        "build_config.max_draft_len",
        lambda value: not value,
        "0: a request without drafts reserves max_draft_len of max_seq_len",
        "trtllm-build without --max_draft_len",
        Severity.WARNING,
    ),
)


def check_pair(
    target: Path,
    draft: Path | None,
    *,
    k: int,
    sequences: int,
    context_len: int | None = None,
    num_tokens: int | None = None,
    uses_logits: bool = False,
) -> tuple[Finding, ...]:
    """What is wrong with the engines for this use; errors first. See `Load` for the arguments."""
    load = Load(k, sequences, context_len, num_tokens, uses_logits)
    folders = {Role.TARGET: target} | ({} if draft is None else {Role.DRAFT: draft})
    engines: dict[Role, Engine] = {}
    findings: list[Finding] = []
    for role, folder in folders.items():
        try:
            engines[role] = read_engine(role, folder)
        except EngineDirError as error:
            findings.append(_unreadable(role, folder, error))
    longest = context_len or _longest_context(engines.get(Role.TARGET))
    for engine in engines.values():
        findings += _check_engine(engine, load, longest)
    if len(engines) == 2:
        findings += _check_both(engines[Role.TARGET], engines[Role.DRAFT], load)
    return tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity)))


def has_errors(findings: tuple[Finding, ...]) -> bool:
    return any(finding.severity is Severity.ERROR for finding in findings)


def _unreadable(role: Role, folder: Path, error: EngineDirError) -> Finding:
    needed = "what trtllm-build writes"
    remedy = error.remedy or f"build {folder} with trtllm-build"
    return Finding(Severity.ERROR, role, error.key, error.reason, needed, remedy)


def _longest_context(target: Engine | None) -> int:
    """The longest sequence that the target's lengths allow; 0 where they are not known."""
    if target is None:
        return 0
    limits = (target.count("build_config.max_input_len"), target.count("build_config.max_seq_len"))
    return max(min(limits) - target.count("build_config.max_draft_len"), 0)


def _check_engine(engine: Engine, load: Load, context_len: int) -> Iterator[Finding]:
    yield from _check_version(engine)
    yield from _check_ranks(engine)
    own = _TARGET_RULES if engine.role is Role.TARGET else _DRAFT_RULES
    for rule in (*_BOTH_RULES, *own):
        yield from rule.check(engine)
    if engine.role is Role.TARGET:
        yield from _check_draft_len(engine, load)
    yield from _check_lengths(engine, load, context_len)
    yield from _check_batch(engine, load)
    yield from _check_num_tokens(engine, load, context_len)


def _check_version(engine: Engine) -> Iterator[Finding]:
    version = engine.get("version")
    if not version:
        needed = f"a version, {TRTLLM_VERSION}: without one it is of an old builder"
        yield _finding(engine, "version", version, needed, "build it anew with trtllm-build")
    elif version != TRTLLM_VERSION:
        needed = (
            f"{TRTLLM_VERSION}, which this project is written for: an engine runs on the version "
            "of TensorRT-LLM and TensorRT that built it, and the bindings of others may differ"
        )
        remedy = "build and serve in container 26.04 to 26.07"
        yield _finding(engine, "version", version, needed, remedy, Severity.WARNING)


def _check_ranks(engine: Engine) -> Iterator[Finding]:
    wanted = [f"rank{rank}.engine" for rank in range(engine.num_ranks)]
    lacking = [name for name in wanted if not engine.rank_sizes.get(name)]
    remedy = "build it anew: build_engines.sh --force"
    if lacking:
        needed = f"{len(wanted)} files that are not empty, one for each of tp * pp * cp ranks"
        yield _finding(engine, lacking[0], "missing or empty", needed, remedy)
    extra = sorted(set(engine.rank_sizes) - set(wanted))
    if extra:
        needed = f"{len(wanted)} files; this one is of another build"
        yield _finding(engine, extra[0], "not wanted", needed, remedy, Severity.WARNING)


def _check_draft_len(engine: Engine, load: Load) -> Iterator[Finding]:
    key = "build_config.max_draft_len"
    longest = max(load.k, 1)
    if engine.count(key) < longest:
        needed = f"at least {longest}, the longest draft: longer ones are refused"
        yield _finding(engine, key, engine.get(key), needed, _flag("max-draft-len", longest))


def _check_lengths(engine: Engine, load: Load, context_len: int) -> Iterator[Finding]:
    """The target resends text and drafts as a prompt, and reserves max_draft_len without drafts."""
    is_target = engine.role is Role.TARGET
    reserve = max(load.k, engine.count("build_config.max_draft_len")) if is_target else 0
    for key in ("build_config.max_input_len", "build_config.max_seq_len"):
        if engine.count(key) < context_len + reserve:
            drafts = f" and {reserve} drafts" if is_target else ""
            needed = f"at least {context_len + reserve}: a whole sequence of {context_len}{drafts}"
            remedy = _flag("max-context-len", context_len, key)
            yield _finding(engine, key, engine.get(key), needed, remedy)


def _check_batch(engine: Engine, load: Load) -> Iterator[Finding]:
    key = "build_config.max_batch_size"
    if engine.count(key) < load.sequences:
        needed = f"at least {load.sequences} sequences at once"
        remedy = _flag("max-batch-size", load.sequences)
        yield _finding(engine, key, engine.get(key), needed, remedy)


def _check_num_tokens(engine: Engine, load: Load, context_len: int) -> Iterator[Finding]:
    """Each prompt is charged in full, cached or not, against the tokens of one iteration."""
    key = "build_config.max_num_tokens"
    length = context_len + (load.k if engine.role is Role.TARGET else 0)
    if not length:
        return
    work = "verification" if engine.role is Role.TARGET else "draft"
    num_fitting = engine.count(key) // length
    if not num_fitting:
        needed = f"at least {length}: one {work} of {context_len} tokens is charged whole"
        yield _finding(engine, key, engine.get(key), needed, _flag("max-num-tokens", length))
        return
    num_iterations = math.ceil(load.sequences / num_fitting)
    if num_iterations > 1:
        needed = (
            f"{length * load.sequences} for one iteration: {num_fitting} {work}s of {context_len} "
            f"tokens fit in one, so a step of {load.sequences} takes {num_iterations}"
        )
        remedy = _flag("max-num-tokens", length * load.sequences)
        yield _finding(engine, key, engine.get(key), needed, remedy, Severity.WARNING)


def _check_both(target: Engine, draft: Engine, load: Load) -> Iterator[Finding]:
    versions = (target.get("version"), draft.get("version"))
    if all(versions) and versions[0] != versions[1]:
        needed = "the same in both: one process loads one TensorRT-LLM"
        yield _both("version", versions, needed, "build both in one container")
    yield from _check_vocabularies(target, draft, load)
    dtypes = (target.logits_dtype, draft.logits_dtype)
    if dtypes[0] != dtypes[1]:
        needed = "the same in both, where drafts are accepted by logits"
        remedy = "trtllm-build --logits_dtype float32"
        key = "pretrained_config.logits_dtype"
        yield _both(key, dtypes, needed, remedy, _severity_for_logits(load))
    if max(target.num_ranks, draft.num_ranks) > 1:
        needed = (
            "more than one GPU: each engine gets its own worker processes, in orchestrator mode "
            "with device ids; two engines in one leader process were seen with one rank only"
        )
        sizes = (target.tp_size, draft.tp_size)
        yield _both("pretrained_config.mapping.tp_size", sizes, needed, "", Severity.NOTE)


def _check_vocabularies(target: Engine, draft: Engine, load: Load) -> Iterator[Finding]:
    key = "pretrained_config.vocab_size"
    sizes = (target.vocab_size, draft.vocab_size)
    num_tokens = load.num_tokens
    if sizes[0] != sizes[1] and (num_tokens is None or min(sizes) < num_tokens):
        known = "" if num_tokens is None else f", from {num_tokens}, the tokens of the tokenizer"
        needed = f"the same in both{known}: drafted ids are the target's"
        remedy = "choose a draft of the target's family; name the tokenizer with --tokenizer if "
        remedy += "only the padding differs"
        yield _both(key, sizes, needed, remedy)
        return
    padded = (target.padded_vocab_size, draft.padded_vocab_size)
    if padded[0] != padded[1]:
        needed = (
            f"the same width of logits (padded {padded[0]}, {padded[1]}), where drafts are "
            "accepted by logits; by tokens, padding beyond the tokenizer does no harm"
        )
        remedy = "accept drafts by tokens" if load.uses_logits else ""
        yield _both(key, sizes, needed, remedy, _severity_for_logits(load))


def _severity_for_logits(load: Load) -> Severity:
    return Severity.ERROR if load.uses_logits else Severity.NOTE


def _flag(name: str, value: int, key: str | None = None) -> str:
    """The option of build_engines.sh, and the key's own of trtllm-build."""
    own = "--" + (key.rpartition(".")[2] if key else name.replace("-", "_"))
    return f"build_engines.sh --{name} {value} (trtllm-build {own})"


def _finding(
    engine: Engine,
    key: str,
    value: Any,
    needed: str,
    remedy: str,
    severity: Severity = Severity.ERROR,
) -> Finding:
    shown = "missing" if value is None else str(value)
    return Finding(severity, engine.role, key, shown, needed, remedy)


def _both(
    key: str,
    values: tuple[Any, Any],
    needed: str,
    remedy: str,
    severity: Severity = Severity.ERROR,
) -> Finding:
    return Finding(severity, "pair", key, f"{values[0]}, {values[1]}", needed, remedy)
