"""The entry point of the images: how it reads engine.json."""

from __future__ import annotations

import json
from pathlib import Path

import entrypoint
import pytest

from smartspec_launch.paths import with_absolute_paths
from smartspec_py.config import read_config


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("torch", ("model", "draft", "heads", "profile_cache")),
        ("trtllm", ("target", "draft", "tokenizer", "profile_cache")),
        ("fake", ("tokenizer",)),
    ],
)
def test_paths_are_relative_to_the_file(tmp_path: Path, kind: str, keys: tuple[str, ...]) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"engine": {"kind": kind, **{key: f"../{key}" for key in keys}}}))
    config = entrypoint.with_cache(with_absolute_paths(read_config(path), tmp_path))
    assert config.engine.paths() == {key: str(tmp_path.parent / key) for key in keys}


def test_heads_are_not_read_as_a_gguf_file(tmp_path: Path) -> None:
    """A message about the heads names what was given."""
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "m.gguf").write_bytes(b"GGUF")
    path = tmp_path / "engine.json"
    path.write_text('{"engine": {"kind": "torch", "model": "nowhere", "heads": "heads"}}')
    paths = with_absolute_paths(read_config(path), tmp_path).engine.paths()
    assert paths == {"model": str(tmp_path / "nowhere"), "heads": str(tmp_path / "heads")}


def test_adapters_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "m.gguf").write_bytes(b"GGUF")
    path = tmp_path / "engine.json"
    path.write_text(
        '{"engine": {"kind": "torch", "model": "nowhere", "lora": {"sql": "sql", "b.c": "/x"}}}'
    )
    config = with_absolute_paths(read_config(path), tmp_path)
    assert config.engine.model_dump()["lora"] == {"sql": str(tmp_path / "sql"), "b.c": "/x"}
    assert config.engine.paths()["lora.b.c"] == "/x"


def test_the_default_place_of_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    path = tmp_path / "engine.json"
    path.write_text(
        '{"engine": {"kind": "torch", "model": "/nowhere"}, "limits": {"drain_s": 3.5}}'
    )
    config = entrypoint.with_cache(read_config(path))
    paths = {"model": "/nowhere", "profile_cache": "/var/cache/smartspec/profiles"}
    assert config.engine.paths() == paths
    assert config.limits.drain_s == 3.5


def test_names_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The entry point fetches them; here it may not (HF_HUB_OFFLINE)."""
    path = tmp_path / "engine.json"
    path.write_text('{"engine": {"kind": "torch", "model": "acme/target"}}')
    monkeypatch.setenv("SMARTSPEC_ENGINE_JSON", str(path))
    monkeypatch.setenv("SMARTSPEC_HOST", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert entrypoint.main() == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "Looking up acme/target"
    assert second.startswith("engine.model: acme/target cannot be fetched from ")
    assert second.endswith(" and HF_HUB_OFFLINE is set): unset it")


def test_a_wrong_engine_json_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{"engine": {"kind": "torch", "model": "m", "modle": 1}}')
    monkeypatch.setenv("SMARTSPEC_ENGINE_JSON", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert entrypoint.main() == 1
    assert "engine.json: engine.modle" in capsys.readouterr().err
