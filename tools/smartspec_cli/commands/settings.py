"""The options that describe a server, and the check of options. A wrong one ends the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from smartspec_cli.commands import USAGE_ERROR, fail, note
from smartspec_launch import paths
from smartspec_launch.interpreter import LaunchError
from smartspec_launch.models import with_local_models
from smartspec_py.config import LimitsConfig, LocalEngineConfig, ServerConfig, read_config
from smartspec_py.core.plan.planner import parse_policy
from smartspec_py.engines.checkpoints.adapter_config import read_adapter_config
from smartspec_py.engines.checkpoints.checks import ModelError, check_heads
from smartspec_py.engines.checkpoints.pair import check_pair_files
from smartspec_py.faults import ConfigError, shown

if TYPE_CHECKING:
    from smartspec_py.engines.engine import Engine

_Given = TypeVar("_Given")
_Value = TypeVar("_Value")
_option = partial(typer.Option, rich_help_panel="Models")


def path_or_name(text: str) -> Path:
    """What begins with a dot or a tilde, or ends with a slash, is a path and no name of the hub."""
    is_path = text.startswith((".", "~")) or text.endswith("/")
    return Path(text).expanduser().absolute() if is_path else Path(text)


_model = partial(_option, parser=path_or_name, metavar="<path>")
Model = Annotated[
    Path | None,
    _model(
        help="Directory or GGUF file of the target model, or its name on the Hugging Face hub: "
        "OWNER/NAME, with @REVISION, and with :Q4_K_M for a GGUF file of this quantisation."
    ),
]
Draft = Annotated[
    Path | None,
    _model(help="Directory, GGUF file or hub name of the draft model; default: no draft model."),
]
Heads = Annotated[
    Path | None,
    _model(
        help="Directory or hub name of Medusa heads, or of an EAGLE-3 head, trained for the target "
        "model."
    ),
]
Lora = Annotated[
    list[str] | None,
    _option(
        "--lora",
        metavar="NAME=FOLDER",
        help="LoRA adapter of the target in PEFT's format, a directory or a hub name, which "
        "requests choose by its name. May be repeated.",
    ),
]
Config = Annotated[
    Path | None,
    _option(
        help="An engine.json, instead of --model, --draft, --heads and --lora. Options that are "
        "given beside it replace its keys. Required for TensorRT-LLM engines."
    ),
]
Changes = Annotated[
    list[str] | None,
    _option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of engine.json, such as limits.max_queue=64. Values are JSON, or text. "
        "May be repeated.",
    ),
]

InputFile = Annotated[
    Path | None,
    typer.Option(
        "--input", help='Own prompts: one {"prompt": ".."} per line, MT-bench, or ShareGPT.'
    ),
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0)]


def engine_option(key: str) -> Any:
    """A short name of `--set engine.KEY`. Its help is the first sentence on the key."""
    field = LocalEngineConfig.model_fields[key]
    values = ", ".join(get_args(field.annotation))
    return _option(help=f"Set engine.{key}: {_meaning(field)}{values and f' ({values})'}.")


def limits_option(key: str) -> Any:
    """The same of `--set limits.KEY`."""
    return _option(help=f"Set limits.{key}: {_meaning(LimitsConfig.model_fields[key])}.")


def _meaning(field: FieldInfo) -> str:
    return (field.description or "").split(".")[0]


def server_config(
    model: Path | None,
    draft: Path | None,
    heads: Path | None,
    config: Path | None,
    changes: Sequence[str] | None,
    lora: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> ServerConfig:
    """The configuration of the options, with absolute paths.

    options: top-level keys and sections of engine.json that are on the command line; None is not
    given. They replace those of the file of `config`. defaults: the same where there is no file.
    """
    engine = {"kind": "local", "profile_cache": str(paths.profile_cache().resolve())}
    settings: dict[str, Any] = {**defaults, "engine": engine | defaults.get("engine", {})}
    if config is not None:
        try:
            given = paths.with_absolute_paths(read_config(config), config.resolve().parent)
            given = paths.with_profile_cache(given)
        except ConfigError as error:
            fail(str(error), USAGE_ERROR)
        for name, value in (("model", model), ("draft", draft), ("heads", heads), ("lora", lora)):
            if value:
                fail(f"--{name}: cannot be given together with --config: set it there", USAGE_ERROR)
        settings = given.model_dump(mode="json")
    elif model is None:
        fail("--model, or --config with an engine.json, must be given", USAGE_ERROR)
    else:
        for name, path in (("model", model), ("draft", draft), ("heads", heads)):
            if path is not None:
                settings["engine"][name] = str(path)
        settings["engine"]["lora"] = adapter_folders(lora or ())
    for key, value in (options or {}).items():
        if isinstance(value, Mapping):
            given_keys = {name: one for name, one in value.items() if one is not None}
            settings[key] = settings.get(key, {}) | given_keys
        elif value is not None:
            settings[key] = value
    keys = set_keys(settings, changes or ())
    checked = checked_config(settings, keys)
    try:
        if config is None or changes:
            checked = paths.with_absolute_paths(checked, Path.cwd())
        return with_local_models(checked, note)
    except OSError as error:  # as of a folder that this user may not enter
        fail(f"{error.filename} cannot be read: {error.strerror}", USAGE_ERROR)
    except ConfigError as error:
        fail(str(error).removeprefix("engine.json: "), USAGE_ERROR)
    except LaunchError as error:
        fail(str(error))


def adapter_folders(given: Sequence[str]) -> dict[str, str]:
    """The folders of `--lora NAME=FOLDER` by name. A wrong value ends the command."""
    folders: dict[str, str] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not name or not folder or name in folders:
            fail(f"--lora: got {text!r}, must be NAME=FOLDER, with each name once", USAGE_ERROR)
        folders[name] = folder
    return folders


def set_keys(settings: dict[str, Any], changes: Sequence[str]) -> list[str]:
    """Set the keys of `--set KEY=VALUE` in the settings; returns the keys.

    A change without `=`, or inside a value that is no section, ends the command.
    """
    keys = []
    for change in changes:
        key, equals, text = change.partition("=")
        *sections, name = key.split(".")
        if not equals or not name or not all(sections):
            fail(f"--set: got {change!r}, must be KEY=VALUE with a key of engine.json", USAGE_ERROR)
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        place = settings
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                fail(f"--set: {key}: {section} is not a section of engine.json", USAGE_ERROR)
        place[name] = value
        keys.append(key)
    return keys


def checked_config(settings: dict[str, Any], keys: Sequence[str] = ()) -> ServerConfig:
    """The checked configuration. A wrong value ends the command and names its option.

    keys: those that were given by --set.
    """
    try:
        return ServerConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = _name_of(first["loc"], keys)
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "engine.json has no such key"
        fail(f"--{option}: {reason} (got {shown(first['input'])})", USAGE_ERROR)


def _name_of(place: Sequence[int | str], keys: Sequence[str]) -> str:
    """The name of the option that sets this place in the configuration."""
    path = ".".join(map(str, place))
    if path.startswith("engine.lora"):
        path = "engine.lora"
    if any(path.startswith(key) or key.startswith(path) for key in keys):
        return f"set: {path}"
    return path.rpartition(".")[2].replace("_", "-")


def check_model_files(config: ServerConfig) -> None:
    """Check the files that can be checked quickly. The backend checks the rest, which needs
    PyTorch. Importing PyTorch here too would make every start seconds longer."""
    engine = config.engine
    if not isinstance(engine, LocalEngineConfig):
        return
    draft = None if engine.draft is None else Path(engine.draft)
    try:
        check_pair_files(Path(engine.model), draft, config.limits.max_context_len)
        if engine.heads is not None:
            check_heads(Path(engine.heads))
        for folder in engine.lora.values():
            read_adapter_config(Path(folder))
    except ModelError as error:
        fail(str(error), USAGE_ERROR)


def engine_of(config: ServerConfig) -> Engine:
    """Load the models. If they or the configuration are wrong, the command ends."""
    from smartspec_py.serving.build import build_engine

    try:
        return build_engine(config, Path.cwd())
    except ConfigError as error:
        fail(str(error), USAGE_ERROR)


def parsed(option: str, parse: Callable[[_Given], _Value], given: _Given) -> _Value:
    """The parsed value of an option. If it is invalid, the command ends."""
    try:
        return parse(given)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"--{option}: {error}", USAGE_ERROR)


def policies_of(text: str, option: str = "policies") -> list[str]:
    """Policy names separated by commas. An invalid name ends the command."""
    names = text.split(",")
    for name in names:
        try:
            parse_policy(name)
        except ValueError as error:
            fail(f"--{option}: {name!r} must be {error}", USAGE_ERROR)
    return names


def numbers_of(text: str, option: str, least: float, most: float) -> list[float]:
    """Numbers in a range, separated by commas. Anything else ends the command."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(least <= value <= most for value in values):
        rule = f"must be numbers from {least:g} to {most:g} separated by commas"
        fail(f"--{option}: got {text!r}, {rule}", USAGE_ERROR)
    return values
