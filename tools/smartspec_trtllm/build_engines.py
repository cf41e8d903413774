"""`engines_build/build_engines.sh`: builds two engines from two Hugging Face models.

The commands follow the documentation of TensorRT-LLM 1.2.1. This project has never run them.
"""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smartspec_trtllm.build_models import BuildError
from smartspec_trtllm.build_plan import BuildOptions, ModelOptions, Plan, make_plan
from smartspec_trtllm.build_quantization import KvCacheDtype, Quantization
from smartspec_trtllm.build_steps import StepFailed, check_tools, run_plan
from smartspec_trtllm.engine_check import check_pair, has_errors
from smartspec_trtllm.findings import show

_DEFAULTS = BuildOptions()


class Dtype(StrEnum):
    """Precision of unquantized weights and activations. auto: the precision of the model."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def build_engines(
    target: Annotated[Path, typer.Argument(help="Hugging Face directory of the target.")],
    draft: Annotated[Path, typer.Argument(help="Hugging Face directory of the draft model.")],
    out: Annotated[Path, typer.Argument(help="Output folder for target, draft and tokenizer.")],
    dtype: Annotated[Dtype, typer.Option(help="Precision of unquantized parts.")] = Dtype.AUTO,
    tp: Annotated[int, typer.Option(help="GPUs for the target.", min=1)] = 1,
    draft_tp: Annotated[int, typer.Option(help="GPUs for the draft model.", min=1)] = 1,
    quantization: Annotated[
        Quantization, typer.Option(help="Quantization of the target.")
    ] = Quantization.NONE,
    draft_quantization: Annotated[
        Quantization, typer.Option(help="Quantization of the draft model.")
    ] = Quantization.NONE,
    kv_cache_dtype: Annotated[
        KvCacheDtype, typer.Option(help="Precision of the target's KV cache.")
    ] = KvCacheDtype.AUTO,
    draft_kv_cache_dtype: Annotated[
        KvCacheDtype, typer.Option(help="Precision of the draft model's KV cache.")
    ] = KvCacheDtype.AUTO,
    max_context_len: Annotated[
        int, typer.Option(help="Tokens of the longest sequence, prompt and text.")
    ] = _DEFAULTS.max_context_len,
    max_draft_len: Annotated[
        int, typer.Option(help="Tokens of the longest draft.")
    ] = _DEFAULTS.max_draft_len,
    max_batch_size: Annotated[
        int, typer.Option(help="Maximum sequences in a batch.")
    ] = _DEFAULTS.max_batch_size,
    max_num_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of an iteration; default: up to 8 sequences of maximum length."),
    ] = None,
    calib_dataset: Annotated[
        str | None,
        typer.Option(help="Calibration data set; by default, the script downloads one."),
    ] = None,
    examples: Annotated[
        Path, typer.Option(help="Folder with the examples of TensorRT-LLM.")
    ] = _DEFAULTS.examples,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands without running them.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Run all steps, even if nothing has changed.")
    ] = False,
) -> None:
    """Build the engines of a target and a draft for TensorRT-LLM's external-draft mode."""
    options = BuildOptions(
        target=ModelOptions(tp, quantization, kv_cache_dtype),
        draft=ModelOptions(draft_tp, draft_quantization, draft_kv_cache_dtype),
        dtype=dtype,
        max_context_len=max_context_len,
        max_draft_len=max_draft_len,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        calib_dataset=calib_dataset,
        examples=examples if dry_run else examples.absolute(),
    )
    try:
        if dry_run:
            plan = make_plan(target, draft, out, options)
            typer.echo(script(plan, out, options))
            return
        # Stamps compare commands, so the commands must not depend on the current directory.
        out = out.absolute()
        plan = make_plan(target.absolute(), draft.absolute(), out, options)
        check_tools(plan)
        for note in plan.notes:
            typer.echo(f"note: {note}")
        run_plan(plan, out, force=force, say=typer.echo)
    except BuildError as error:
        _fail(str(error), 2)
    except StepFailed as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted: the next build runs the unfinished step again", 130)
    _validate(plan, out, options)


def script(plan: Plan, out: Path, options: BuildOptions) -> str:
    """The commands as a shell script, with one flag per line."""
    lines = [f"# note: {note}" for note in plan.notes]
    for number, step in enumerate(plan.steps, start=1):
        lines += [f"# {number}/{len(plan.steps)} {step.name}", shell_text(step.command)]
    check = (
        *("smartspec", "check-engines", str(out / "target"), str(out / "draft")),
        *("--k", str(options.max_draft_len), "--sequences", str(options.max_batch_size)),
        *("--context-len", str(options.max_context_len)),
    )
    return "\n".join([*lines, "# then", shell_text(check)])


def shell_text(command: tuple[str, ...]) -> str:
    words = [shlex.quote(word) for word in command]
    return " ".join(f"\\\n    {word}" if word.startswith("--") else word for word in words)


def _validate(plan: Plan, out: Path, options: BuildOptions) -> None:
    findings = check_pair(
        out / "target",
        out / "draft",
        k=options.max_draft_len,
        sequences=options.max_batch_size,
        context_len=options.max_context_len,
        num_tokens=plan.num_tokens,
    )
    show(findings, Console())
    if has_errors(findings):
        raise typer.Exit(1)


def _fail(message: str, exit_code: int) -> None:
    typer.echo(f"build_engines: {message}", err=True)
    raise typer.Exit(exit_code)


if __name__ == "__main__":
    app()
