"""The report of a run of `bench load`: what was asked, the answer, and all that was measured."""

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
    "A small draft model proposes tokens, and the target model checks them in one pass. How many "
    "it proposes is the draft length. The policy goodput chooses it anew at every step, for each "
    "request. Does that answer requests sooner than any fixed draft length, and than no "
    "speculation at all, whatever the load?"
)
VERDICT_TEXT = (
    "The ratio is goodput over the other policy under the same requests, with a 95 % interval over "
    "repeats. Met: the interval is on the right side of the bound. Missed: it is on the wrong "
    "side. Open: the runs do not tell, or requests failed."
)
FINDINGS_TEXT = (
    "Ratios by question, from the lowest to the highest over its loads. Of latencies, below 1 is "
    "better; of speed-ups and rates, above 1."
)
LATENCY_TEXT = (
    "Axes of latency are logarithmic. Points are means over repeats; their bars reach from the "
    "lowest repeat to the highest."
)
RATIO_TEXT = (
    "Only for ratios the bars are 95 % intervals; one that leaves the chart goes on. A dotted line "
    "stands at the rate that saturates the server without speculation."
)
OVER_TIME_TEXT = (
    "One phase of each policy. A draft length is the mean of a second's steps; it is 0 as well "
    "where no step came."
)
TERMS = [
    ("load, %", "the rate as a share of that at which the server without speculation is saturated"),
    ("e2e, TTFT, ITL, TPOT", "end-to-end latency, time to first token, between tokens, per token"),
    ("send lag", "how long after it was due a request was sent: the load generator's own delay"),
    ("none, fixed:k", "no speculation; k draft tokens at every step"),
    ("goodput", "the draft length of each request and step, for the most expected tokens a second"),
    ("goodput_global", "the same, but one draft length for the whole batch"),
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
            "Of the time in which the server was busy, at the lowest and the highest load.",
        ),
        Section("phases", "Phases", list(_phases(points, document.phases))),
        Section("machine", "Machine and versions", [Table(("", ""), _machine(about), num_words=2)]),
        Section("ceilings", "Ceilings of this machine", list(_ceilings(document.ceilings))),
        Section("repeat", "To repeat it", [Text(about.command, "code")]),
        Section(
            "definitions",
            "Definitions",
            [Table(("", ""), TERMS, num_words=2), *map(Text, about.definitions.split("\n\n"))],
        ),
    ]
    return Report(about.title, [Text(subtitle, "note")], sections)


def _how(document: Document) -> Iterator[str]:
    """How it was run, in numbers."""
    phases = document.phases
    if not phases:
        yield "No phase was run to its end."
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
        yield "There is one repeat: nothing here tells how much another run would differ."


def _answer(document: Document) -> Iterator[Block]:
    """How much faster it is, the parts of the claim, and a table."""
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
    """Each question over all loads of a workload, in the order of the document: question, where,
    ratios from lowest to highest, their intervals, verdicts."""
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
    """Verdicts with their counts; the usual three first."""
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
        title = f"Ratios without a bound, for reading only ({len(others)})"
        yield Folded(title, [verdicts_table(others)])
    sentences = [one.text for one in comparisons]
    yield Folded(f"All of them in sentences ({len(sentences)})", [Bullets(sentences)])


def _charted(
    name: str, title: str, document: Document, charts: Mapping[str, Sequence[Chart]], text: str = ""
) -> Section:
    """A section of charts, or why it has none, or no line against the rate."""
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
        LATENCY: "A line against the rate needs two rates, and one was run."
        if STEADY in shapes
        else "No steady load was run, so there is no line of latency against rate.",
        OVER_TIME: "The run kept no series over time."
        if shapes & {*CHANGING}
        else "No load that changes was run, so there is nothing to show over time.",
        DRAFTS: "The run kept no counts of draft lengths.",
        TIME: "The server's shares of time are not known.",
    }[name]


def _phases(points: Sequence[Point], phases: Sequence[Phase]) -> Iterator[Block]:
    if not points:
        yield Text("No phase was run to its end.", "note")
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
    yield Folded(f"Every phase by itself ({len(phases)})", [every])


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
        ("server's limits", limits or MISSING),
        ("form of the run", about.form),
        ("began", about.date),
    ]


def _ceilings(ceilings: Ceilings) -> Iterator[Block]:
    rows = [
        (f"saturation rate, {policy}", f"{digits(rate)} requests/s")
        for policy, rate in ceilings.saturation_rps.items()
    ]
    rows += [
        (f"pass of the target, {sequences} at once", f"{digits(time_ms)} ms")
        for sequences, time_ms in ceilings.target_pass_ms.items()
    ]
    if ceilings.copy_gb_per_s is not None:
        rows.append(("copy in memory", f"{digits(ceilings.copy_gb_per_s)} GB/s"))
    rows += [("note", note) for note in ceilings.notes]
    if not rows:
        yield Text("No ceilings were measured.", "note")
        return
    yield Text("What this machine can do at most, measured before the load.")
    yield Table(("", ""), rows, num_words=2)
