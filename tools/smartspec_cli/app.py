"""The command line, `smartspec`. Each command is a function in commands/ and listed in COMMANDS."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from smartspec_cli.commands import fail

COMMANDS = (
    "serve",
    "check",
    "profile",
    "report",
    "expand",
    "simulate",
    "explain",
    "doctor",
    "bench",
)
"""The commands in the order of `--help`. Each is a module of commands/, with - as _, that has a
function or a typer application of the same name."""


class LazyGroup(TyperGroup):
    """Imports only the command that runs, because importing all commands is slow."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names  # used to suggest a name for a mistyped command

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        found = getattr(importlib.import_module(f"smartspec_cli.commands.{name}"), name)
        if not isinstance(found, typer.Typer):
            command = typer.Typer(add_completion=False)
            command.command(cmd_name)(found)
            found = command
        built = get_command(found)
        built.name = cmd_name
        return built

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            fail("interrupted", 130)


app = typer.Typer(
    name="smartspec",
    cls=LazyGroup,
    help="Serve a language model on Triton with speculative decoding that chooses its draft "
    "length by goodput.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from smartspec_py import __version__

        typer.echo(f"smartspec {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    sys.exit(app())
