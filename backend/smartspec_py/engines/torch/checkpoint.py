"""Checks from the files alone, before weights are loaded, whether a model can be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which Transformers looks for them; the index of shards has the same name."""

MODELS = {
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "biogpt": "BioGptForCausalLM",
    "cohere": "CohereForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
"""The `model_type` and class of the models that the PyTorch engine computes right:
tests/engines/test_model_types.py compares each with Transformers. Other models may pass positions
or masks to attention in other ways, and would be served with wrong texts."""

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend only on the position. With others, such as longrope
and dynamic, Transformers chooses the angles of a whole pass by its longest request, so a text would
depend on the other requests."""


class ModelError(ValueError):
    """This engine cannot serve the model, or not with the other one. The message is one sentence
    that says why and what to do."""


def check_files(name: str, folder: Path) -> None:
    """Raise ModelError unless the directory has a configuration and complete weights."""
    if not folder.is_dir():
        raise ModelError(f"{name} is not a directory: give a local Hugging Face model directory")
    check_model(name, folder)
    files = _weight_files(name, folder)
    if not files:
        raise ModelError(
            f"{name} has no weights (*.safetensors or *.bin): copy model.safetensors or "
            "pytorch_model.bin there, or the shards of either with their index"
        )
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ModelError(
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
                raise ModelError(f"{name} has a {single}.index.json without weight_map: replace it")
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
        raise ModelError(
            f"{name} has a truncated or damaged {path.name} ({error}): copy it again"
        ) from error


def check_model(name: str, folder: Path) -> None:
    """Raise ModelError if config.json describes a model that this engine cannot serve."""
    document = read_json(name, folder, "config.json")
    if document is None:
        raise ModelError(f"{name} has no config.json: give a local Hugging Face model directory")
    kind, classes = document.get("model_type"), document.get("architectures") or []
    if kind not in MODELS or (classes and MODELS[kind] not in classes):
        raise ModelError(
            f"{name} has the model_type {kind} and the class {', '.join(classes) or 'not given'}, "
            "which the PyTorch engine does not serve: use a causal language model of one of these "
            f"types: {', '.join(MODELS)}"
        )
    for field in ("rope_scaling", "rope_parameters"):
        for rotation in _rotations(document.get(field)):
            if rotation not in ROTATIONS:
                raise ModelError(
                    f"{name} has a rotary embedding of the type {rotation} ({field} in its "
                    f"config.json), which is not supported: use a model with one of these types: "
                    f"{', '.join(ROTATIONS)}"
                )


def _rotations(settings: Any) -> list[Any]:
    """The types in the settings, which can differ by the type of layer."""
    if not isinstance(settings, dict):
        return []
    parts = [one for one in settings.values() if isinstance(one, dict)]
    return [one.get("rope_type", one.get("type", "default")) for one in parts or [settings]]


def check_quantization(name: str, folder: Path) -> None:
    """Raise ModelError if the code of the checkpoint's quantization method is not installed."""
    quantization = (read_json(name, folder, "config.json") or {}).get("quantization_config")
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
        raise ModelError(
            f"{name} is quantized (quantization_config in its config.json, quant_method {method}), "
            f"and cannot be loaded here ({first_line(error)}): give an unquantized checkpoint"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of the message; the type of the error if there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def read_json(name: str, folder: Path, file: str) -> dict[str, Any] | None:
    """The parsed file; None if it does not exist. Raises ModelError."""
    try:
        document = json.loads((folder / file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} has an unreadable {file} ({error}): replace it") from error
    if not isinstance(document, dict):
        raise ModelError(f"{name} has a {file} that is not a JSON object: replace it")
    return document
