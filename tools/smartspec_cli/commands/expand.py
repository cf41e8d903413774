"""`smartspec expand`: makes a larger model with the same output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smartspec_cli.commands import USAGE_ERROR, fail


def expand(
    source: Annotated[
        Path, typer.Argument(help="Hugging Face directory of a Llama model, or of Medusa heads.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write; it must not exist.")],
    preset: Annotated[
        str, typer.Option(help="Size to expand to: 4m, 17m, 88m, 40m, 1b or 4b.")
    ] = "88m",
) -> None:
    """Make a model slower and larger without changing its answers.

    It adds layers and dimensions that cancel out. The logits stay the same, and time and memory
    become those of the larger size. Use it to measure speculation at a size without training.
    Expand Medusa heads with the same preset as their target.
    """
    from smartspec_bench import expand as expansion
    from smartspec_py.engines.drafts.eagle.head import is_eagle

    if preset not in expansion.PRESETS:
        fail(f"--preset: {preset!r} must be one of {', '.join(expansion.PRESETS)}", USAGE_ERROR)
    if not (source / "config.json").is_file():
        fail(f"{source} is not a Hugging Face model directory: no config.json", USAGE_ERROR)
    if is_eagle(source):
        only = "only Llama models and Medusa heads can be expanded"
        fail(f"{source} has an EAGLE-3 head; {only}", USAGE_ERROR)
    if out.exists():
        fail(f"{out} exists: name a new directory", USAGE_ERROR)
    size = expansion.PRESETS[preset]
    try:
        if expansion.has_medusa(source):
            same = "guesses"
            num_parameters = expansion.expand_medusa(source, out, size["hidden_size"])
        else:
            same = "answers"
            num_parameters = expansion.expand(source, out, size)
    except expansion.SizeError as error:
        fail(f"--preset: {preset} is too small for {source} ({error})", USAGE_ERROR)
    except (OSError, ValueError) as error:
        fail(f"cannot expand {source}: {error}")
    typer.echo(f"{out}: {num_parameters / 1e6:.1f} M parameters, same {same} as {source}")
