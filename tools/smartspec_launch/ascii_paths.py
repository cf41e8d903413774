"""ASCII names for the files and folders that Triton's stub opens.

The wheel's stub starts Python with an isolated configuration. File names must be ASCII there; the
stub ignores LC_ALL and PYTHONUTF8. It aborts on an error whose traceback has a non-ASCII file name.
For non-ASCII paths, this module therefore creates symbolic links with ASCII names.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory

from smartspec_py.config import ServerConfig

LINKS_FOLDER = "/tmp"
"""Not TMPDIR, because it may be in a home directory with a non-ASCII name."""


class AsciiPaths:
    """Links for one server. Their folder is created with the first link."""

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._links: dict[str, str] = {}

    def of(self, path: Path, name: str) -> Path:
        """Return the path itself if it is ASCII, else a new link to it with this name."""
        if str(path).isascii():
            return path
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="smartspec-", dir=LINKS_FOLDER)
        link = Path(self._folder.name) / name
        link.symlink_to(path)
        self._links[str(link)] = str(path)
        return link

    def of_config(self, config: ServerConfig) -> ServerConfig:
        """Return the configuration with ASCII engine paths. The given paths must be absolute."""
        found = config.engine.paths()
        paths = {name: Path(path) for name, path in found.items() if not path.isascii()}
        if "profile_cache" in paths:
            # The engine cannot create this folder through a link without a target.
            with contextlib.suppress(OSError):
                paths["profile_cache"].mkdir(parents=True, exist_ok=True)
        links = {name: str(self.of(path, name)) for name, path in paths.items()}
        return config.model_copy(update={"engine": config.engine.with_paths(links)})

    def restored(self, text: str) -> str:
        """A text from Triton or the backend, with each link replaced by its original path."""
        for link, path in self._links.items():
            text = text.replace(link, path)
        return text

    def close(self) -> None:
        """Remove the links. Idempotent. The end of this process removes them, too."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
