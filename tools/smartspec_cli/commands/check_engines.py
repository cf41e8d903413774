"""`smartspec check-engines`: checks from their files if TensorRT-LLM engines can speculate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from smartspec_cli.commands import USAGE_ERROR, JsonFile, fail, result_console, write_json
from smartspec_trtllm.build_tokenizer import TokenizerError, num_token_ids
from smartspec_trtllm.engine_check import check_pair, has_errors
from smartspec_trtllm.findings import show


def check_engines(
    target: Annotated[Path, typer.Argument(help="Engine directory of the target.")],
    draft: Annotated[
        Path | None, typer.Argument(help="Hugging Face directory of the draft model.")
    ] = None,
    k: Annotated[int, typer.Option("--k", help="Largest draft length.", min=0)] = 7,
    sequences: Annotated[int, typer.Option(help="Largest batch size.", min=1)] = 64,
    context_len: Annotated[
        int | None,
        typer.Option(help="Longest prompt plus text, in tokens; default: the target's own.", min=1),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory with tokenizer.json; default: `tokenizer` next to TARGET."),
    ] = None,
    logits: Annotated[
        bool, typer.Option("--logits", help="Verify drafts by the draft model's logits.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Check the files of engine directories. This needs no TensorRT-LLM and no GPU.

    Exit code 1 means that there are errors.
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
    show(findings, result_console(json_file))
    document = {"ok": not has_errors(findings), "findings": [asdict(one) for one in findings]}
    write_json(json_file, document)
    if has_errors(findings):
        raise typer.Exit(1)


def _num_tokens(target: Path, tokenizer: Path | None) -> int | None:
    beside = target.resolve().parent / "tokenizer"
    if tokenizer is None and not beside.is_dir():
        return None
    return num_token_ids(tokenizer or beside)
