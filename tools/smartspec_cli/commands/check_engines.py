"""`smartspec check-engines`: whether TensorRT-LLM engines can serve speculation, by their files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from smartspec_cli.commands import USAGE_ERROR, fail
from smartspec_py.engines.trtllm.engine_dir import Finding, Severity, check_pair, has_errors
from smartspec_trtllm.build_tokenizer import TokenizerError, num_token_ids

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def check_engines(
    target: Annotated[Path, typer.Argument(help="Engine directory of the target.")],
    draft: Annotated[Path | None, typer.Argument(help="That of the draft.")] = None,
    k: Annotated[int, typer.Option("--k", help="Longest draft to be verified.", min=0)] = 7,
    sequences: Annotated[int, typer.Option(help="Sequences at once.", min=1)] = 64,
    context_len: Annotated[
        int | None,
        typer.Option(help="Longest sequence, prompt and text; default: the target's own.", min=1),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory with tokenizer.json; default: `tokenizer` beside TARGET."),
    ] = None,
    logits: Annotated[
        bool, typer.Option("--logits", help="Drafts are accepted by the draft's logits.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Check engine directories by their files; no TensorRT-LLM and no GPU is needed.

    Exit code 1 where there are errors.
    """
    try:
        num_tokens = _num_tokens(target, tokenizer)
    except TokenizerError as error:
        fail(f"--tokenizer: {error}", USAGE_ERROR)
    findings = check_pair(
        target,
        draft,
        k=k,
        sequences=sequences,
        context_len=context_len,
        num_tokens=num_tokens,
        uses_logits=logits,
    )
    if as_json:
        document = {"ok": not has_errors(findings), "findings": [asdict(one) for one in findings]}
        typer.echo(json.dumps(document))
    else:
        show(findings, Console())
    if has_errors(findings):
        raise typer.Exit(1)


def show(findings: tuple[Finding, ...], console: Console) -> None:
    """A table of the findings, and a line that sums them up."""
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


def _num_tokens(target: Path, tokenizer: Path | None) -> int | None:
    beside = target.resolve().parent / "tokenizer"
    if tokenizer is None and not beside.is_dir():
        return None
    return num_token_ids(tokenizer or beside)


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
    """Without the sections of config.json; a file's name stays whole."""
    return key.rpartition(".")[2] if "_config." in key else key
