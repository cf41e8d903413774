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


def _plugin(name: str, needed: str) -> _Rule:
    key = f"build_config.plugin_config.{name}"
    return _Rule(
        key, lambda value: value is True, f"true: {needed}", f"trtllm-build --{name} enable"
    )


_RULES = (
    _Rule("version", bool, "a version: old builders wrote none", "build it again"),
    _Rule(
        "build_config.kv_cache_type",
        lambda value: str(value).upper() == "PAGED",
        "PAGED: in-flight batching and block reuse need pages",
        "trtllm-build --kv_cache_type paged",
    ),
    _plugin("use_paged_context_fmha", "without it block reuse is off, which external drafts need"),
    _plugin("context_fmha", "paged context attention needs it"),
    _plugin("remove_input_padding", "in-flight batching needs packed input"),
    _Rule(
        "build_config.plugin_config.gpt_attention_plugin",
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
)

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
    engines: Mapping[Role, Engine], limits: LimitsConfig, num_tokens: int, *, uses_logits: bool
) -> Iterator[str]:
    """The reasons why the engines cannot serve these limits, each with what to rebuild.

    num_tokens: token ids of the tokenizer. uses_logits: whether drafts are accepted by logits.
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
    if draft := engines.get(Role.DRAFT):
        yield from _pair_faults(target, draft, num_tokens, uses_logits)


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


def _pair_faults(
    target: Engine, draft: Engine, num_tokens: int, uses_logits: bool
) -> Iterator[str]:
    """Vocabularies may differ in padding beyond the tokenizer, unless logits are compared."""
    found = target.get("version"), draft.get("version")
    if all(found) and found[0] != found[1]:
        yield f"engine.draft: version is {found[1]}, must be {found[0]}, as of the target"
    sizes = target.vocab_size, draft.vocab_size
    if sizes[0] != sizes[1] and min(sizes) < num_tokens:
        yield (
            f"engine.draft: vocab_size is {sizes[1]}, must be {sizes[0]}, as of the target, or "
            f"both at least {num_tokens}, the ids of the tokenizer; choose a draft of its family"
        )
    if not uses_logits:
        return
    widths = target.padded_vocab_size, draft.padded_vocab_size
    types = [
        engine.get("pretrained_config.logits_dtype") or "float32" for engine in (target, draft)
    ]
    if widths[0] != widths[1] or types[0] != types[1]:
        yield (
            f"engine.sampled_verification: logits of the engines are {widths[0]} {types[0]} and "
            f"{widths[1]} {types[1]}, must be equal; set it to none, which accepts drafts by tokens"
        )
