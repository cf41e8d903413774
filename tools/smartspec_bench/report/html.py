"""A report as one HTML file, whose charts Vega draws from data and scripts inside the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import altair
import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined

from smartspec_bench.report.blocks import MARKS, Block, Chart, Folded, Report

_VERSION = ".".join(altair.SCHEMA_VERSION.split(".")[:2])
_PNG_SCALE = 2.0


def page(report: Report) -> str:
    environment = Environment(
        loader=PackageLoader("smartspec_bench.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = {chart.name: {**chart.spec, "description": chart.title} for chart in charts_of(report)}
    # Its type stub knows no default of the snippet, which is what a page needs.
    bundle = vl_convert.javascript_bundle(vl_version=_VERSION) if charts else ""  # type: ignore[call-arg]
    return environment.get_template("page.html").render(
        report=report, charts=charts, bundle=bundle, marks=[*MARKS.values()]
    )


def charts_of(report: Report) -> Iterator[Chart]:
    for section in report.sections:
        yield from _charts_in(section.blocks)


def _charts_in(blocks: Sequence[Block]) -> Iterator[Chart]:
    for block in blocks:
        if isinstance(block, Chart):
            yield block
        elif isinstance(block, Folded):
            yield from _charts_in(block.blocks)


def write_pictures(report: Report, directory: Path) -> list[Path]:
    """A PNG file of each chart, for documents. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts_of(report):
        path = directory / f"{chart.name}.png"
        path.write_bytes(vl_convert.vegalite_to_png(chart.spec, _VERSION, scale=_PNG_SCALE))
        paths.append(path)
    return paths
