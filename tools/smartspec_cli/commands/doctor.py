"""`smartspec doctor`: checks the TensorRT-LLM installation and its behaviour."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from smartspec_cli.commands import STDOUT, USAGE_ERROR, JsonFile, check_outputs, fail, write_json


def doctor(
    target: Annotated[
        Path | None, typer.Option(help="Engine directory of the target: runs the experiments.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Hugging Face directory of the draft model.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="File for the report; its JSON is written next to it.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Check the TensorRT-LLM installation. Run it first, inside the container.

    It compares the bindings with the signatures that the adapter needs. With engines, it also runs
    experiments for behaviour that is not documented. Exit code 1: something is missing, or the
    adapter would not work.
    """
    for option, directory in (("--target", target), ("--draft", draft)):
        if directory is not None and not (directory / "config.json").is_file():
            fail(f"{option}: {directory} has no config.json; give an engine directory", USAGE_ERROR)
    if draft is not None and target is None:
        fail("--draft: needs --target as well", USAGE_ERROR)
    check_outputs(report=report, json=json_file)
    from smartspec_trtllm.doctor import diagnose
    from smartspec_trtllm.doctor_report import markdown

    with _stdout_to_stderr():
        for diagnosis in diagnose(target, draft, _tell):
            text, document = markdown(diagnosis), json.dumps(diagnosis.document(), indent=1)
            if report is not None:
                report.write_text(text, encoding="utf-8")
                report.with_suffix(".json").write_text(document + "\n", encoding="utf-8")
    print(text, file=sys.stderr if json_file == STDOUT else sys.stdout)
    write_json(json_file, diagnosis.document())
    for missing in diagnosis.environment.missing:
        typer.echo(f"smartspec: {missing.what}; {missing.remedy}", err=True)
    raise typer.Exit(0 if diagnosis.is_healthy else 1)


def _tell(part: str) -> None:
    """Print one line per part, not a spinner. After a crash the last line names the failed part."""
    typer.echo(f"doctor: {part}", err=True)


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
