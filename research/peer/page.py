"""The page of results: a table for each data type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from peer.results import DTYPES, NUM_TOKENS, Block, Compared, Document, summary
from smartspec_bench.ratios import Ratio
from studies.document import table, wrapped

NAMES = {"vllm": "vLLM", "openvino": "OpenVINO"}
INTRODUCTION = (
    "How fast is this engine beside vLLM's CPU build and OpenVINO GenAI? `scripts/bench_peer`: the "
    "pair of `research/peer/pair.py` (97 M and 5.6 M parameters), 2 threads on each side, "
    f"{NUM_TOKENS} tokens per request, greedy, prompts of the mixed workload, sides in turns.",
    "Ratios are our time between the tokens of a request divided by the peer's: below 1, this "
    "engine is faster. In brackets: 95 % intervals over the rounds. *none*: no speculation. The "
    "last column compares with the peer and the fixed draft length k that were fastest on that "
    "processor.",
)
# fmt: off
SUMMARY_HEADER = ("processor", "at once", "our none / vLLM's none",
                  "our none / the faster peer's none", "our goodput / vLLM's none",
                  "our goodput / the best of the peers with any k")
# fmt: on


def page(document: Document) -> str:
    """Markdown."""
    parts = ["# Comparison with vLLM and OpenVINO GenAI on CPUs", *INTRODUCTION]
    for each in DTYPES:
        if rows := list(_summary_rows(document, each)):
            parts += [f"## {each}", table(SUMMARY_HEADER, rows)]
    notes = [
        f"- {dtype}, {processor}: {'; '.join(map(_note, blocks))}"
        for (processor, dtype), blocks in _groups(document.blocks)
    ]
    parts += ["## Runs", "\n".join(notes), "All rounds: [peer.json](peer.json)."]
    return "\n\n".join(map(wrapped, parts)) + "\n"


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


def _note(block: Block) -> str:
    parts = [f"{NAMES[block.peer]} {block.version}, k = {block.k or 'none'}, {block.date}"]
    if block.same_texts:
        same, of = block.same_texts
        parts.append(f"{same} of {of} texts equal")
    if block.refused:
        parts.append(f"it failed: {block.refused}")
    return ", ".join(parts)


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
