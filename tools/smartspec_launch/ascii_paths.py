"""ASCII names for what Triton's stub has to open.

The wheel's stub starts its Python with an isolated configuration: file names are ASCII there,
whatever LC_ALL and PYTHONUTF8 say, and an error whose traceback names any other file aborts it. So
paths with other letters are given to Triton as links whose own names are ASCII.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from smartspec_launch.paths import PATHS
from smartspec_py.serving.config import ServerConfig

LINKS_FOLDER = "/tmp"
"""Not TMPDIR, which may lie in a home directory whose name is not ASCII."""


class AsciiPaths:
    """Links for one server, in a folder that is made when the first is needed."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._links: dict[str, str] = {}

    def of(self, path: Path, name: str) -> Path:
        """The path itself if it is ASCII, else a new link of this name to it."""
        if str(path).isascii():
            return path
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="smartspec-", dir=LINKS_FOLDER))
        link = self._folder / name
        link.symlink_to(path)
        self._links[str(link)] = str(path)
        return link

    def of_config(self, config: ServerConfig) -> ServerConfig:
        """The configuration with such paths, where its engine has any. They must be absolute."""
        found = {name: getattr(config.engine, name, None) for name in PATHS}
        paths = {name: Path(path) for name, path in found.items() if path and not path.isascii()}
        if "profile_cache" in paths:
            # Through a link that leads nowhere the engine could not make it.
            with contextlib.suppress(OSError):
                paths["profile_cache"].mkdir(parents=True, exist_ok=True)
        links = {name: str(self.of(path, name)) for name, path in paths.items()}
        return config.model_copy(update={"engine": config.engine.model_copy(update=links)})

    def restored(self, text: str) -> str:
        """A text of Triton's or the backend's, with the paths that were given to `of`."""
        for link, path in self._links.items():
            text = text.replace(link, path)
        return text

    def close(self) -> None:
        """Remove the links. Idempotent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
