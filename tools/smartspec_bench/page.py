"""The report page of a run: one HTML file with its pictures inside, which needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from smartspec_bench import page_answer, page_tables
from smartspec_bench.document import Document
from smartspec_bench.page_colours import looks, variables
from smartspec_bench.page_points import points_of
from smartspec_bench.pictures import (
    DRAFTS,
    LATENCY,
    OVER_TIME,
    TIME,
    Picture,
    has_line,
)
from smartspec_bench.plan import CHANGING, STEADY

MARKS: Mapping[str, str] = {"met": "✓", "missed": "✗", "open": "?"}
"""So that verdicts differ by more than colour."""


def page(document: Document, drawn: Sequence[Picture]) -> str:
    """HTML that is well-formed XML too. drawn: of this document, by `pictures`."""
    policies = looks(phase.policy for phase in document.phases)
    points = points_of(document.phases)
    columns = page_tables.known_metrics(points)
    names = [name for _, name in columns]
    asked = [one for one in document.comparisons if one.bound is not None]
    not_asked = [one for one in document.comparisons if one.bound is None]
    environment = Environment(
        loader=PackageLoader("smartspec_bench"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = {
        section: [
            (picture, picture.svg(policies)) for picture in drawn if picture.section == section
        ]
        for section in (LATENCY, OVER_TIME, DRAFTS, TIME)
    }
    return environment.get_template("page.html").render(
        about=document.about,
        subtitle=page_tables.subtitle(document.about),
        colours=variables(policies),
        marks=MARKS,
        how=list(page_answer.how(document)),
        lead=page_answer.lead(document),
        rest=document.summary[1:],
        findings=page_answer.findings(document.comparisons),
        tally=page_answer.tally(document.comparisons),
        asked=[page_tables.verdict_row(one) for one in asked],
        not_asked=[page_tables.verdict_row(one) for one in not_asked],
        sentences=[one.text for one in document.comparisons],
        pictures=sections,
        absent=absent(document, drawn),
        point_words=page_tables.WORDS,
        point_numbers=(*page_tables.POINT_NUMBERS, *names),
        phase_numbers=(*page_tables.PHASE_NUMBERS, *names),
        points=[page_tables.point_row(point, columns, policies) for point in points],
        definitions=document.about.definitions.split("\n\n"),
        phases=[page_tables.phase_row(phase, columns, policies) for phase in document.phases],
        machine=page_tables.machine_rows(document.about),
        ceilings=page_tables.ceiling_rows(document.ceilings),
    )


def absent(document: Document, drawn: Sequence[Picture]) -> dict[str, str]:
    """By section, why it has no picture, or no line against the rate; none where it has all."""
    shapes = {phase.shape for phase in document.phases}
    reasons = {
        LATENCY: (
            "A line against the rate needs two rates, and one was run."
            if STEADY in shapes
            else "No steady load was run, so there is no line of latency against rate."
        ),
        OVER_TIME: (
            "The run kept no series over time."
            if shapes & set(CHANGING)
            else "No load that changes was run, so there is nothing to show over time."
        ),
        DRAFTS: "The run kept no counts of draft lengths.",
        TIME: "The server's shares of time are not known.",
    }
    present = {picture.section for picture in drawn} - {LATENCY}
    points = points_of(document.phases)
    workloads = {point.workload for point in points}
    if any(has_line([one for one in points if one.workload == name]) for name in workloads):
        present.add(LATENCY)
    return {section: reason for section, reason in reasons.items() if section not in present}
