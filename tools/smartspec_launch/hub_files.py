"""Which files of a hub repository are served: names in, names out.

Those that the server reads from a local directory, in the same order of preference. So pickles
(`pytorch_model.bin`) are fetched only if there are no safetensors, and code never.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from smartspec_launch.hub import HubName, Repository
from smartspec_py.engines.checkpoints.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from smartspec_py.engines.checkpoints.checks import (
    HEAD_FILES,
    WEIGHTS,
    ModelError,
    weight_files,
)
from smartspec_py.engines.checkpoints.gguf.header import base_name, part_files

SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
TEMPLATES = re.compile(r"additional_chat_templates/[\w-]+\.jinja")

QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|B?F16|FP16|F(?:P)?32))(?=[-.]|$)", re.I
)
"""In the name of a GGUF file, as llama.cpp's tools write it."""

USUAL = "Q4_K_M"
"""The quantisation if the name has none, and the repository has several."""

NO_TEXT_MODEL = ("mmproj", "imatrix")
"""Files of these names have images' part of a model, or statistics."""


def settings_files(key: str, files: Collection[str]) -> list[str]:
    """The small files for this key of `engine`: all but the weights."""
    part = key.partition(".")[0]
    if part == "lora":
        return [CONFIG_FILE] if CONFIG_FILE in files else []
    if part == "heads":
        return ["config.json"] if "config.json" in files else []
    found = [file for file in files if file in SETTINGS or TEMPLATES.fullmatch(file)]
    weights = next((name for name in WEIGHTS if {name, f"{name}.index.json"} & set(files)), "")
    if part != "tokenizer" and weights not in files and f"{weights}.index.json" in files:
        found.append(f"{weights}.index.json")
    return found


def weights_files(key: str, repository: Repository) -> list[str]:
    """The files with the weights for this key of `engine`; the index of shards has been fetched.
    Raises ModelError if the repository has none that can be read."""
    name, files, part = repository.name, repository.sizes, key.partition(".")[0]
    if part == "tokenizer":
        return []
    singles = {"lora": (WEIGHTS_FILE,), "heads": HEAD_FILES}.get(part, WEIGHTS)
    is_model = part not in ("lora", "heads")
    if not (is_model and name.file):
        for single in singles:
            if single in files:
                return [single]
            if is_model and f"{single}.index.json" in files:
                return _shards(name, files, repository.folder)
    if is_model and (name.file or any(file.endswith(".gguf") for file in files)):
        return gguf_files(name, files)
    raise ModelError(
        f"{name} has none of the files {', '.join(singles)}"
        f"{' and no GGUF file' if is_model else ''}: use another repository"
    )


def _shards(name: HubName, files: Collection[str], folder: Path) -> list[str]:
    shards = weight_files(str(name), folder)
    if missing := [file for file in shards if file not in files]:
        raise ModelError(f"{name} lacks {missing[0]}, which its index names: use another revision")
    return shards


def gguf_of(files: Collection[str]) -> list[str]:
    """The GGUF file of `weights_files`, or its parts; empty if the weights are in other files."""
    return [file for file in files if file.endswith(".gguf")]


def gguf_files(name: HubName, files: Collection[str]) -> list[str]:
    """The GGUF file that the name means, or its parts. Raises ModelError unless there is one."""
    known = [
        file
        for file in sorted(files)
        if file.endswith(".gguf") and not any(word in file.lower() for word in NO_TEXT_MODEL)
    ]
    if not known:
        raise ModelError(f"{name} has no GGUF file: leave out :{name.file}, or use another one")
    found = known
    if name.file or len(_models(known)) > 1:
        wanted = (name.file or USUAL).upper()
        exact = [
            file
            for file in known
            if wanted in (PurePosixPath(file).name.upper(), f"{_base(file)}.GGUF".upper())
        ]
        found = exact or [file for file in known if _quantization(file) == wanted]
    models = _models(found)
    if len(models) != 1:
        names = sorted({_quantization(file) or PurePosixPath(file).name for file in known})
        if len(models) > 1 and name.file:  # of one quantisation
            names = sorted(PurePosixPath(file).name for file in models)
        raise ModelError(
            f"{name} names {len(models)} GGUF files: write {name.repository}:QUANTISATION with one "
            f"of {', '.join(names)}"
        )
    parts = [str(part) for part in part_files(PurePosixPath(models.pop()))]
    if missing := [part for part in parts if part not in files]:
        raise ModelError(f"{name} lacks {missing[0]}: choose another quantisation")
    return parts


def _models(files: Iterable[str]) -> set[str]:
    """The first parts of these files."""
    return {str(part_files(PurePosixPath(file))[0]) for file in files}


def _quantization(file: str) -> str:
    found = QUANTIZATION.findall(_base(file))
    return found[-1].upper() if found else ""


def _base(file: str) -> str:
    return base_name(PurePosixPath(file))
