"""The images' entry: what becomes of engine.json."""

from __future__ import annotations

import json
from pathlib import Path

import entrypoint
import pytest

from smartspec_launch.paths import with_absolute_paths
from smartspec_py.config import ServerConfig, read_config


def write(folder: Path, engine: dict[str, object]) -> ServerConfig:
    """engine.json in `folder`, read as the entry does."""
    path = folder / "engine.json"
    path.write_text(json.dumps({"engine": engine, "limits": {"drain_s": 3.5}}))
    return entrypoint.with_cache(with_absolute_paths(read_config(path), folder))


def test_relative_paths_hold_wherever_the_file_is_copied_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    (tmp_path / "target").mkdir()
    folder = tmp_path / "smartspec" / "1"
    folder.mkdir(parents=True)
    config = write(folder, {"kind": "torch", "model": "../../target", "device": "cpu"})
    assert config.engine.model_dump() == {
        "kind": "torch",
        "model": str(tmp_path / "target"),
        "draft": None,
        "heads": None,
        "dtype": "auto",
        "device": "cpu",
        "devices": None,
        "draft_devices": None,
        "num_threads": 0,
        "runtime": "auto",
        "cuda_graphs": True,
        "profile_cache": "/var/cache/smartspec/profiles",
    }
    assert config.limits.drain_s == 3.5


def test_a_place_for_costs_that_the_file_names_is_kept(tmp_path: Path) -> None:
    config = write(tmp_path, {"kind": "torch", "model": "/nowhere", "profile_cache": "costs"})
    assert config.engine.model_dump()["profile_cache"] == str(tmp_path / "costs")
    assert config.engine.model_dump()["model"] == "/nowhere"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("torch", ("model", "draft", "heads", "profile_cache")),
        ("trtllm", ("target", "draft", "tokenizer", "profile_cache")),
    ],
)
def test_every_path_is_relative_to_the_file(
    tmp_path: Path, kind: str, keys: tuple[str, ...]
) -> None:
    config = write(tmp_path, {"kind": kind, **{key: f"its_{key}" for key in keys}})
    assert config.engine.paths() == {key: str(tmp_path / f"its_{key}") for key in keys}


def test_an_engine_without_such_a_key_is_given_none(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    config = write(tmp_path, {"kind": "fake", "tokenizer": "words"})
    assert config.engine.model_dump()["tokenizer"] == str(tmp_path / "words")


def test_a_wrong_engine_json_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{"engine": {"kind": "torch", "model": "m", "modle": 1}}')
    monkeypatch.setenv("SMARTSPEC_ENGINE_JSON", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert entrypoint.main() == 1
    assert "engine.json: engine.modle" in capsys.readouterr().err
