"""The report of a `bench load` run: the question, the result and all measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from smartspec_bench.document import About, Ceilings, Comparison, Document, Phase
from smartspec_bench.plan import CHANGING, STEADY
from smartspec_bench.report.blocks import (
    MARKS,
    MISSING,
    Block,
    Bullets,
    Chart,
    Folded,
    Report,
    Section,
    Table,
    Text,
    digits,
    interval,
    plural,
    ratio,
)
from smartspec_bench.report.load_charts import DRAFTS, LATENCY, OVER_TIME, TIME, charts_of
from smartspec_bench.report.points import TABLE, Metric, Point, by_place, has_line, points_of
from smartspec_bench.report.tables import (
    WORDS,
    marked,
    means_table,
    measure,
    percent,
    rate,
    verdicts_table,
)
from smartspec_bench.verdicts import headline

QUESTION = (
    "A small draft model proposes tokens, and the target model checks them in one pass. The number "
    "of proposed tokens is the draft length. The policy goodput chooses the draft length of each "
    "request at every step. Is its latency lower than with any fixed draft length, and lower than "
    "without speculation, at every load?"
)
VERDICT_TEXT = (
    "The ratio divides goodput's value by the other policy's value for the same requests. The 95 % "
    "interval is over the repeats. Met: the whole interval satisfies the bound. Missed: the whole "
    "interval violates it. Open: the interval includes the bound, or requests failed."
)
FINDINGS_TEXT = (
    "The lowest and the highest ratio of each question, over all its loads. For latencies, a ratio "
    "below 1 is better. For speed-ups and rates, a ratio above 1 is better."
)
LATENCY_TEXT = (
    "Latency axes are logarithmic. Points are means over repeats. Bars extend from the lowest "
    "repeat to the highest."
)
RATIO_TEXT = (
    "In the chart of ratios the bars are 95 % intervals. Long intervals are cut off at the edge of "
    "the chart. A dotted line marks the rate that saturates the server without speculation."
)
OVER_TIME_TEXT = (
    "One phase per policy. The draft length is the mean over the steps of each second. It is also "
    "0 in seconds without a step."
)
TERMS = [
    ("load, %", "the rate, as a share of the rate that saturates the server without speculation"),
    (
        "e2e, TTFT, ITL, TPOT",
        "end-to-end latency, time to first token, inter-token latency, time per output token",
    ),
    ("send lag", "delay of the load generator: time sent minus time due"),
    ("none, fixed:k", "no speculation; k draft tokens at every step"),
    ("goodput", "draft length per request and step that maximizes the expected tokens per second"),
    ("goodput_global", "like goodput, but with one draft length for the whole batch"),
]


def report(document: Document) -> Report:
    about, points, charts = document.about, points_of(document.phases), charts_of(document)
    subtitle = " · ".join(part for part in (about.pair, about.machine, about.date) if part)
    sections = [
        Section("asked", "Question", [Text(QUESTION), Text(" ".join(_how(document)))]),
        Section("answer", "Result", list(_answer(document))),
        Section("verdicts", "Every comparison", list(_verdicts(document.comparisons))),
        _charted(LATENCY, "Latency", document, charts, LATENCY_TEXT),
        _charted(OVER_TIME, "Draft length as the load changes", document, charts, OVER_TIME_TEXT),
        _charted(DRAFTS, "Draft lengths and acceptance", document, charts),
        _charted(
            TIME,
            "Where the time goes",
            document,
            charts,
            "Shares of the time in which the server was busy, at the lowest and the highest load.",
        ),
        Section("phases", "Phases", list(_phases(points, document.phases))),
        Section("machine", "Machine and versions", [Table(("", ""), _machine(about), num_words=2)]),
        Section("ceilings", "Limits of this machine", list(_ceilings(document.ceilings))),
        Section("repeat", "Command to repeat the run", [Text(about.command, "code")]),
        Section(
            "definitions",
            "Definitions",
            [Table(("", ""), TERMS, num_words=2), *map(Text, about.definitions.split("\n\n"))],
        ),
    ]
    return Report(about.title, [Text(subtitle, "note")], sections)


def _how(document: Document) -> Iterator[str]:
    """The size of the run: phases, policies, workloads, repeats and requests."""
    phases = document.phases
    if not phases:
        yield "No phase was completed."
        return
    shapes = Counter(phase.shape for phase in phases)
    policies = plural(len({phase.policy for phase in phases}), "policy", "policies")
    workloads = sorted({phase.workload for phase in phases})
    repeats = len({phase.repeat for phase in phases})
    parts = ", ".join(f"{count} {shape}" for shape, count in shapes.items())
    yield (
        f"{plural(len(phases), 'phase')} of load ({parts}): {policies}, "
        f"{plural(len(workloads), 'workload')} ({', '.join(workloads)}), "
        f"{plural(repeats, 'repeat')}."
    )
    sent, failed = sum(one.num_sent for one in phases), sum(one.num_failed for one in phases)
    minutes = sum(one.duration_s for one in phases) / 60
    yield f"{plural(sent, 'request')} in {minutes:.1f} minutes of load; {failed:,} failed."
    if repeats == 1:
        yield "There is one repeat, so the variation between runs is not known."


def _answer(document: Document) -> Iterator[Block]:
    """The headline, the summary of the claim, and a table of the findings."""
    asked = [one for one in document.comparisons if one.bound is not None]
    findings = _findings(asked)
    nothing = "The run compared no policies."
    if document.comparisons:
        nothing = "There is no verdict: no comparison has a bound."
    lead = headline(asked) or nothing
    yield Text(lead, "lead")
    if document.summary:
        yield Bullets(document.summary)
    if findings:
        yield Text("  ".join(f"{marked(name)[0]} {count} {name}" for name, count in _tally(asked)))
        columns = ("question", "where", "ratio", "95 % intervals within", "verdicts")
        yield Table(columns, findings, FINDINGS_TEXT, num_words=2)


def _findings(asked: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """One row per question and workload, over all its loads, in the order of the document.

    Columns: question, shape and workload, lowest and highest ratio, intervals, verdicts.
    """
    groups: dict[tuple[str, ...], list[Comparison]] = {}
    for one in asked:
        key = (one.policy, one.role, one.metric, one.shape, one.workload)
        groups.setdefault(key, []).append(one)
    rows = list[tuple[str, ...]]()
    for own in groups.values():
        first, values = own[0], sorted(one.ratio for one in own)
        ends = list(dict.fromkeys((ratio(values[0]), ratio(values[-1]))))
        several = f", {len(own)} comparisons" if len(own) > 1 else ""
        rows.append(
            (
                f"{measure(first.metric)}, {first.policy} over {first.role}",
                f"{first.shape}, {first.workload}{several}",
                " to ".join(ends),
                interval(min(one.low for one in own), max(one.high for one in own)),
                ", ".join(f"{count} {name}" for name, count in _tally(own) if count),
            )
        )
    return rows


def _tally(asked: Sequence[Comparison]) -> list[tuple[str, int]]:
    """Verdicts with their counts. The verdicts of `MARKS` come first."""
    counts = Counter(one.verdict for one in asked)
    return [(name, counts[name]) for name in (*MARKS, *sorted(set(counts) - {*MARKS}))]


def _verdicts(comparisons: Sequence[Comparison]) -> Iterator[Block]:
    if not comparisons:
        yield Text("The run compared no policies.", "note")
        return
    asked = [one for one in comparisons if one.bound is not None]
    others = [one for one in comparisons if one.bound is None]
    yield Text(VERDICT_TEXT)
    if asked:
        yield verdicts_table(asked, "Question")
    if others:
        title = f"Ratios without a bound, for information only ({len(others)})"
        yield Folded(title, [verdicts_table(others)])
    sentences = [one.text for one in comparisons]
    yield Folded(f"All comparisons as text ({len(sentences)})", [Bullets(sentences)])


def _charted(
    name: str, title: str, document: Document, charts: Mapping[str, Sequence[Chart]], text: str = ""
) -> Section:
    """A section of charts. A note says why charts, or lines over the rate, are absent."""
    found = charts[name]
    absent = _absent(document, name, bool(found))
    blocks: list[Block] = [Text(absent, "note")] if absent else []
    if found and text:
        more = f" {RATIO_TEXT}" if name == LATENCY and not absent else ""
        blocks.append(Text(text + more))
    return Section(name, title, [*blocks, *found])


def _absent(document: Document, name: str, is_drawn: bool) -> str:
    if name == LATENCY:
        is_drawn = any(map(has_line, by_place(points_of(document.phases))))
    if is_drawn:
        return ""
    shapes = {phase.shape for phase in document.phases}
    return {
        LATENCY: "A chart of latency over rate needs at least two rates. This run has one."
        if STEADY in shapes
        else "The run has no steady load, so there is no chart of latency over rate.",
        OVER_TIME: "The document has no series over time."
        if shapes & {*CHANGING}
        else "The run has no changing load, so there is no chart over time.",
        DRAFTS: "The document has no counts of draft lengths.",
        TIME: "The document has no time shares of the server.",
    }[name]


def _phases(points: Sequence[Point], phases: Sequence[Phase]) -> Iterator[Block]:
    if not points:
        yield Text("No phase was completed.", "note")
        return
    metrics = [metric for metric in TABLE if any(point.values(metric) for point in points)]
    yield means_table(points, metrics)
    counts = ("requests/s", "load, %", "repeat", "seed", "sent", "finished", "failed", "seconds")
    every = Table(
        (*WORDS, *counts, *(metric.column for metric in metrics)),
        [_phase(phase, metrics) for phase in phases],
        "Every phase, in the order of the run",
        num_words=3,
    )
    yield Folded(f"All single phases ({len(phases)})", [every])


def _phase(phase: Phase, metrics: Sequence[Metric]) -> tuple[str, ...]:
    return (
        phase.policy,
        phase.shape,
        phase.workload,
        rate(phase.rate_rps),
        percent(phase.load),
        str(phase.repeat + 1),
        str(phase.seed),
        f"{phase.num_sent:,}",
        f"{phase.num_finished:,}",
        f"{phase.num_failed:,}",
        f"{phase.duration_s:.1f}",
        *(digits(metric.of(phase)) for metric in metrics),
    )


def _machine(about: About) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    limits = ", ".join(
        f"{name} {'unset' if value is None else value}" for name, value in about.limits.items()
    )
    return [
        ("machine", about.machine),
        ("cores", str(about.cores)),
        ("models", about.pair),
        ("versions", versions or MISSING),
        ("commit", about.commit or MISSING),
        ("server limits", limits or MISSING),
        ("form of the run", about.form),
        ("start", about.date),
    ]


def _ceilings(ceilings: Ceilings) -> Iterator[Block]:
    rows = [
        (f"saturation rate, {policy}", f"{digits(rate)} requests/s")
        for policy, rate in ceilings.saturation_rps.items()
    ]
    rows += [
        (f"target pass, {sequences} sequences", f"{digits(time_ms)} ms")
        for sequences, time_ms in ceilings.target_pass_ms.items()
    ]
    if ceilings.copy_gb_per_s is not None:
        rows.append(("memory copy bandwidth", f"{digits(ceilings.copy_gb_per_s)} GB/s"))
    rows += [("note", note) for note in ceilings.notes]
    if not rows:
        yield Text("No limits of the machine were measured.", "note")
        return
    yield Text("The highest rates and the fastest passes, measured before the load.")
    yield Table(("", ""), rows, num_words=2)
