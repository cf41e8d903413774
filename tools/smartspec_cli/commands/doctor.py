"""`smartspec doctor`: checks a TensorRT-LLM installation. Never run on a GPU machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from smartspec_cli.commands import STDOUT, USAGE_ERROR, JsonFile, check_outputs, fail, write_json
from smartspec_cli.doctor_environment import Environment, find_environment
from smartspec_cli.doctor_experiments import EXPERIMENTS, Bench, Finding, finding_of


def doctor(
    target: Annotated[
        Path | None, typer.Option(help="Engine directory of the target: runs the experiments.")
    ] = None,
    draft: Annotated[Path | None, typer.Option(help="Engine directory of the draft model.")] = None,
    report: Annotated[Path | None, typer.Option(help="File for the report, in Markdown.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Check the TensorRT-LLM installation. Run it first, inside the container.

    It checks that the bindings have all names that the adapter uses. With engines, it also runs
    experiments that decide settings. Exit code 1: something is missing.
    """
    for option, directory in (("--target", target), ("--draft", draft)):
        if directory is not None and not (directory / "config.json").is_file():
            fail(f"{option}: {directory} has no config.json; give an engine directory", USAGE_ERROR)
    if draft is not None and target is None:
        fail("--draft: needs --target as well", USAGE_ERROR)
    check_outputs(report=report, json=json_file)
    found: list[Finding] = []
    with _stdout_to_stderr():
        environment, bindings = find_environment()
        _write(report, environment, found)
        if bindings is not None and target is not None:
            bench = Bench(bindings, target, draft)
            for experiment in EXPERIMENTS:
                # After a crash in C++ code, the last line names the experiment.
                typer.echo(f"doctor: {experiment.__name__}", err=True)
                found.append(finding_of(bench, experiment))
                _write(report, environment, found)
            bench.close()
    text = markdown(environment, found)
    print(text, file=sys.stderr if json_file == STDOUT else sys.stdout)
    document = asdict(environment) | {"findings": [one._asdict() for one in found]}
    write_json(json_file, document)
    raise typer.Exit(1 if environment.missing else 0)


def _write(report: Path | None, environment: Environment, found: Sequence[Finding]) -> None:
    if report is not None:
        report.write_text(markdown(environment, found), encoding="utf-8")


def markdown(environment: Environment, found: Sequence[Finding]) -> str:
    lines = ["# smartspec doctor", "", *_table(("what", "found"), environment.found), ""]
    lines += [f"- Missing: {one}" for one in environment.missing] or ["Nothing is missing."]
    if found:
        lines += ["", *_table(("finding", "answer", "evidence", "what to do"), found)]
    return "\n".join(lines) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (header, ["---"] * len(header), *rows):
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| {' | '.join(cells)} |"


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr. TensorRT-LLM writes to stdout from Python and from C++."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
