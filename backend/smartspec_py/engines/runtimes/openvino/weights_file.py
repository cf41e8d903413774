"""Keeps the compressed weights of a model in a file of the user's cache directory.

The first start writes each matrix there when it is made; later ones only map the file into memory.
OpenVINO copies most matrices into an order of its own when it compiles the graph. Memory of a
mapped file can then be used for something else; other memory would be lost.

A file is used only if the model's files are the same as when it was made: by path, size, inode, and
times of the last change of content and inode. What it holds is on the disk before its index is
written, and it is never changed after that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

import numpy as np
import torch

from smartspec_py.engines.phases import size_text
from smartspec_py.engines.profile import write_json

logger = logging.getLogger(__name__)

VERSION = 3
"""Raise it if the same key stands for other numbers, or the same numbers have another key."""

INDEX, DATA = ".json", ".weights"

ALIGNMENT = 64
"""Of tensors in the file, in bytes."""

MOST_FREE_SHARE = 0.5
"""Largest share of the disk's free bytes that a file may take."""

ABANDONED_S = 3600.0
"""A file without an index is of a start that failed if it was not written for so long."""


class WeightsFile:
    """The file of one model with one type of weights."""

    def __init__(
        self, folder: Path, sources: Sequence[Path], kind: str, num_bytes: int, most_bytes: int
    ) -> None:
        """sources: files that the weights depend on. kind: what else they depend on, in words.
        num_bytes: expected size. most_bytes: of all files in the folder; those that were not used
        for the longest time are removed."""
        paths = [str(path.resolve()) for path in sources]
        name = hashlib.sha256(json.dumps([VERSION, kind, paths]).encode()).hexdigest()[:16]
        self._folder, self._index = folder, folder / f"{name}{INDEX}"
        self._sources = {path: _state(Path(path)) for path in paths}
        self._places: dict[str, Any] = {}
        self._data: Path | None = None
        self._out: BinaryIO | None = None
        self._in: BinaryIO | None = None
        """Open, because another start may remove the file."""
        if not self._open():
            self._begin(num_bytes, most_bytes)

    def get(self, key: str, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """The tensors of this key. Calls `make`, and keeps what it returns, if there are none."""
        if (found := self.found(key)) is not None:
            return found
        tensors = make()
        if self._out is None:
            return tensors
        try:
            self._places[key] = [self._written(tensor, self._out) for tensor in tensors]
            self._out.flush()
        except OSError as error:
            self._places.pop(key, None)
            self._give_up(error)
            return tensors
        return [self._mapped(*place) for place in self._places[key]]

    def found(self, key: str) -> list[torch.Tensor] | None:
        """The tensors of this key; None if the file has none."""
        if key not in self._places:
            return None
        return [self._mapped(*place) for place in self._places[key]]

    def finish(self) -> None:
        """No more tensors are got. A thread waits until the disk has them."""
        if self._in is not None:
            self._in.close()
        if self._out is not None:
            Thread(target=self._finish, name="smartspec-weights", daemon=True).start()

    def _open(self) -> bool:
        """Whether there is a file of the same sources."""
        document = _read(self._index)
        try:
            self._data = self._folder / document["data"]
            size = self._data.stat().st_size
            if (document["sources"], document["size"]) != (self._sources, size):
                return False
            self._in = self._data.open("rb")
        except (OSError, KeyError):
            return False
        with contextlib.suppress(OSError):  # a folder that cannot be written
            os.utime(self._index)
        self._places = document["places"]
        logger.info("converted weights are mapped from %s", self._data)
        return True

    def _begin(self, num_bytes: int, most_bytes: int) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if num_bytes <= most_bytes:  # else this model would remove all others in vain
                _tidy(self._folder, most_bytes - num_bytes, but=self._index)
            free = shutil.disk_usage(self._folder).free
            if num_bytes > min(most_bytes, MOST_FREE_SHARE * free):
                logger.info(
                    "converted weights are not kept: about %s, engine.weights_cache_bytes is %s, "
                    "and %s of the disk are free",
                    *map(size_text, (num_bytes, most_bytes, free)),
                )
                return
            number, path = tempfile.mkstemp(DATA, f"{self._index.stem}-", self._folder)
            self._data, self._out = Path(path), open(number, "wb")  # noqa: SIM115
            self._in = self._data.open("rb")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "converted weights cannot be kept in %s (%s): every start converts them again",
            self._folder,
            error.strerror,
        )
        if self._out is not None and self._data is not None:
            with contextlib.suppress(OSError):  # closing writes what is left
                self._out.close()
            self._data.unlink(missing_ok=True)  # what is mapped stays
        self._out = None

    def _written(self, tensor: torch.Tensor, out: BinaryIO) -> tuple[int, str, list[int]]:
        """Where the tensor is now: first byte, type and shape."""
        out.write(bytes(-out.tell() % ALIGNMENT))
        start, array = out.tell(), tensor.contiguous().numpy()
        out.write(array.data)
        return start, array.dtype.str, list(array.shape)

    def _mapped(self, start: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """ "c": without write access, PyTorch would warn. Nothing is written."""
        assert self._in is not None
        return torch.from_numpy(np.memmap(self._in, dtype, "c", start, tuple(shape)))

    def _finish(self) -> None:
        assert self._out is not None
        assert self._data is not None
        try:
            os.fsync(self._out.fileno())
            size = self._out.tell()
            self._out.close()
            document = {
                "data": self._data.name,
                "size": size,
                "sources": self._sources,
                "places": self._places,
            }
            before = _read(self._index).get("data")
            write_json(self._index, document)
            if before is not None:
                (self._folder / before).unlink(missing_ok=True)
        except OSError as error:
            self._give_up(error)
        else:
            text = "converted weights are kept in %s, %s"
            logger.info(text, self._data, size_text(size))


def _state(path: Path) -> list[int]:
    """What changes when the file does."""
    about = path.stat()
    return [about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns]


def _read(index: Path) -> dict[str, Any]:
    """The document of an index; empty if it cannot be read or is none."""
    try:
        document: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
        places = [place for tensors in document["places"].values() for place in tensors]
        kinds = [type(document[name]) for name in ("data", "size", "sources")]
        is_index = kinds == [str, int, dict] and all(
            list(map(type, place)) == [int, str, list] for place in places
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return document if is_index else {}


def _tidy(folder: Path, most_bytes: int, but: Path) -> None:
    """Remove files whose model has gone or changed, those of starts that failed, and then the ones
    that were not used for the longest time until at most so many bytes are left. but: an index of a
    model that is being loaded."""
    documents = {index: _read(index) for index in folder.glob(f"*{INDEX}")}
    valid = {index: document for index, document in documents.items() if _is_valid(document)}
    last_first = sorted(set(valid) - {but}, key=_written_s, reverse=True)
    kept = {but: valid[but]} if but in valid else {}
    for index in last_first:
        most_bytes -= valid[index]["size"]
        if most_bytes >= 0:
            kept[index] = valid[index]
    for index in set(documents) - set(kept):
        index.unlink(missing_ok=True)
    named = {document["data"] for document in kept.values()}
    known = {document.get("data") for document in documents.values()}
    for data in [*folder.glob(f"*{DATA}"), *folder.glob("*.partial")]:
        is_abandoned = time.time() - _written_s(data) > ABANDONED_S
        if data.name not in named and (data.name in known or is_abandoned):
            data.unlink(missing_ok=True)


def _written_s(path: Path) -> float:
    """When the file was written last; now if another start has removed it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _is_valid(document: dict[str, Any]) -> bool:
    """Whether it is complete and its model's files are still the same."""
    try:
        same = [_state(Path(path)) == state for path, state in document["sources"].items()]
        return all(same)
    except (OSError, KeyError):
        return False
