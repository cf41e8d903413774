"""Finds engines that cannot be served, from their config.json. Never run with a real engine.

The rules are those of TensorRT-LLM's external-draft mode, from its documentation and source
(docs/tensorrt-llm/build-engines.md names them). Every verification is a new request with the whole
text as its prompt, so all lengths refer to whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from smartspec_py.engines.trtllm.engine_config import Engine, Role
from smartspec_py.serving.config import LimitsConfig

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
