"""Measured figures in the pages: each sentence below has the figures of its result file.

A sentence is a template. The test fills it with the values of the file, and looks for it in the
page. When a file changes, the failure shows the sentence that the page should have.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from smartspec_bench.document import Document, Phase
from smartspec_bench.document import read as read_load
from studies.headline import LOADS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
AMD, INTEL = "lockstep-amd.json", "lockstep-intel.json"
STEP = ("step", 0.0)

Values = tuple[Any, ...]


@cache
def load(name: str) -> Document:
    return read_load(RESULTS / name)


@cache
def study(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def mean(name: str, place: tuple[str, float], policy: str, value: Callable[[Phase], Any]) -> float:
    """Geometric mean over the repeats of a policy at a shape and load."""
    found = [
        value(one)
        for one in load(name).phases
        if (one.shape, one.load) == place and one.policy == policy
    ]
    return math.exp(statistics.mean(map(math.log, found)))


def places(name: str) -> set[tuple[str, float]]:
    return {(one.shape, one.load) for one in load(name).phases}


def over_none(name: str, value: Callable[[Phase], Any]) -> list[float]:
    """Of goodput, at each shape and load."""
    return [
        mean(name, place, "goodput", value) / mean(name, place, "none", value)
        for place in places(name)
    ]


def latency_ratios(name: str) -> list[float]:
    """Mean latency over none's, as compared pair by pair."""
    return [
        one.ratio
        for one in load(name).comparisons
        if (one.against, one.metric) == ("none", "e2e_ms.mean") and one.policy == "goodput"
    ]


def p99(phase: Phase) -> Any:
    return phase.e2e_ms.p99


def ttft(phase: Phase) -> Any:
    return phase.ttft_ms.mean


def e2e(phase: Phase) -> Any:
    return phase.e2e_ms.mean


def p99_over_best_fixed(name: str, place: tuple[str, float]) -> float:
    """Over the fixed length with the lowest mean latency."""
    fixed = {one.policy for one in load(name).phases if one.policy.startswith("fixed")}
    best = min(fixed, key=lambda policy: mean(name, place, policy, e2e))
    return mean(name, place, "goodput", p99) / mean(name, place, best, p99)


def percent(ratio: float) -> int:
    return round(100 * (ratio - 1))


def cost() -> Values:
    runs = (AMD, INTEL)
    most = max(max(over_none(name, ttft)) for name in runs)
    steady = [place for place in LOADS if place != STEP]
    return (
        percent(most),
        percent(max(p99_over_best_fixed(name, place) for name in runs for place in steady)),
        percent(max(p99_over_best_fixed(name, STEP) for name in runs)),
    )


def slower() -> Values:
    ratios = latency_ratios(AMD)
    return (
        min(ratios),
        max(ratios),
        *(percent(max(over_none(name, of))) for name in (AMD, INTEL) for of in (p99, ttft)),
    )


def counted(name: str) -> Counter[str]:
    """Verdicts. Where the load changes, the best fixed length is also one of the fixed lengths."""
    return Counter(
        one.verdict
        for one in load(name).comparisons
        if one.role != "best fixed" or one.shape in ("closed", "steady")
    )


def verdicts() -> Values:
    counts, ratios = counted(AMD), latency_ratios(AMD)
    return counts["met"], sum(counts.values()), counts["open"], min(ratios), max(ratios)


def first_minute(name: str, side: str = "goodput") -> Values:
    """A side over the better of the others, by part of the minute, mean over rounds."""
    rounds = study(name)["rounds"]
    return tuple(
        statistics.mean(one[side][i] / max(one["none"][i], one["fixed:3"][i]) for one in rounds)
        for i in range(3)
    )


def heads() -> Values:
    """Goodput over no speculation: heads, draft model, all three; one and eight at once."""
    found = study("heads-amd")
    rates = found["tokens_per_s"]

    def ratio(size: str, proposers: str) -> float:
        arm = found["arms"].index(f"goodput: {proposers}")
        return statistics.mean(one[arm] / one[0] for one in rates[size])

    draft_model, medusa, all_three = "draft model, lookup", "heads, lookup", "all three"
    return (
        *(ratio(size, which) for size in ("1", "8") for which in (medusa, draft_model)),
        *(ratio(size, all_three) for size in ("1", "8")),
    )


def openai_cost() -> Values:
    """By streams: throughput over gRPC's, and how much later the first token comes."""

    def mean(streams: str, path: str, name: str) -> float:
        return statistics.mean(one[name] for one in study("openai_cost")["streams"][streams][path])

    def ratio(streams: str) -> float:
        return mean(streams, "OpenAI", "tokens_per_s") / mean(streams, "gRPC", "tokens_per_s")

    def later_ms(streams: str) -> float:
        return mean(streams, "OpenAI", "first_ms") - mean(streams, "gRPC", "first_ms")

    sizes = ("1", "8", "32")
    return (*map(ratio, sizes), *map(later_ms, sizes))


def tree_rates(arm: str, *sizes: str) -> Values:
    """Tokens per second on mixed texts over no speculation."""
    found = study("trees")
    index = found["arms"].index(arm)
    return tuple(
        of_size[index]["mixed"]["tokens_per_s"] / of_size[0]["mixed"]["tokens_per_s"]
        for of_size in (found["slots"][size] for size in sizes)
    )


def all_over_single(workload: str, *sizes: str) -> Values:
    """Tokens per second of all proposers with trees, over the best single proposer."""
    found = study("trees")
    singles = [index for index, arm in enumerate(found["arms"]) if "all," not in arm]
    everything = found["arms"].index("goodput: all, trees")
    return tuple(
        of_size[everything][workload]["tokens_per_s"]
        / max(of_size[index][workload]["tokens_per_s"] for index in singles)
        for of_size in (found["slots"][size] for size in sizes)
    )


def tree_drafts() -> Values:
    found = study("trees")
    index = found["arms"].index("goodput: tree of heads")
    return tuple(found["slots"][size][index]["mixed"]["drafts"] for size in ("1", "8", "32"))


def useless_and_dear() -> Values:
    names = ("never-slower-useless.json", "never-slower-17m.json")
    return tuple(ratio for name in names for ratio in sorted(latency_ratios(name)))


def first_tokens() -> Values:
    loads = study("first_token")["loads"].values()
    return tuple(
        max(one[policy][3] for one in loads) for policy in ("goodput", "a prompt counts 0")
    )


def measured_first_token() -> Values:
    return (max(max(over_none(name, ttft)) for name in (AMD, INTEL)),)


def grid() -> Values:
    cells = study("grid")["cells"]
    return sum(cell["to_best"]["value"] >= 0.98 for cell in cells), len(cells)


def overhead() -> Values:
    ratios = [one["ratio"] for one in study("overhead-88m")["sizes"]]
    return tuple(-percent(min(one[key] for one in ratios)) for key in ("value", "low"))


def fidelity() -> Values:
    """Up to 0.7 of saturation."""
    points = [one for one in study("fidelity")["points"] if one["share"] is not None]
    near = [abs(one["ratios"]["e2e_ms_mean"]["ratio"] - 1) <= 0.1 for one in points]
    return sum(near), len(near)


def adapter() -> Values:
    rows = study("adapter")["rows"]
    return (1e3 * max(row["own_s"] for row in rows if row["num_sequences"] == 64),)


def contract() -> Values:
    uses = study("contract")["uses"]
    return sum(use["is_recorded"] for use in uses), len(uses)


def spread() -> Values:
    cases = study("spread")["cases"]
    assert min(case["over_fixed"]["value"] for case in cases) >= 0.98
    return (len(cases),)


def front() -> Values:
    by_size = {one["batch_size"]: one["front_ratio"]["value"] for one in study("front")["sizes"]}
    return (100 * (1 - by_size[1]),)


def intel_verdicts() -> Values:
    counts = counted(INTEL)
    return counts["met"], sum(counts.values())


def regret() -> Values:
    """Percent lost to the best fixed length, mean over the cases."""
    rows = [(one["tokens_per_s"], one["best_fixed"]) for one in study("regret")["rows"]]
    return (100 * statistics.mean(1 - tps["goodput"] / tps[best] for tps, best in rows),)


def adaptation() -> Values:
    rows = [one["steps_until_below"] for one in study("adaptation")["rows"] if one["arm"] == "ours"]
    return sum(steps is not None and steps <= 200 for steps in rows), len(rows)


def aiperf() -> Values:
    """Figures whose median ratio over the rounds is within 3 %, of all."""
    ratios = [
        statistics.median(
            b[name] / a[name] for a, b in zip(one["ours"], one["aiperf"], strict=True)
        )
        for one in study("aiperf")["cases"]
        for name in one["ours"][0]
    ]
    return sum(abs(ratio - 1) <= 0.03 for ratio in ratios), len(ratios)


def to_peers() -> Values:
    """Measured cases in which the interval is below 1 (never), all, and those above 1."""
    intervals = [
        [float(bound) for bound in re.findall(r"[\d.]+", ratio)[1:]]
        for _, _, ratios in measured_on_cpus()
        for ratio in ratios
    ]
    assert not any(high < 1 for _, high in intervals)
    return len(intervals), sum(low > 1 for low, _ in intervals), max(by_hand())


def by_hand() -> Values:
    return tuple(one["goodput"][0] for one in study("peer")["by_hand"])


FIGURES = [
    (
        "README.md",
        "the first token comes up to {} % later than without speculation. p99 is up to {} % higher "
        "than with the best fixed length at these steady loads, and up to {} % where the load "
        "changes",
        cost,
    ),
    (
        "README.md",
        "these cost [up to {} % of the throughput](docs/results/overhead-88m.json), with intervals "
        "up to {} %",
        overhead,
    ),
    ("README.md", "[faster in none of {} cases and slower in {}]", lambda: to_peers()[:2]),
    (
        "docs/faq.md",
        "{:.2f} to {:.2f} of that without speculation. But p99 latency was up to {} % higher, and "
        "the mean time to first token up to {} % higher ([lockstep-amd.json]"
        "(results/lockstep-amd.json), 2026-11-23). On an Intel machine with an older version it "
        "was {} % and {} %",
        slower,
    ),
    (
        "docs/research/studies.md",
        "{} of {} comparisons shown, {} open, none missed; mean latency {:.2f} to {:.2f} of that "
        "without speculation",
        verdicts,
    ),
    (
        "docs/research/studies.md",
        "requests 1 to 5, 6 to 20 and 21 to 60 reach {:.2f}, {:.2f} and {:.2f} of the throughput",
        lambda: first_minute("first_minute-amd"),
    ),
    (
        "docs/research/studies.md",
        "On Intel they reach {:.2f}, {:.2f} and {:.2f}",
        lambda: first_minute("first_minute"),
    ),
    (
        "docs/concepts/draft-length.md",
        "the first five had {:.2f} of the throughput of a fixed length of 3, and requests 6 to 20 "
        "had {:.2f}",
        lambda: first_minute("first_minute-amd")[:2],
    ),
    (
        "docs/research/studies.md",
        "After a restart with stored evidence they reach {:.2f}, {:.2f} and {:.2f} (AMD)",
        lambda: first_minute("first_minute-amd", "goodput, restarted"),
    ),
    (
        "docs/concepts/draft-length.md",
        "After a restart with stored evidence it was {:.2f} and {:.2f}",
        lambda: first_minute("first_minute-amd", "goodput, restarted")[:2],
    ),
    (
        "docs/research/studies.md",
        "latency is {:.2f} to {:.2f} of that without speculation, because prompt lookup still "
        "drafts ([file](../results/never-slower-useless.json)). With one that costs a fifth of the "
        "target it is {:.2f} and {:.2f}",
        useless_and_dear,
    ),
    (
        "docs/research/studies.md",
        "with heads and prompt lookup {:.2f}, with the draft model and prompt lookup {:.2f}. With "
        "8 requests at once it is {:.2f} and {:.2f}. All three together reach {:.2f} and {:.2f}",
        heads,
    ),
    (
        "docs/operate/openai.md",
        "had {:.3f}, {:.3f} and {:.3f} of the throughput of Triton's gRPC stream with 1, 8 and 32 "
        "streams. The first token came {:.1f}, {:.1f} and {:.1f} ms later",
        openai_cost,
    ),
    (
        "docs/research/studies.md",
        "trees of heads reaches {:.2f} of no speculation with one request, {:.2f} with 8 and "
        "{:.2f} with 32; with chains of heads {:.2f}, {:.2f} and {:.2f}",
        lambda: (
            *tree_rates("goodput: tree of heads", "1", "8", "32"),
            *tree_rates("goodput: chain of heads", "1", "8", "32"),
        ),
    ),
    (
        "docs/research/studies.md",
        "It chooses {:.1f}, {:.1f} and {:.1f} drafts per step. A fixed tree of 32 drafts reaches "
        "{:.2f}, {:.2f} and {:.2f}. All proposers together reach {:.2f} with trees and {:.2f}",
        lambda: (
            *tree_drafts(),
            *tree_rates("heads, tree of 32", "1", "8", "32"),
            *tree_rates("goodput: all, trees", "1"),
            *tree_rates("goodput: all, chains", "1"),
        ),
    ),
    (
        "docs/research/studies.md",
        "mixed texts {:.2f} with one request, {:.2f} with 8 and {:.2f} with 32; chat {:.2f}, "
        "{:.2f} and {:.2f}; sql {:.2f}, {:.2f} and {:.2f}",
        lambda: tuple(
            ratio
            for workload in ("mixed", "chat", "sql")
            for ratio in all_over_single(workload, "1", "8", "32")
        ),
    ),
    (
        "docs/research/studies.md",
        "trees of the draft model reach {:.2f} with one request and {:.2f} with 8, chains {:.2f} "
        "and {:.2f}",
        lambda: (
            *tree_rates("goodput: trees of draft model", "1", "8"),
            *tree_rates("goodput: draft model", "1", "8"),
        ),
    ),
    (
        "docs/concepts/draft-length.md",
        "at most {:.2f} times that without speculation, instead of {:.2f} times",
        first_tokens,
    ),
    (
        "docs/concepts/draft-length.md",
        "the first token came up to {:.2f} times as late",
        measured_first_token,
    ),
    ("docs/research/studies.md", "{} of {} cells of batch size, acceptance", grid),
    ("docs/research/studies.md", "What do Triton and HTTP cost?** Up to {} %", overhead),
    ("docs/research/studies.md", "never below 0.98 of the best fixed length in {} cases", spread),
    ("docs/research/studies.md", "{:.2f} ms of Python per step at 64 sequences", adapter),
    ("docs/research/studies.md", "{} of {} names", contract),
    ("docs/evaluate/simulator.md", "at {} of {} points up to 0.7 of saturation", fidelity),
    ("docs/operate/security.md", "The front costs {:.1f} % of the throughput", front),
    (
        "docs/comparison.md",
        "not faster in any of {} measured cases, and slower in {}. An older run on an AMD EPYC was "
        "up to {:.1f} times slower than vLLM",
        to_peers,
    ),
    (
        "docs/research/studies.md",
        "On an Intel Xeon with an earlier version: {} of {}",
        intel_verdicts,
    ),
    ("docs/research/studies.md", "On real texts it loses {:.1f} % on average", regret),
    ("docs/research/studies.md", "within 200 steps in {} of {} settings", adaptation),
    ("docs/research/studies.md", "Within 3 % in {} of {} figures", aiperf),
    ("docs/evaluate/load-tests.md", "within 3 % in {} of {} figures", aiperf),
    ("docs/comparison.md", "it took {:.2f}, {:.2f} and {:.2f} times the time of vLLM", by_hand),
]


@pytest.mark.parametrize(("page", "sentence", "values"), FIGURES)
def test_a_figure_is_that_of_its_file(
    page: str, sentence: str, values: Callable[[], Values]
) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert sentence.format(*values()) in text


PROCESSORS = {
    "Intel Xeon with AMX": "family 6 model 167",
    "Intel Xeon without bfloat16": "without bfloat16",
}


def measured_on_cpus() -> Iterator[tuple[str, str, list[str]]]:
    """Processor, dtype and the three ratios of each row of the table."""
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in PROCESSORS:
            yield cells[0], cells[1], cells[2:]


@pytest.mark.parametrize(("processor", "dtype", "ratios"), list(measured_on_cpus()))
def test_ratios_to_peers_are_those_of_the_peer_page(
    processor: str, dtype: str, ratios: list[str]
) -> None:
    text = (RESULTS / "peer.md").read_text(encoding="utf-8")
    [section] = re.findall(rf"^## {dtype}$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    rows = [line for line in section.splitlines() if PROCESSORS[processor] in line]
    cells = [row.strip("|").split("|")[-1].strip() for row in rows]
    assert [cell.partition(", ")[0] for cell in cells] == ratios
