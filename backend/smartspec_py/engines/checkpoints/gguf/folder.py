"""Makes a Hugging Face folder of a GGUF file, once, in the user's cache directory.

The folder has the configuration and the tokenizer in the usual files, and INDEX instead of weights:
where the GGUF file is, and where in it each parameter of the model is. So only `weights` knows
that the weights are in a GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from smartspec_py.cache_dir import cache_dir
from smartspec_py.engines.checkpoints.gguf.config import MODELS, read_config, read_places
from smartspec_py.engines.checkpoints.gguf.fields import Fields
from smartspec_py.engines.checkpoints.gguf.header import read_header
from smartspec_py.engines.checkpoints.gguf.tokenizer import (
    Vocabulary,
    end_token_ids,
    make_tokenizer,
    token_settings,
)
from smartspec_py.faults import ConfigError

INDEX = "gguf.json"

VERSION = 3
"""Of this conversion. Folders that another version made are not used."""


def model_folder(path: Path) -> Path:
    """The model directory of this path: the path itself, or the folder that is made of it if it is
    a GGUF file, or a directory with one GGUF file and no other weights. Raises ConfigError."""
    file = _gguf_file(path)
    if file is None:
        return path
    parent = _parent(file)
    folder = parent / file.stem
    if not (folder / INDEX).is_file():
        documents = _documents(file)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=parent) as beside:
                made = Path(beside) / file.stem
                made.mkdir()
                _write(documents, made)
                os.replace(made, folder)
            _tidy(parent.parent)
        except OSError as error:
            if not (folder / INDEX).is_file():  # no other process made it meanwhile
                raise ConfigError(
                    f"{parent} cannot be written ({error.strerror}), and {file} needs files there: "
                    "set XDG_CACHE_HOME to a writable directory"
                ) from error
    return folder


def _parent(file: Path) -> Path:
    """Where the folder of the file is, as the file is now."""
    about = file.stat()
    key = f"{VERSION}:{file.resolve()}:{about.st_size}:{about.st_mtime_ns}"
    return cache_dir() / "gguf" / hashlib.sha256(key.encode()).hexdigest()[:16]


def _tidy(parents: Path) -> None:
    """Remove the folders whose file has gone or changed."""
    for index in parents.glob(f"*/*/{INDEX}"):
        try:
            file = Path(json.loads(index.read_text(encoding="utf-8"))["file"])
            is_same = file.is_file() and _parent(file) == index.parents[1]
        except (OSError, ValueError, KeyError):
            continue  # another process may be making or removing it
        if not is_same:
            shutil.rmtree(index.parents[1], ignore_errors=True)


def write_folder(file: Path, folder: Path) -> None:
    """Make the folder of a GGUF file, of which only the header is read. Raises ConfigError."""
    documents = _documents(file)
    folder.mkdir()
    _write(documents, folder)


def _write(documents: Mapping[str, str], folder: Path) -> None:
    for name, text in documents.items():
        (folder / name).write_text(text, encoding="utf-8")


def _gguf_file(path: Path) -> Path | None:
    if path.is_dir() and not any(
        file.name == INDEX or file.suffix in (".safetensors", ".bin") for file in path.iterdir()
    ):
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise ConfigError(f"{path} has {len(files)} GGUF files: give the path of one of them")
        return files[0] if files else None
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path if file.read(4) == b"GGUF" else None


def _documents(file: Path) -> dict[str, str]:
    """Contents of the folder's files by their names. Raises ConfigError."""
    values, tensors = read_header(file)
    fields = Fields(file, values)
    architecture = fields.text("general.architecture")
    if architecture not in MODELS:
        raise ConfigError(
            f"{file} has the architecture {architecture}, which cannot be read: use one of "
            f"{', '.join(MODELS)}"
        )
    num_parts = fields.integer("split.count", 1, least=0)
    if num_parts > 1:
        raise ConfigError(f"{file} is one of {num_parts} parts: join them with llama-gguf-split")
    fields.only("general.quantization_version", 2)
    config = read_config(fields, architecture, tensors)
    vocabulary = Vocabulary(fields)
    num_tokens = len(vocabulary.tokens)
    places = read_places(fields, config, num_tokens, tensors)
    ends = {"eos_token_id": end_token_ids(fields, vocabulary)}
    config |= ends | {
        "vocab_size": num_tokens,
        "bos_token_id": vocabulary.special(fields, "bos"),
        "pad_token_id": vocabulary.special(fields, "padding"),
    }
    # Not a link to it, which may go: the key of the folder has the file itself too.
    index = {"file": str(file.resolve()), "size": file.stat().st_size, "tensors": places}
    return {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(ends),
        "tokenizer.json": make_tokenizer(fields, vocabulary),
        "tokenizer_config.json": json.dumps(token_settings(fields, vocabulary)),
        INDEX: json.dumps(index),
    }
