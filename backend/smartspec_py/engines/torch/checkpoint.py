"""Checks from the files alone, before weights are loaded, whether a model can be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which Transformers looks for them; the index of shards has the same name."""


class PairError(ValueError):
    """The target, the draft model or their combination cannot be served. The message is one
    sentence that says why and what to do."""


def check_files(name: str, folder: Path) -> None:
    """Raise PairError unless the directory has a configuration and complete weights."""
    if not folder.is_dir():
        raise PairError(f"{name} is not a directory: give a local Hugging Face model directory")
    if read_json(name, folder, "config.json") is None:
        raise PairError(f"{name} has no config.json: give a local Hugging Face model directory")
    files = _weight_files(name, folder)
    if not files:
        raise PairError(
            f"{name} has no weights (*.safetensors or *.bin): copy model.safetensors or "
            "pytorch_model.bin there, or the shards of either with their index"
        )
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise PairError(
            f"{name} lacks {len(missing)} of its {len(files)} weight files, such as "
            f"{missing[0]}: complete the download"
        )
    for file in files:
        _check_length(name, folder / file)


def _weight_files(name: str, folder: Path) -> list[str]:
    """Names of the weight files; they may be missing."""
    for single in WEIGHTS:
        index = read_json(name, folder, f"{single}.index.json")
        if index is not None:
            shards = index.get("weight_map")
            if not isinstance(shards, dict):
                raise PairError(f"{name} has a {single}.index.json without weight_map: replace it")
            return sorted(set(shards.values()))
        if (folder / single).is_file():
            return [single]
    return []


def _check_length(name: str, path: Path) -> None:
    """Check the length of a safetensors file against its header. *.bin files are not checked."""
    from safetensors import SafetensorError, safe_open

    if path.suffix != ".safetensors":
        return
    try:
        with safe_open(path, "np"):
            pass
    except (SafetensorError, OSError) as error:
        raise PairError(
            f"{name} has a truncated or damaged {path.name} ({error}): copy it again"
        ) from error


def check_config(name: str, folder: Path) -> None:
    """Raise PairError if config.json requires code that is not installed: custom code of the model,
    or the code of a quantization method."""
    document = read_json(name, folder, "config.json") or {}
    _check_code(name, document)
    _check_quantization(name, document.get("quantization_config"))


def _check_code(name: str, document: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not document.get("auto_map"):
        return
    classes = document.get("architectures") or []
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    is_known = not classes or not known.isdisjoint(classes)
    if document.get("model_type") not in CONFIG_MAPPING or not is_known:
        raise PairError(
            f"{name} needs custom code (auto_map in its config.json), which this server never "
            "runs: use a model type that is part of Transformers"
        )


def _check_quantization(name: str, quantization: Any) -> None:
    if not quantization:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        if not AutoHfQuantizer.supports_quant_method(quantization):  # type: ignore[no-untyped-call]
            raise ValueError("Transformers does not have this quant_method")
        AutoHfQuantizer.from_config(quantization, pre_quantized=True).validate_environment(
            device_map=None, weights_only=True
        )
    except Exception as error:  # each method raises its own types: no package, no GPU and so on
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise PairError(
            f"{name} is quantized (quantization_config in its config.json, quant_method {method}), "
            f"and cannot be loaded here ({_first_line(error)}): give an unquantized checkpoint"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def read_json(name: str, folder: Path, file: str) -> dict[str, Any] | None:
    """The parsed file; None if it does not exist. Raises PairError."""
    try:
        document = json.loads((folder / file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PairError(f"{name} has an unreadable {file} ({error}): replace it") from error
    if not isinstance(document, dict):
        raise PairError(f"{name} has a {file} that is not a JSON object: replace it")
    return document
