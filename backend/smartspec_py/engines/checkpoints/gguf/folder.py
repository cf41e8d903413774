"""Makes a Hugging Face folder of a GGUF file, once, in the user's cache directory.

The folder has the configuration and the tokenizer in the usual files, and INDEX instead of weights:
where the GGUF file or its parts are, and where in them each parameter of the model is. So only
`weights` knows that the weights are in a GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from smartspec_py.cache_dir import cache_dir
from smartspec_py.engines.checkpoints.gguf.config import MODELS, read_config
from smartspec_py.engines.checkpoints.gguf.fields import Fields
from smartspec_py.engines.checkpoints.gguf.gemma4 import GEMMA_4
from smartspec_py.engines.checkpoints.gguf.header import base_name, part_files, read_headers
from smartspec_py.engines.checkpoints.gguf.places import read_places
from smartspec_py.engines.checkpoints.gguf.tokenizer import (
    Vocabulary,
    end_token_ids,
    make_tokenizer,
    token_settings,
)
from smartspec_py.faults import ConfigError, cut

INDEX = "gguf.json"

VERSION = 6
"""Of this conversion. Folders that another version made are not used."""


def model_folder(path: Path) -> Path:
    """The model directory of this path: the path itself, or the folder that is made of it if it is
    a GGUF file, or a directory with one GGUF file and no other weights. A part of a file stands for
    all of its parts. Raises ConfigError."""
    file = _gguf_file(path)
    if file is None:
        return path
    parent = _parent(part_files(file))
    folder = parent / base_name(file)
    if not (folder / INDEX).is_file():
        documents = _documents(file)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=parent) as beside:
                made = Path(beside) / folder.name
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


def _parent(files: Sequence[Path]) -> Path:
    """Where the folder of a file or of its parts is, as they are now."""
    key = str(VERSION)
    for file in filter(Path.is_file, files):
        about = file.stat()
        key += f":{file.resolve()}:{about.st_size}:{about.st_mtime_ns}"
    return cache_dir() / "gguf" / hashlib.sha256(key.encode()).hexdigest()[:16]


def _tidy(parents: Path) -> None:
    """Remove the folders whose files have gone or changed."""
    for index in parents.glob(f"*/*/{INDEX}"):
        try:
            files = json.loads(index.read_text(encoding="utf-8")).get("files", [])
        except (OSError, ValueError):
            continue  # another process may be removing it
        if _parent(list(map(Path, files))) != index.parents[1]:
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
        files = sorted({part_files(file)[0] for file in path.glob("*.gguf")})
        if len(files) > 1:
            raise ConfigError(f"{path} has {len(files)} GGUF files: give the path of one of them")
        return files[0] if files else None
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return part_files(path)[0] if file.read(4) == b"GGUF" else None


def _documents(file: Path) -> dict[str, str]:
    """Contents of the folder's files by their names. Raises ConfigError."""
    files = part_files(file)
    values, tensors = read_headers(files)
    fields = Fields(file, values)
    architecture = fields.text("general.architecture")
    if architecture not in MODELS:
        raise ConfigError(
            f"{file} has the architecture {cut(architecture)}, which cannot be read: use one of "
            f"{', '.join(MODELS)}"
        )
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
    if config["model_type"] == GEMMA_4:
        config["vocab_size_per_layer_input"] = num_tokens
    # Not links to them, which may go: the key of the folder has the files themselves too.
    index = {
        "files": [str(part.resolve()) for part in files],
        "size": sum(part.stat().st_size for part in files),
        "tensors": places,
    }
    return {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(ends),
        "tokenizer.json": make_tokenizer(fields, vocabulary),
        "tokenizer_config.json": json.dumps(token_settings(fields, vocabulary)),
        INDEX: json.dumps(index),
    }
