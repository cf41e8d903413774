"""All findings about engine directories: errors of the backend, warnings and notes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from smartspec_py.engines.trtllm.engine_config import TRTLLM_VERSION, Engine, Role
from smartspec_py.engines.trtllm.engine_dir import (
    Fault,
    Load,
    fault,
    faults_of,
    logits_faults,
    of_both,
    read_engines,
)


class Severity(StrEnum):
    """error: cannot be served. warning: can be served, but not as intended. note: information."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """See `Fault`."""

    severity: Severity
    engine: str
    key: str
    value: str
    needed: str
    remedy: str


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
    """Problems of the engines for this use; errors first. See `Load` for the arguments."""
    load = Load(k, sequences, context_len, num_tokens, uses_logits)
    paths = {Role.TARGET: target} | ({} if draft is None else {Role.DRAFT: draft})
    engines, unreadable = read_engines(paths)
    longest = load.longest(engines.get(Role.TARGET))
    found = {Severity.ERROR: [*unreadable, *faults_of(engines, load)]}
    found[Severity.WARNING] = [
        one for engine in engines.values() for one in _warnings(engine, load, longest)
    ]
    found[Severity.NOTE] = []
    if len(engines) == 2:
        found[Severity.NOTE] += _notes(engines[Role.TARGET], engines[Role.DRAFT], load)
    return tuple(Finding(severity, *one) for severity, ones in found.items() for one in ones)


def has_errors(findings: tuple[Finding, ...]) -> bool:
    return any(finding.severity is Severity.ERROR for finding in findings)


def _warnings(engine: Engine, load: Load, longest: int) -> Iterator[Fault]:
    version = engine.get("version")
    if version and version != TRTLLM_VERSION:
        needed = (
            f"{TRTLLM_VERSION}, which this project supports: an engine runs only on the version "
            "of TensorRT-LLM and TensorRT that built it, and other bindings may differ"
        )
        remedy = "build and serve in container 26.04 to 26.07"
        yield fault(engine, "version", version, needed, remedy)
    extra = sorted(set(engine.rank_sizes) - set(engine.rank_files))
    if extra:
        needed = f"{engine.num_ranks} files; this one is from another build"
        remedy = "rebuild it: build_engines.sh --force"
        yield fault(engine, extra[0], "not expected", needed, remedy)
    key = "build_config.max_beam_width"
    if engine.get(key) != 1:
        needed = "1: external drafts do not support beam search; more only wastes memory"
        yield fault(engine, key, engine.get(key), needed, "trtllm-build --max_beam_width 1")
    key = "pretrained_config.mapping.pp_size"
    if engine.get(key) not in (None, 1):
        needed = "1: external drafts are documented for tensor parallel engines only"
        yield fault(engine, key, engine.get(key), needed, "convert_checkpoint.py --pp_size 1")
    key = "build_config.max_draft_len"
    if engine.role is Role.DRAFT and engine.get(key):
        needed = "0: a request without drafts reserves max_draft_len of max_seq_len"
        remedy = "trtllm-build without --max_draft_len"
        yield fault(engine, key, engine.get(key), needed, remedy)
    yield from _iterations(engine, load, longest)


def _iterations(engine: Engine, load: Load, longest: int) -> Iterator[Fault]:
    """Warn if a step needs several iterations. The token limit counts each whole prompt, cached or
    not."""
    key = "build_config.max_num_tokens"
    is_target = engine.role is Role.TARGET
    length = longest + (load.k if is_target else 0)
    num_fitting = engine.count(key) // length if length else 0
    if not num_fitting or load.sequences <= num_fitting:
        return
    work = "verification" if is_target else "draft"
    most = length * load.sequences
    needed = (
        f"{most} for one iteration: {num_fitting} {work}s of {longest} tokens fit in one, so a "
        f"step of {load.sequences} takes {math.ceil(load.sequences / num_fitting)}"
    )
    remedy = f"build_engines.sh --max-num-tokens {most} (trtllm-build --max_num_tokens)"
    yield fault(engine, key, engine.get(key), needed, remedy)


def _notes(target: Engine, draft: Engine, load: Load) -> Iterator[Fault]:
    if not load.uses_logits:
        yield from logits_faults(target, draft, load)
    if max(target.num_ranks, draft.num_ranks) > 1:
        needed = (
            "more than one GPU: each engine gets its own worker processes, in orchestrator mode "
            "with device ids; two engines in one leader process were seen with one rank only"
        )
        sizes = (target.tp_size, draft.tp_size)
        yield of_both("pretrained_config.mapping.tp_size", sizes, needed, "")
