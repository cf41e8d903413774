"""The report page: what stands on it, and that it stands by itself.

Apart from its scripts the page is well-formed XML, which the strictest parser reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from page_example import ABOUT, CEILINGS, SATURATION_RPS, full_document
from typer.testing import CliRunner

from smartspec_bench.document import Document, Series, write
from smartspec_bench.gpu.document import BatchPoint, PolicyRate
from smartspec_bench.gpu.document import Document as GpuDocument
from smartspec_bench.report.html import charts_of, page
from smartspec_bench.report.load import report as report_of
from smartspec_cli.commands.report import report

SECTIONS = (
    "asked",
    "answer",
    "verdicts",
    "latency",
    "over-time",
    "drafts",
    "time",
    "phases",
    "machine",
    "ceilings",
    "repeat",
    "definitions",
)
FULL = full_document()


SCRIPT = re.compile(r"<script>.*?</script>", re.DOTALL)


def tree(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(SCRIPT.sub("", markup))


def parsed(document: Document) -> ElementTree.Element:
    return tree(page(report_of(document)))


@pytest.fixture(scope="module")
def markup() -> str:
    """Charts and their script take seconds."""
    return page(report_of(FULL))


@pytest.fixture(scope="module")
def full(markup: str) -> ElementTree.Element:
    return tree(markup)


def section(root: ElementTree.Element, name: str) -> ElementTree.Element:
    found = root.find(f".//section[@id='{name}']")
    assert found is not None, name
    return found


def text(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def table(root: ElementTree.Element, name: str) -> list[list[str]]:
    """Cells of all tables of a section, without the heads."""
    return [[text(cell) for cell in row] for row in section(root, name).findall(".//tbody/tr")]


def test_every_section_stands_on_it_in_the_order_of_reading(full: ElementTree.Element) -> None:
    assert tuple(one.get("id") for one in full.iter("section")) == SECTIONS


def test_the_answer_comes_with_its_numbers(full: ElementTree.Element) -> None:
    """Over the best fixed length: 400 / (1 - 0.1 / 2.3) over 400 / (1 - 0.1 / 1.5) is 0.976."""
    answer = text(section(full, "answer"))
    for sentence in FULL.summary:
        assert sentence in answer
    assert "0.411 to 0.976" in answer
    assert "3 met, 1 missed, 1 open" in answer


def test_every_comparison_is_a_line_with_its_verdict_in_words(full: ElementTree.Element) -> None:
    rows = table(full, "verdicts")
    assert len(rows) == len(FULL.comparisons)
    assert [row[0] for row in rows[:3]] == ["✗ missed", "? open", "✓ met"]
    assert rows[0][1:] == [
        "mixed, 0.1/s (5 %)",
        "best fixed: fixed:5",
        "mean end-to-end latency",
        "0.976",
        "0.927 to 1.034",
        "0.800",
        "4",
    ]
    for one in FULL.comparisons:
        assert one.text in text(section(full, "verdicts"))


def test_a_ratio_without_a_bound_is_shown_and_not_counted(full: ElementTree.Element) -> None:
    """The document calls its verdict open, as nothing was asked."""
    assert [row[0] for row in table(full, "verdicts")[10:]] == ["· not asked"] * 5
    assert "✓ 8 met ✗ 1 missed ? 1 open" in text(section(full, "answer"))


def test_phases_are_shown_together_and_each_by_itself(full: ElementTree.Element) -> None:
    """5 policies under 5 steady loads, a step and a mix; 480 requests at 4 repeats of 120."""
    rows = table(full, "phases")
    assert len(rows) == 5 * 7 + len(FULL.phases)
    assert rows[0][:8] == ["goodput", "steady", "mixed", "0.100", "5", "4", "480", "4"]


def test_a_column_that_nobody_has_a_number_for_is_left_out(full: ElementTree.Element) -> None:
    phases = [replace(one, slo_goodput_rps=None) for one in FULL.phases[:2]]
    without = parsed(replace(FULL, phases=phases))
    assert "slo_ goodput_ rps" in text(section(full, "phases"))
    assert "slo_" not in text(section(without, "phases"))
    heads = section(without, "phases").findall(".//thead/tr")
    rows = [section(without, "phases").findall(".//tbody/tr")[at] for at in (0, -1)]
    assert [len(head) for head in heads] == [len(row) for row in rows]


def test_machine_versions_ceilings_and_command_stand_on_it(full: ElementTree.Element) -> None:
    assert text(section(full, "repeat")) == f"Command to repeat the run {ABOUT.command}"
    machine = text(section(full, "machine"))
    assert "torch 2.13.0" in machine
    assert "max_draft_len 7, batch_invariant unset" in machine
    assert "target pass, 8 sequences 15.3 ms" in text(section(full, "ceilings"))
    assert "token_goodput_tps: tokens of finished" in text(section(full, "definitions"))


def test_nothing_is_fetched(full: ElementTree.Element, markup: str) -> None:
    """Scripts stand in the file; names of XML's namespaces and links in comments are no requests.
    A browser without a network drew every chart of it."""
    assert not {one.tag for one in full.iter()} & {"link", "img", "iframe", "object"}
    assert not re.search(r"https?:|url\(|@import|<script [^>]*src", SCRIPT.sub("", markup))
    assert len(SCRIPT.findall(markup)) == 2


def test_every_chart_has_its_place_and_its_data(full: ElementTree.Element, markup: str) -> None:
    charts = {chart.name: chart for chart in charts_of(report_of(FULL))}
    places = {one.get("id"): one for one in full.iter("div") if one.get("class") == "chart"}
    assert places.keys() == charts.keys()
    _, data = SCRIPT.findall(markup)
    found = json.loads(data[data.index("{") : data.index("};") + 1])
    assert found.keys() == charts.keys()
    for name, chart in charts.items():  # Vega makes it the label of what it draws
        assert found[name]["description"] == chart.title


def one_load(document: Document) -> Document:
    return replace(document, phases=[one for one in document.phases if one.load == 0.3])


def one_repeat(document: Document) -> Document:
    phases = [one for one in document.phases if one.repeat == 0 and one.shape == "mix"]
    return replace(document, phases=phases, comparisons=[], summary=[])


def closed_only(document: Document) -> Document:
    """Nothing but latencies of a closed phase."""
    phases = [
        replace(
            one,
            shape="closed",
            load=0.0,
            rate_rps=0.0,
            draft_len_counts=[],
            accepted_counts=[],
            acceptance_rate=None,
            slo_goodput_rps=None,
            time_shares={},
        )
        for one in document.phases
        if one.load == 0.3 and one.repeat == 0
    ]
    return replace(document, phases=phases, comparisons=[], summary=[])


def no_series(document: Document) -> Document:
    phases = [replace(one, series=Series()) for one in document.phases if one.shape == "step"]
    return replace(document, phases=phases)


def nothing(document: Document) -> Document:
    return Document(document.about)


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (
            one_load,
            {
                "latency": "A chart of latency over rate needs at least two rates.",
                "over-time": "The run has no changing load",
            },
        ),
        (
            one_repeat,
            {
                "asked": "There is one repeat",
                "answer": "The run compared no policies.",
                "verdicts": "The run compared no policies.",
            },
        ),
        (
            closed_only,
            {
                "latency": "The run has no steady load",
                "drafts": "The document has no counts of draft lengths.",
                "time": "The document has no time shares of the server.",
            },
        ),
        (no_series, {"over-time": "The document has no series over time."}),
        (
            nothing,
            {
                "asked": "No phase was completed.",
                "phases": "No phase was completed.",
                "ceilings": "No limits of the machine were measured.",
            },
        ),
    ],
)
def test_what_is_missing_is_said(
    change: Callable[[Document], Document], sentences: dict[str, str]
) -> None:
    """Beside pictures that have something to show, and no others."""
    root = parsed(change(FULL))
    assert tuple(one.get("id") for one in root.iter("section")) == SECTIONS
    for name, sentence in sentences.items():
        assert sentence in text(section(root, name))


def test_the_answer_begins_with_how_much_faster_it_is() -> None:

    def answer_of(document: Document) -> str:
        return text(section(parsed(document), "answer"))

    assert "goodput is 2 to 59 % faster than the best fixed length, and" in answer_of(FULL)
    only = [one for one in FULL.comparisons if one.bound is None]
    answer = answer_of(replace(FULL, comparisons=only))
    assert "There is no verdict: no comparison has a bound." in answer
    answer = answer_of(replace(FULL, comparisons=[]))
    assert "The run compared no policies." in answer


def test_texts_are_escaped() -> None:
    """A tag in any text would end the parser's tree early, or stand in it as an element."""
    evil = "</p><script>alert('&')</script>"
    about = replace(
        ABOUT, title=evil, command=evil, machine=evil, versions={evil: evil}, definitions=evil
    )
    phases = [replace(one, policy=evil, workload=evil) for one in FULL.phases[:2]]
    comparisons = [replace(FULL.comparisons[0], text=evil, against=evil, verdict=evil)]
    ceilings = replace(CEILINGS, notes=[evil])
    evil_document = Document(about, ceilings, phases, comparisons, [evil, evil])
    markup = page(report_of(evil_document))
    assert len(SCRIPT.findall(markup)) == 2
    root = tree(markup)
    assert not list(root.iter("script"))
    for name in ("answer", "verdicts", "phases", "machine", "ceilings", "repeat", "definitions"):
        assert evil in text(section(root, name)), name


app = typer.Typer()
app.command()(report)


def test_the_command_writes_the_page_and_the_pictures(tmp_path: Path) -> None:
    result = tmp_path / "run.json"
    write(result, one_repeat(FULL))
    done = CliRunner().invoke(app, [str(result), "--pictures", str(tmp_path / "png")])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == str(tmp_path / "run.html")
    root = tree((tmp_path / "run.html").read_text(encoding="utf-8"))
    names = {f"{one.get('id')}.png" for one in root.iter("div") if one.get("class") == "chart"}
    files = list((tmp_path / "png").iterdir())
    assert {file.name for file in files} == names
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "run.json: Expecting property name"),
        ("[]", "must be a document of `bench load`, version 1, but is a JSON list"),
        (json.dumps({"format": "smartspec-bench", "version": 1}), "about: Field required"),
    ],
)
def test_what_is_no_result_is_refused_in_one_line(
    tmp_path: Path, content: str, sentence: str
) -> None:
    result = tmp_path / "run.json"
    result.write_text(content)
    done = CliRunner().invoke(app, [str(result)])
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert not (tmp_path / "run.html").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = tmp_path / "run.json"
    write(result, nothing(FULL))
    done = CliRunner().invoke(app, [str(result), "--html", str(tmp_path / "none" / "page.html")])
    assert done.exit_code == 1
    assert "No such file or directory" in done.stderr


def test_every_policy_has_its_line_in_every_chart_of_rates() -> None:
    charts = {chart.name: chart for chart in charts_of(report_of(FULL))}
    chart = charts["e2e-mean-mixed"]
    line = next(one for one in chart.spec["layer"] if one["mark"]["type"] == "line")
    rows = chart.spec["datasets"][line["data"]["name"]]
    assert {row["group"] for row in rows} == {*SATURATION_RPS}
    assert line["encoding"]["x"]["title"] == "offered rate, requests/s"
    assert line["encoding"]["y"]["title"] == "mean end-to-end latency, ms"


def test_a_run_on_a_device_has_a_page_too(tmp_path: Path) -> None:
    rates = [PolicyRate(name, [100.0, 110.0], 1.0, None) for name in ("none", "fixed:1", "goodput")]
    batch = BatchPoint(1, [10.0, 11.0], 1.0, [100.0, 120.0], rates)
    document = GpuDocument(is_dry_run=True, date="2026-11-21", batches=[batch], left_out=["load"])
    result = tmp_path / "gpu.json"
    result.write_text(json.dumps(document.to_json()))
    done = CliRunner().invoke(app, [str(result)])
    assert done.exit_code == 0, done.output
    root = tree((tmp_path / "gpu.html").read_text(encoding="utf-8"))
    assert [one.get("id") for one in root.iter("section")] == ["passes", "rates"]
    assert table(root, "rates")[0][-1] == "1.000 (fixed:1)"
    assert section(root, "rates").find(".//div[@id='chart-rates']") is not None
    assert "figures mean nothing" in text(root)
