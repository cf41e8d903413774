"""Finds the models of a configuration: names of the hub become folders of its cache, and GGUF files
the folders that are made of them.

Nothing else fetches models. It runs in the launcher, before Triton starts: there a person sees the
progress, and a wrong name is one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from smartspec_launch.hub import HubName, Repository, as_error, open_repository
from smartspec_launch.hub_check import check_before_fetch
from smartspec_launch.hub_files import gguf_of, settings_files, weights_files
from smartspec_launch.paths import hub_names
from smartspec_launch.phases import SHORT_S, shown
from smartspec_py.config import ServerConfig
from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.gguf.header import base_name
from smartspec_py.faults import ConfigError

Say = Callable[[str], None]
"""Shows a person one line."""

READING = "Reading settings and tokenizers"


def with_local_models(config: ServerConfig, say: Say) -> ServerConfig:
    """The configuration with folders in place of names of the hub and of GGUF files. All other
    paths are absolute. Heads and adapters are in no GGUF file.

    Raises ConfigError if the configuration or a name is wrong, and LaunchError if a model cannot be
    fetched.
    """
    config = _with_served_name(config)
    if names := hub_names(config, Path("/")):
        config = _with_paths(config, _fetched(config, names, say))
    with shown(READING, after_s=SHORT_S):
        folders = {
            key: str(model_folder(Path(path)))
            for key, path in config.engine.paths().items()
            if not key.startswith(("heads", "lora."))
        }
    return _with_paths(config, folders)


def _with_served_name(config: ServerConfig) -> ServerConfig:
    """With the name of the model, before it is that of a folder in a cache."""
    paths = config.engine.paths()
    model = paths.get("model") or paths.get("target")
    if config.served_model_name or model is None:
        return config
    is_hub = "model" in hub_names(config, Path("/"))
    name = model if is_hub else base_name(Path(model))
    return config.model_copy(update={"served_model_name": [name]})


def _with_paths(config: ServerConfig, paths: Mapping[str, str]) -> ServerConfig:
    return config.model_copy(update={"engine": config.engine.with_paths(paths)})


def _fetched(config: ServerConfig, names: Mapping[str, HubName], say: Say) -> dict[str, str]:
    """The paths of the models with these names, by key."""
    together = " and ".join(dict.fromkeys(map(str, names.values())))
    with shown(f"Looking up {together}"):
        repositories = {key: open_repository(key, name) for key, name in names.items()}
        weights = {key: _weights(key, repository) for key, repository in repositories.items()}
    for repository in repositories.values():
        if repository.why_cached is not None:
            say(f"The hub cannot be asked: {repository.name} is taken from the cache")
    if any(repositories[key].missing(files) for key, files in weights.items()):
        with shown(f"Checking {together} before the weights are fetched"):
            line = check_before_fetch(config, repositories, weights)
        say(line)
        for key, files in weights.items():
            repositories[key].fetch(files)
    return {
        key: str(each.folder.joinpath(*gguf_of(weights[key])[:1]))
        for key, each in repositories.items()
    }


def _weights(key: str, repository: Repository) -> list[str]:
    """The files with the weights. Those with the settings are fetched."""
    try:
        repository.fetch_settings(settings_files(key, repository.sizes))
        return weights_files(key, repository)
    except (ConfigError, ModelError) as error:
        if repository.why_cached is not None:  # the cache has only a part of it
            raise as_error(key, repository.name, repository.why_cached) from error
        if isinstance(error, ModelError):
            raise ConfigError(f"engine.{key}: {error}") from error
        raise
