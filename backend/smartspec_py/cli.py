"""The command line, `smartspec`. A command is a function in commands/, added to the table below."""

from __future__ import annotations

import importlib
import sys

import typer

COMMANDS = (
    "serve",
    "check",
    "profile",
    "report",
    "steps",
    "expand",
    "trace",
    "simulate",
    "load",
    "explain",
    "doctor",
    "check_engines",
)
"""Modules of commands/, each with a function of the same name; in the order of `--help`."""

GROUPS = ("bench",)
"""Modules of commands/, each with a typer application of the same name."""

app = typer.Typer(
    name="smartspec",
    help="Serve a language model on Triton with speculative decoding that decides its draft "
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


for _name in COMMANDS:
    _module = importlib.import_module(f"smartspec_py.commands.{_name}")
    app.command(_name.replace("_", "-"))(getattr(_module, _name))

for _name in GROUPS:
    _module = importlib.import_module(f"smartspec_py.commands.{_name}")
    app.add_typer(getattr(_module, _name), name=_name)


if __name__ == "__main__":
    sys.exit(app())
