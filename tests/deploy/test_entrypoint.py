"""The entry point of the images: how it reads engine.json, and where it may listen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import entrypoint
import pytest

from smartspec_launch.address import Address
from smartspec_launch.interpreter import LaunchError
from smartspec_launch.paths import with_absolute_paths, with_profile_cache
from smartspec_py.config import read_config


def write(folder: Path, engine: dict[str, Any], **others: Any) -> Path:
    """An engine.json with this engine, of kind torch unless it names another."""
    path = folder / "engine.json"
    path.write_text(json.dumps({"engine": {"kind": "local", **engine}, **others}))
    return path


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[dict[str, Any]], list[str]]:
    """The lines with which the entry point refuses this engine."""

    def lines(engine: dict[str, Any]) -> list[str]:
        monkeypatch.setenv("SMARTSPEC_ENGINE_JSON", str(write(tmp_path, engine)))
        monkeypatch.setenv("SMARTSPEC_HOST", "127.0.0.1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert entrypoint.main() == 1
        return capsys.readouterr().err.splitlines()

    return lines


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("local", ("model", "draft", "heads", "profile_cache")),
        ("trtllm", ("target", "draft", "tokenizer", "profile_cache")),
        ("fake", ("tokenizer",)),
    ],
)
def test_paths_are_relative_to_the_file(tmp_path: Path, kind: str, keys: tuple[str, ...]) -> None:
    path = write(tmp_path, {"kind": kind, **{key: f"../{key}" for key in keys}})
    config = with_profile_cache(with_absolute_paths(read_config(path), tmp_path))
    assert config.engine.paths() == {key: str(tmp_path.parent / key) for key in keys}


def test_heads_are_not_read_as_a_gguf_file(tmp_path: Path) -> None:
    """A message about the heads names what was given."""
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "m.gguf").write_bytes(b"GGUF")
    path = write(tmp_path, {"model": "nowhere", "heads": "heads"})
    paths = with_absolute_paths(read_config(path), tmp_path).engine.paths()
    assert paths == {"model": str(tmp_path / "nowhere"), "heads": str(tmp_path / "heads")}


def test_adapters_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "m.gguf").write_bytes(b"GGUF")
    path = write(tmp_path, {"model": "nowhere", "lora": {"sql": "sql", "b.c": "/x"}})
    config = with_absolute_paths(read_config(path), tmp_path)
    assert config.engine.model_dump()["lora"] == {"sql": str(tmp_path / "sql"), "b.c": "/x"}
    assert config.engine.paths()["lora.b.c"] == "/x"


def test_the_default_place_of_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    path = write(tmp_path, {"model": "/nowhere"}, limits={"drain_s": 3.5})
    config = with_profile_cache(read_config(path))
    paths = {"model": "/nowhere", "profile_cache": "/var/cache/smartspec/profiles"}
    assert config.engine.paths() == paths
    assert config.limits.drain_s == 3.5


def test_names_of_the_hub(refused: Callable[[dict[str, Any]], list[str]]) -> None:
    """The entry point fetches them; here it may not (HF_HUB_OFFLINE)."""
    first, second = refused({"model": "acme/target"})
    assert first == "Looking up acme/target"
    assert second.startswith("engine.model: acme/target cannot be fetched from ")
    assert second.endswith(" and HF_HUB_OFFLINE is set): unset it")


def test_a_wrong_engine_json_is_named(refused: Callable[[dict[str, Any]], list[str]]) -> None:
    [line] = refused({"model": "m", "modle": 1})
    assert "engine.json: engine.modle" in line


def test_the_triton_of_the_wheel_listens_on_a_network_only_if_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU image allows it: who reaches the container is decided by its published ports."""
    monkeypatch.delenv("SMARTSPEC_ALLOW_REMOTE", raising=False)
    with pytest.raises(LaunchError, match=r"^Triton 2\.51 listening on 0\.0\.0\.0: .+ newer image"):
        entrypoint.check_exposure(Address("0.0.0.0"))
    monkeypatch.setenv("SMARTSPEC_ALLOW_REMOTE", "1")
    entrypoint.check_exposure(Address("0.0.0.0"))
    assert capsys.readouterr().err.startswith("Warning: Triton 2.51 listening on 0.0.0.0: ")


def test_settings_of_the_openai_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(write(tmp_path, {"model": str(tmp_path)}))
    before = entrypoint.openai_of(config)
    assert before is not None
    assert (before.chat_template, before.cors) == (None, [])
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    monkeypatch.setenv("SMARTSPEC_CHAT_TEMPLATE", str(template))
    monkeypatch.setenv("SMARTSPEC_CORS", "https://a.org, http://b:3000")
    given = entrypoint.openai_of(config)
    assert given is not None
    assert given.chat_template == template
    assert given.cors == ["https://a.org", "http://b:3000"]
    for text in ("{{", None):
        template.write_text(text) if text else template.unlink()
        with pytest.raises(LaunchError, match=r"^SMARTSPEC_CHAT_TEMPLATE: .*chat\.jinja"):
            entrypoint.openai_of(config)
