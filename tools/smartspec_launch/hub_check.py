"""Checks models of the hub before their weights are fetched: whether they can be served together,
and fit into disk and memory."""

from __future__ import annotations

import json
import math
import signal
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path, PurePosixPath

from smartspec_launch.hub import Repository, free_disk
from smartspec_launch.hub_files import gguf_of
from smartspec_py.config import IS_MODEL, LocalEngineConfig, ServerConfig
from smartspec_py.engines.checkpoints.adapter_config import read_adapter_settings
from smartspec_py.engines.checkpoints.checks import ModelError, dtype_of
from smartspec_py.engines.checkpoints.gguf.folder import INDEX, model_folder, write_folder
from smartspec_py.engines.phases import size_text
from smartspec_py.faults import ConfigError

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of a number in the files, by the dtype of config.json."""

MODEL_KEYS = ("model", "draft")

LEAST_BYTES = {"stored": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""Of a weight in memory, at least, by `engine.weights`. PyTorch keeps those of `auto` and `stored`
in `engine.dtype`."""

Repositories = Mapping[str, Repository]
Weights = Mapping[str, list[str]]
"""The files with weights. Both are by the keys of `engine`."""


def check_before_fetch(config: ServerConfig, repositories: Repositories, weights: Weights) -> str:
    """What will be fetched, and what it needs, in one line. Raises ConfigError."""
    names = " and ".join(dict.fromkeys(str(each.name) for each in repositories.values()))
    num_bytes = sum(
        each.num_bytes(each.missing(weights[key])) for key, each in repositories.items()
    )
    place, free = free_disk()
    size, room = size_text(num_bytes), size_text(free)
    if num_bytes > free:
        raise ConfigError(
            f"{names} needs {size} in {place}, where {room} are free: make room there, or set "
            "HF_HOME to another disk"
        )
    line = f"Fetching {size} to {place}, where {room} are free"
    if not isinstance(config.engine, LocalEngineConfig):
        return line
    with tempfile.TemporaryDirectory(prefix="smartspec-") as temporary:
        needed, free = _memory(config, repositories, weights, Path(temporary))
    memory = f"{size_text(needed)} of memory, of which {size_text(free)} are free"
    if needed > free:
        raise ConfigError(
            f"the weights of {names} take at least {memory}: use a smaller model, or --weights int4"
        )
    return f"{line}; weights take at least {memory}"


def _memory(
    config: ServerConfig, repositories: Repositories, weights: Weights, temporary: Path
) -> tuple[int, int]:
    """The least bytes of the weights in memory, and the bytes that are free."""
    folders = {
        key: model_folder(Path(path))
        for key, path in config.engine.paths(IS_MODEL).items()
        if key not in repositories
    }
    names: dict[str, str] = {}  # of the paths in messages
    try:
        for key, each in repositories.items():
            folders[key], starts = each.folder, []
            for file in gguf_of(weights[key]):
                starts.append(temporary / f"{key}.files" / PurePosixPath(file).name)
                names[str(starts[-1])] = str(each.name)
                starts[-1].parent.mkdir(exist_ok=True)
                each.write_start(file, starts[-1])
            if starts:
                folders[key] = temporary / key
                names[f"{key}.gguf"] = str(each.name)
                write_folder(starts[0], folders[key])
            names[str(folders[key])] = str(each.name)
        least, free = in_process(config, folders)
    except (ModelError, ConfigError) as error:
        text = str(error)
        for path, name in names.items():
            text = text.replace(path, name)
        raise ConfigError(text) from error
    counts = [
        _num_weights(folders[key], each.num_bytes(weights[key]))
        for key, each in repositories.items()
    ]
    return int(least * sum(counts)), free


def in_process(config: ServerConfig, folders: Mapping[str, Path]) -> tuple[float, int]:
    """`check_settings` in a process that ends: the launcher would keep 230 MB for PyTorch and
    Transformers as long as it serves."""
    ignored = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is this process's
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, ignored) as pool:
        try:
            return pool.submit(check_settings, config, folders).result()
        except KeyboardInterrupt:
            for child in active_children():  # the pool would wait for it
                child.kill()
            raise


def check_settings(config: ServerConfig, folders: Mapping[str, Path]) -> tuple[float, int]:
    """The checks that need no weights. folders: those with the settings, by key.

    Returns the least bytes of a weight in memory, and the free bytes of the device. Raises
    ModelError or ConfigError.
    """
    from smartspec_py.engines.checkpoints.checks import GPT_OSS
    from smartspec_py.engines.checkpoints.config import load_config
    from smartspec_py.engines.checkpoints.experts import has_experts
    from smartspec_py.engines.checkpoints.pair import check_pair_settings
    from smartspec_py.engines.drafts.assistant.model import is_assistant, read_assistant
    from smartspec_py.engines.drafts.eagle.head import is_eagle, read_config
    from smartspec_py.engines.local import devices
    from smartspec_py.engines.local.load import runtime_of
    from smartspec_py.engines.runtimes.machine import free_bytes
    from smartspec_py.engines.runtimes.runner import PYTORCH

    engine, limits = config.engine, config.limits
    assert isinstance(engine, LocalEngineConfig)
    device = devices.place(engine.device)
    check_pair_settings(folders["model"], folders.get("draft"), limits.max_context_len)
    if "heads" in folders:
        heads, target = folders["heads"], load_config(folders["model"], limits.context_len)
        if is_assistant(heads):
            read_assistant(heads, target)
        elif is_eagle(heads):
            read_config(heads, target)
    for key, folder in folders.items():
        if key.startswith("lora."):
            read_adapter_settings(folder)
    weights, models = engine.weights, [folders[key] for key in MODEL_KEYS if key in folders]
    runtimes = {runtime_of(each, device, engine, limits.context_len) for each in models}
    if runtimes == {PYTORCH} and weights in ("auto", "stored"):
        dtype = devices.dtype_of(engine.dtype, device, folders["model"])
        return dtype.itemsize, free_bytes(device)
    if weights == "auto":
        configs = [load_config(each, limits.context_len) for each in models]
        # Experts may keep 4 bits of the file, but MXFP4 gets 8.
        may_keep = (each for each in configs if each.model_type != GPT_OSS)
        weights = "int4" if any(map(has_experts, may_keep)) else "int8"
    return LEAST_BYTES[weights], free_bytes(device)


def _num_weights(folder: Path, num_bytes: int) -> int:
    """Weights in files of so many bytes, with their settings in the folder. Of a quantised
    checkpoint there are at least so many."""
    if (folder / INDEX).is_file():
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["tensors"].values()
        return sum(math.prod(place["shape"]) for place in places)
    path = folder / "config.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return num_bytes // BYTES.get(dtype_of(document), 4)
