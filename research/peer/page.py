"""The page of results: a short table for each data type, then every row."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from peer.results import DTYPES, NUM_TOKENS, Block, Compared, Document, Times, summary
from smartspec_bench.ratios import Ratio
from studies.document import table

NAMES = {"vllm": "vLLM", "openvino": "OpenVINO"}
INTRODUCTION = (
    "`scripts/bench_peer`: the pair of research/peer/pair.py (97 M and 5.6 M parameters), 2 "
    f"threads on either side, {NUM_TOKENS} tokens per request, greedy, prompts of the mixed "
    "workload, sides in turns, the side that waits stopped.",
    "Ratios are our time between a request's tokens over the peer's: below 1 we are faster. 95 % "
    "intervals over the rounds. k is the peer's draft length, fixed at its start; ours is the "
    "policy of the request. Short tables: the faster peer and the best k are those with the "
    "highest ratio among what was measured on that processor, and the cell names them.",
)
# fmt: off
SUMMARY_HEADER = ("processor", "at once", "our none / vLLM's none",
                  "our none / the faster peer's none", "our goodput / vLLM's none",
                  "our goodput / the best of the peers with any k")
HEADER = ("peer", "k", "at once", "ours", "rounds", "ours, ms a token", "peer, ms a token", "ratio",
          "first token, ratio", "whole answer, ratio")
# fmt: on


def page(document: Document) -> str:
    """Markdown."""
    parts = ["# The PyTorch engine beside vLLM's CPU build and OpenVINO GenAI", *INTRODUCTION]
    for each in DTYPES:
        if rows := list(_summary_rows(document, each)):
            parts += [f"## {each}", table(SUMMARY_HEADER, rows)]
    for (processor, dtype), blocks in _groups(document.blocks):
        parts += [
            f"## Every row: {dtype}, {processor}",
            table(HEADER, [row for block in blocks for row in _rows(block)]),
            "\n".join(map(_note, blocks)),
        ]
    return "\n\n".join(parts) + "\n"


def _groups(blocks: Sequence[Block]) -> list[tuple[tuple[str, str], list[Block]]]:
    """By processor and data type, in the order of peers and k."""
    groups: dict[tuple[str, str], list[Block]] = {}
    for block in sorted(blocks, key=lambda one: (DTYPES.index(one.dtype), one.peer, one.k)):
        groups.setdefault((block.processor, block.dtype), []).append(block)
    return list(groups.items())


def _summary_rows(document: Document, dtype: str) -> Iterator[Sequence[object]]:
    for (processor, of_dtype), blocks in _groups(document.blocks):
        quick = ", quick run" if any(block.is_quick for block in blocks) else ""
        for batch_size in sorted({one.batch_size for block in blocks for one in block.measured}):
            if of_dtype == dtype:
                yield processor + quick, batch_size, *map(_cell, summary(blocks, batch_size))
    for hand in document.by_hand:
        if hand.dtype == dtype:
            named = f"{hand.processor}, {hand.source}"
            yield named, hand.batch_size, _figures(hand.none), "-", _figures(hand.goodput), "-"


def _rows(block: Block) -> Iterator[Sequence[object]]:
    for one in block.measured:
        for policy, times in sorted(one.ours.items()):
            yield (
                NAMES[block.peer],
                block.k or "none",
                one.batch_size,
                policy,
                len(times),
                _ms(times),
                _ms(one.theirs),
                *(shown(one.ratio(policy, figure)) for figure in ("token_s", "first_s", "whole_s")),
            )


def _note(block: Block) -> str:
    parts = [f"- {NAMES[block.peer]} {block.version}, k = {block.k or 'none'}: {block.date}"]
    if block.is_quick:
        parts.append("quick run")
    if block.same_texts:
        same, of = block.same_texts
        parts.append(f"greedy texts that are the same on both sides: {same} of {of}")
    if block.refused:
        parts.append(f"it failed: {block.refused}")
    return "; ".join(parts)


def _cell(compared: Compared | None) -> str:
    if compared is None:
        return "-"
    k = f", k = {compared.k}" if compared.k else ""
    return f"{shown(compared.ratio)}, {NAMES[compared.peer]}{k}"


def shown(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    return _figures((ratio.value, ratio.low, ratio.high)[: 3 if ratio.num_pairs > 1 else 1])


def _figures(figures: Sequence[float]) -> str:
    value, *bounds = [f"{figure:.2f}" for figure in figures]
    return f"{value} ({' to '.join(bounds)})" if bounds else value


def _ms(times: Sequence[Times]) -> str:
    """Median over the rounds."""
    return f"{1e3 * statistics.median(one.token_s for one in times):.1f}"
