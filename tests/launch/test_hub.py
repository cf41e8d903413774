"""Models fetched from the Hugging Face hub: the real client against a stand-in of the hub."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from hub_models import TINY, files_of, found
from hub_stand_in import HubStandIn

from smartspec_launch import models
from smartspec_launch.interpreter import LaunchError
from smartspec_launch.models import READING
from smartspec_py.faults import ConfigError

SERVED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.usefixtures("quick")
def test_without_a_terminal_a_download_is_told_in_lines(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("smartspec_launch.hub_progress.LINE_EVERY_S", 0.0)
    found(model="acme/target")
    assert " MB of " not in capsys.readouterr().err, "HF_HUB_DISABLE_PROGRESS_BARS"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", None)
    found(model="acme/draft")
    assert capsys.readouterr().err.endswith("  1 MB of 1 MB\n")


def test_a_pair_is_fetched_once(
    hub: HubStandIn, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is served, and after the checks; redirects lead to another host without the token.
    The checks run in a process of their own, as they do for a person."""
    said: list[str] = []
    phases: list[str] = []

    def shown(text: str, after_s: float = 0.0) -> AbstractContextManager[None]:
        phases.append(text)
        return nullcontext()

    monkeypatch.setattr(models, "shown", shown)
    config = found(said, model="acme/target", draft="acme/draft")
    folder = Path(config.engine.paths()["model"])
    assert folder.parts[-3:-1] == ("models--acme--target", "snapshots")
    assert hub_cache in folder.parents
    assert (
        folder.joinpath("model.safetensors").read_bytes()
        == (TINY / "target" / "model.safetensors").read_bytes()
    )
    wanted = sorted([*SERVED, "chat_template.jinja", "model.safetensors"])
    assert sorted(hub.fetched()) == sorted(wanted * 2)
    assert hub.fetched()[-2:] == ["model.safetensors"] * 2
    assert config.served_model_name == ["acme/target"]
    both = "acme/target and acme/draft"
    assert phases == [
        f"Looking up {both}",
        f"Checking {both} before the weights are fetched",
        READING,
    ]
    assert said[0].startswith(f"Fetching 4 MB to {hub_cache}, where ")
    assert "; weights take at least 2 MB of memory, of which " in said[0]
    hub.requests.clear()
    assert found(said, model="acme/target", draft="acme/draft") == config
    assert hub.fetched() == []
    assert phases[3:] == [f"Looking up {both}", READING]
    assert len(said) == 1


@pytest.mark.usefixtures("quick")
def test_revisions(hub: HubStandIn) -> None:
    """A branch, a tag and a commit have their own folders."""
    older = files_of(TINY / "target") | {"generation_config.json": b'{"eos_token_id": 1}'}
    commit = hub.add("acme/target", older, "v1")
    for revision in ("v1", commit):
        folder = Path(found(model=f"acme/target@{revision}").engine.paths()["model"])
        assert folder.name == commit
        assert (folder / "generation_config.json").read_bytes() == b'{"eos_token_id": 1}'
    assert Path(found(model="acme/target").engine.paths()["model"]).name != commit
    with pytest.raises(
        ConfigError, match=r"^engine\.model: acme/target@v2 is no revision of acme/"
    ):
        found(model="acme/target@v2")


@pytest.mark.usefixtures("quick")
def test_a_broken_transfer_goes_on(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    hub.breaks = [1 << 30, 50_000]  # tokenizer.json, and then the weights
    folder = Path(found(model="acme/target").engine.paths()["model"])
    weights = (TINY / "target" / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == weights
    ranges = [range_ for _, path, range_, _ in hub.requests if path.endswith(".safetensors")]
    assert ranges == [None, None, "bytes=50000-"]  # HEAD, GET, GET


@pytest.mark.usefixtures("quick")
def test_a_transfer_that_stays_broken(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, and the next start fetches what is missing."""
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    hub.breaks = [1 << 30, *[0] * 20]
    sentence = (
        r"^engine\.model: acme/target cannot be fetched from http://127.* \(peer closed .*\): c"
    )
    with pytest.raises(LaunchError, match=sentence):
        found(model="acme/target")
    hub.breaks, hub.requests = [], []
    found(model="acme/target")
    assert hub.fetched() == ["model.safetensors"]


@pytest.mark.usefixtures("quick")
def test_gated_models(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("acme/target")
    with pytest.raises(
        ConfigError, match=r"acme/target is gated: accept its terms at http.*/acme/t"
    ):
        found(model="acme/target")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="refuses acme/target with status 401: set HF_TOKEN"):
        found(model="acme/target")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.requests.clear()
    found(model="acme/target")
    assert hub.fetched(".safetensors") == ["model.safetensors"]
    with_token = {path.split("/")[1]: has_token for _, path, _, has_token in hub.requests}
    assert (with_token["acme"], with_token["cdn"]) == (True, False)


@pytest.mark.parametrize("name", ["acme/targte", "models/mine", "acme/a..b"])
def test_a_misspelt_name(hub: HubStandIn, name: str) -> None:
    sentence = (
        rf"^engine\.draft: {name} is neither a path here nor a model of http://127.*: correct"
    )
    with pytest.raises(ConfigError, match=sentence):
        found(model=str(TINY / "target"), draft=name)
    assert hub.fetched() == []


@pytest.mark.usefixtures("quick")
def test_a_hub_that_cannot_be_asked(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy in the cache is served; without one, or with a part of it, one sentence."""
    from huggingface_hub import constants

    hub.status = 503
    with pytest.raises(
        LaunchError, match=r"acme/target cannot be fetched .* \(status 503\): check"
    ):
        found(model="acme/target")
    hub.status = 200
    config = found(model="acme/target")
    hub.status = 503
    said: list[str] = []
    assert found(said, model="acme/target") == config
    assert said[0] == "The hub cannot be asked: acme/target is taken from the cache"
    Path(config.engine.paths()["model"], "model.safetensors").unlink()
    with pytest.raises(
        LaunchError, match=r"acme/target cannot be fetched .* \(status 503\): check"
    ):
        found(model="acme/target")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        LaunchError, match=r"acme/draft cannot be fetched .* refused\): check the net"
    ):
        found(model="acme/draft")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        LaunchError, match=r"acme/draft cannot .* and HF_HUB_OFFLINE is set\): unset"
    ):
        found(model="acme/draft")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, r"the disk of .*/hub is full\): make room there, or set HF_HOME"),
        (
            errno.EROFS,
            r".*/hub: Read-only file system\): set HF_HOME to a folder that can be written",
        ),
    ],
)
def test_a_disk_that_takes_no_more(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, number: int, sentence: str
) -> None:
    from huggingface_hub import file_download

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_download, "http_get", fail)
    with pytest.raises(LaunchError, match=rf"^engine\.model: acme/target cannot .* \({sentence}"):
        found(model="acme/target")
