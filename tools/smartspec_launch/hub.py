"""Names of the Hugging Face hub, and the files of their repositories.

huggingface_hub does all requests and keeps the files, so its cache, progress bars and environment
variables count: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. It is imported only if a name was
given.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from smartspec_launch.interpreter import LaunchError
from smartspec_py.engines.checkpoints.checks import first_line
from smartspec_py.faults import ConfigError

NAME = re.compile(
    r"(?P<repository>[a-z0-9][\w.-]*/[a-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w.-]+))?",
    re.ASCII | re.IGNORECASE,
)

LOOK_UP_S = 20.0
"""Longest wait for each answer of the hub. Without a limit, a firewall that drops packets stopped
each start for minutes, also of a model in the cache."""

HEADER_BYTES = 16 << 20
"""Of a GGUF file, with its whole header: that of a vocabulary of 152 thousand tokens has 6 MB."""

FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class HubName:
    """OWNER/NAME, with @REVISION (default: the branch main), and with :FILE, which is the
    quantisation or the name of a GGUF file."""

    text: str
    repository: str
    revision: str | None
    file: str | None

    def __str__(self) -> str:
        return self.text


def hub_name(text: str) -> HubName | None:
    """None if the text cannot be a name, but only a path."""
    found = NAME.fullmatch(text)
    return HubName(text, **found.groupdict()) if found else None


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit.

    key: of `engine`, for messages. folder: of its files in the cache. sizes: bytes by file, in the
    repository, or in the cache if the hub cannot be asked; why_cached then says why.
    """

    key: str
    name: HubName
    folder: Path
    sizes: Mapping[str, int]
    why_cached: Exception | None = None

    def missing(self, files: Collection[str]) -> list[str]:
        """Those of the files that are not in the cache."""
        return [file for file in files if not (self.folder / file).is_file()]

    def num_bytes(self, files: Collection[str]) -> int:
        return sum(self.sizes[file] for file in files)

    def fetch(self, files: Collection[str]) -> None:
        """Download what is missing, one file after the other, in this thread: Ctrl-C ends it at
        once. Raises ConfigError or LaunchError."""
        from huggingface_hub import hf_hub_download

        from smartspec_launch.hub_progress import bar_class

        name, bars = self.name, bar_class()
        with errors_of(self.key, name):
            for file in self.missing(files):
                hf_hub_download(name.repository, file, revision=name.revision, tqdm_class=bars)
        if left := self.missing(files):
            raise LaunchError(f"{self.name} changed while {left[0]} was fetched: start again")

    def fetch_settings(self, files: Collection[str]) -> None:
        """`fetch` for small files, without progress bars."""
        from huggingface_hub.utils.tqdm import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        were_disabled = are_progress_bars_disabled()
        disable_progress_bars()
        try:
            self.fetch(files)
        finally:
            if not were_disabled:
                enable_progress_bars()

    def write_start(self, file: str, path: Path) -> None:
        """Write a file of the same size whose first HEADER_BYTES are those of the file; the others
        take no space on the disk. Raises ConfigError or LaunchError."""
        from huggingface_hub import HfFileSystem

        place = f"{self.name.repository}@{self.folder.name}/{file}"
        with errors_of(self.key, self.name):
            size = self.sizes[file]
            start = HfFileSystem().cat_file(place, 0, min(size, HEADER_BYTES), cache_type="none")
            with path.open("wb") as opened:
                opened.write(start)
                opened.truncate(size)


def open_repository(key: str, name: HubName) -> Repository:
    """Look the name up, or take the copy in the cache if the hub cannot be asked. Raises
    ConfigError if there is no such model, else LaunchError."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    with errors_of(key, name):
        try:
            found = HfApi().model_info(
                name.repository, revision=name.revision, files_metadata=True, timeout=LOOK_UP_S
            )
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except Exception as error:  # of the network, or of HF_HUB_OFFLINE
            if (cached := _cached(key, name, error)) is None:
                raise
            return cached
        sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
        parent = repo_folder_name(repo_id=name.repository, repo_type="model")
        return Repository(key, name, Path(HF_HUB_CACHE, parent, "snapshots", str(found.sha)), sizes)


def _cached(key: str, name: HubName, error: Exception) -> Repository | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=["config.json"],
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    folder = Path(found)
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    return Repository(key, name, folder, sizes, why_cached=error)


def free_disk() -> tuple[Path, int]:
    """The folder of the cache, and the free bytes there."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return folder, shutil.disk_usage(existing).free


@contextmanager
def errors_of(key: str, name: HubName) -> Iterator[None]:
    """Errors of huggingface_hub, as those of `as_error`."""
    try:
        yield
    except Exception as error:  # those of its HTTP client have no class in common
        raise as_error(key, name, error) from error


def as_error(key: str, name: HubName, error: Exception) -> Exception:
    """One sentence: ConfigError if the name or the token is wrong, else LaunchError."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    refusals = {
        errors.GatedRepoError: f"is gated: accept its terms at {hub}/{name.repository}, and set "
        "HF_TOKEN to a token of the same account",
        errors.RevisionNotFoundError: f"is no revision of {name.repository}: name a branch, a tag "
        "or a commit",
        errors.RepositoryNotFoundError: f"is neither a path here nor a model of {hub}: correct it, "
        "or set HF_TOKEN if the model is private",
        errors.HFValidationError: f"is neither a path here nor a model of {hub}: correct it",
    }
    for kind, reason in refusals.items():
        if isinstance(error, kind):
            return ConfigError(f"engine.{key}: {name} {reason}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return ConfigError(
            f"engine.{key}: {hub} refuses {name} with status {status}: set HF_TOKEN to a token "
            "that may read it"
        )
    number = getattr(error, "errno", None) or 0
    if isinstance(error, errors.OfflineModeIsEnabled):
        reason = f"it is not in {cache}, and HF_HUB_OFFLINE is set): unset it"
    elif number in FULL:
        reason = f"the disk of {cache} is full): make room there, or set HF_HOME to another disk"
    elif number in READ_ONLY:
        reason = f"{cache}: {os.strerror(number)}): set HF_HOME to a folder that can be written"
    else:
        text = f"status {status}" if status else first_line(error)
        reason = f"{text}): check the network and try again, or give a path"
    return LaunchError(f"engine.{key}: {name} cannot be fetched from {hub} ({reason}")
