"""Paths with letters that Triton's stub cannot open are given to it as links."""

from pathlib import Path

import pytest

from smartspec_launch import ascii_paths
from smartspec_launch.ascii_paths import AsciiPaths
from smartspec_py.config import LocalEngineConfig, ServerConfig
from smartspec_py.engines.model_files import existing
from smartspec_py.faults import ConfigError


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which links are made."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setattr(ascii_paths, "LINKS_FOLDER", str(folder))
    return folder


def test_an_ascii_path_stays_as_it_is(tmp_path: Path, links: Path) -> None:
    engine = LocalEngineConfig(model=str(tmp_path / "model"))
    config = ServerConfig(engine=engine)
    paths = AsciiPaths()
    assert paths.of(tmp_path / "run", "run") == tmp_path / "run"
    assert paths.of_config(config) == config
    assert list(links.iterdir()) == []


def test_other_paths_are_links_until_the_server_has_ended(tmp_path: Path, links: Path) -> None:
    """A profile cache that is not there yet is made; an engine could not make it by its link."""
    model = tmp_path / "modèle-日本"
    model.mkdir()
    cache = tmp_path / "größe" / "profile"
    engine = LocalEngineConfig(model=str(model), draft="/draft", profile_cache=str(cache))
    paths = AsciiPaths()
    given = paths.of_config(ServerConfig(engine=engine)).engine
    assert isinstance(given, LocalEngineConfig)
    assert given.profile_cache is not None
    assert (given.model + given.profile_cache).isascii()
    assert Path(given.model).resolve() == model
    assert Path(given.profile_cache).resolve() == cache
    assert cache.is_dir()
    assert given.draft == "/draft"
    assert paths.restored(f"{given.model} and /draft") == f"{model} and /draft"
    paths.close()
    paths.close()
    assert list(links.iterdir()) == []
    assert cache.is_dir()


def test_a_stub_that_cannot_name_a_path_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain tritonserver nobody makes links."""

    def refuse(path: Path) -> bytes:
        return str(path).encode("ascii")

    with pytest.raises(ConfigError, match=r"/nowhere-é does not exist$"):
        existing("engine.model", Path("/nowhere-é"))
    monkeypatch.setattr("os.fsencode", refuse)
    with pytest.raises(ConfigError, match=r"engine\.model: /nowhere-é .* not ASCII: use a"):
        existing("engine.model", Path("/nowhere-é"))
