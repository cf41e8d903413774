"""Prints findings about engine directories as a table."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smartspec_trtllm.engine_check import Finding, Severity, has_errors

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def show(findings: tuple[Finding, ...], console: Console) -> None:
    """Print a table of the findings, and a summary line."""
    if findings:
        console.print(_table(findings))
    counts = Counter(finding.severity for finding in findings)
    said = ", ".join(
        f"{counts[severity]} {severity}{'s' if counts[severity] > 1 else ''}"
        for severity in Severity
        if counts[severity]
    )
    verdict = "cannot be served" if has_errors(findings) else "can be served"
    console.print(f"engines {verdict}, by their files: {said or 'nothing found'}", highlight=False)


def _table(findings: tuple[Finding, ...]) -> Table:
    table = Table(show_lines=True)
    for column in ("severity", "engine", "key: value", "needed", "rebuild"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(
            Text(finding.severity, STYLES[finding.severity]),
            finding.engine,
            Text(f"{_short(finding.key)}: ") + Text(finding.value, "bold"),
            Text(finding.needed),
            Text(finding.remedy),
        )
    return table


def _short(key: str) -> str:
    """The key without the sections of config.json; file names stay unchanged."""
    return key.rpartition(".")[2] if "_config." in key else key
