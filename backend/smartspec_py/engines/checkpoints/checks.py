"""Checks from the files alone, before weights are loaded, whether a model can be loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from smartspec_py.engines.checkpoints.gguf.folder import INDEX
from smartspec_py.faults import cut, shown

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which Transformers looks for them; the index of shards has the same name. Other
files, such as consolidated.safetensors, are not read."""

HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *WEIGHTS)
_HEADS = "give the directory of an EAGLE-3 head, of Medusa heads or of an assistant of Gemma 4"

MODELS = {
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "biogpt": "BioGptForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
"""The `model_type` and class of the models that the local engine computes right:
tests/engines/test_model_types.py compares each with Transformers. Other models may pass positions
or masks to attention in other ways, and would be served with wrong texts."""

RECURRENT = ("qwen3_5_moe_text", "qwen3_5_text")
"""Those of MODELS with gated delta nets, layers that have a recurrent state."""

LFM2 = ("lfm2", "lfm2_moe")
"""Those with layers that only convolve."""

GPT_OSS = "gpt_oss"
"""The one whose heads give a part of their attention to no key."""

GEMMA_4 = ("gemma4_text", "gemma4_unified_text")
"""Those of MODELS whose layers may have keys of other sizes, or those of earlier layers."""

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Types of models that draft for these, see `drafts.assistant`."""

GRANITE_MOE, GRANITE_4 = "granitemoe", "granitemoehybrid"
"""Granite with experts, and Granite 4, whose layers may also have states of Mamba 2. One of the
second type that has neither is served as `granite`: see `config.text_config` and `tensors`."""

OPENVINO_ONLY = (*RECURRENT, *LFM2, GPT_OSS, *GEMMA_4, GRANITE_4)
"""Those of MODELS that PyTorch does not compute."""

WITH_IMAGES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
"""The same of models that read images or audio, too. Their language model, which config.json
describes as text_config, is served alone."""

ATTENTION = ("attention", "full_attention")
"""In `layer_types` of Granite 4."""

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend only on the position. With others, such as dynamic,
Transformers chooses the angles of a whole pass by its longest request, so a text would depend on
the other requests."""

DTYPES = (None, "float32", "bfloat16", "float16", "float64")
"""Types of a checkpoint. Texts are computed in `dtype` of engine.json."""

SERVED_ROTATIONS = (*ROTATIONS, "longrope", "proportional")
"""See `rope.fix_longrope`. The last is that of Gemma 4."""


QUANTIZATIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "gptq": {
        "bits": (4, 8),
        "checkpoint_format": (None, "gptq", "gptq_v2"),
        "format": (None, "gptq", "gptq_v2"),
        "is_marlin_format": (None, False),
        "rotation": (None,),
    },
    "awq": {"bits": (4,), "version": (None, "gemm"), "zero_point": (None, True)},
    "compressed-tensors": {
        "format": ("pack-quantized", "int-quantized", "float-quantized"),
        "sparsity_config": (None, {}, {"format": "dense"}),
        "transform_config": (None, {}),
    },
    "fp8": {"fmt": (None, "e4m3", "e5m2")},
    "mxfp4": {},
}
"""Values of quantization_config that `quantized` reads, by its quant_method."""

QUANTIZED_GROUP = {"format": (None, *QUANTIZATIONS["compressed-tensors"]["format"])}
"""The same of each of its config_groups."""

QUANTIZED_WEIGHTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "int": {"num_bits": (4, 8), "strategy": ("tensor", "channel", "group")},
    "float": {"num_bits": (8,), "strategy": ("tensor", "channel", "block")},
}
"""The same of the weights of each group, by their type."""


LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""What Git writes in place of a large file if Git LFS does not fetch it."""


class ModelError(ValueError):
    """This engine cannot serve the model, or not with the other one. The message is one sentence
    that says why and what to do."""


def check_files(name: str, folder: Path) -> None:
    """Raise ModelError unless the directory has a configuration and complete weights."""
    check_pointers(name, folder)
    if not folder.is_dir():
        problem = "is a file, but not a GGUF file" if folder.exists() else "does not exist"
        raise ModelError(
            f"{name} {problem}: give a local Hugging Face model directory, a GGUF file, or a name "
            "of the hub, OWNER/NAME"
        )
    check_model(name, folder)
    if (index := read_json(name, folder, INDEX)) is not None:
        sources = [Path(str(file)) for file in index.get("files") or [None]]
        are_there = all(file.is_file() for file in sources)
        if not are_there or sum(file.stat().st_size for file in sources) != index.get("size"):
            raise ModelError(f"{name} was made of {sources[0]}, which has changed: give its path")
        return
    files = weight_files(name, folder)
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


def check_pointers(name: str, path: Path) -> None:
    """Raise ModelError if the file, or one in the directory, is a pointer of Git LFS."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        is_small = file.is_file() and file.stat().st_size < 1024
        if is_small and file.read_bytes().startswith(LFS_POINTER):
            raise ModelError(
                f"{name}: {file.name} is a Git LFS pointer, not the file itself: run `git lfs "
                f"pull` in {file.parent}"
            )


def weight_files(name: str, folder: Path) -> list[str]:
    """Names of the weight files; they may be missing."""
    for single in WEIGHTS:
        if (folder / single).is_file():
            return [single]
        index = read_json(name, folder, f"{single}.index.json")
        if index is not None:
            shards = index.get("weight_map")
            if not isinstance(shards, dict):
                raise ModelError(f"{name} has a {single}.index.json without weight_map: replace it")
            for tensor, file in shards.items():
                if not isinstance(file, str) or Path(file).name != file:
                    raise ModelError(
                        f"{name} has the file {shown(file)} for {cut(tensor)} in its "
                        f"{single}.index.json, which must be the name of a file beside it: "
                        "replace it"
                    )
            return sorted(set(shards.values()))
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
    classes = document.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise wrong_field(name, "architectures", classes, "a list of texts")
    for field in ("dtype", "torch_dtype"):
        if (dtype := document.get(field)) not in DTYPES:
            raise wrong_field(name, field, dtype, f"one of {', '.join(map(str, DTYPES[1:]))}")
    is_medusa = any(key.startswith("medusa_") for key in document)
    if is_eagle(document) or is_medusa or document.get("model_type") in ASSISTANTS:
        raise ModelError(
            f"{name} is a head and not a model: give it as --heads or engine.heads, and the model "
            "that it was trained for as the target"
        )
    kind, known = document.get("model_type"), MODELS | WITH_IMAGES
    if not isinstance(kind, str) or kind not in known or (classes and known[kind] not in classes):
        raise ModelError(
            f"{name} has the model_type {cut(kind)} and the class "
            f"{cut(', '.join(classes)) or 'not given'}, which the local engine does not serve: use "
            f"a causal language model of one of these types: {', '.join(known)}"
        )
    settings = document
    if kind in WITH_IMAGES:
        settings = _dict(document.get("text_config"))
        text_kind = settings.get("model_type")
        if not isinstance(text_kind, str) or text_kind not in MODELS:
            raise wrong_field(
                name, "text_config.model_type", text_kind, f"one of {', '.join(MODELS)}"
            )
    for field in ("rope_scaling", "rope_parameters"):
        for rotation in _rotations(settings.get(field)):
            if rotation not in SERVED_ROTATIONS:
                raise ModelError(
                    f"{name} has a rotary embedding of the type {cut(rotation)} ({field} in its "
                    f"config.json), which is not supported: use a model with one of these types: "
                    f"{', '.join(SERVED_ROTATIONS)}"
                )


def wrong_field(
    name: str, field: str, value: Any, rule: str, advice: str = "replace it"
) -> ModelError:
    """The error for a value in config.json. rule: what it must be."""
    return ModelError(
        f"{name} has the {field} {shown(value)} in its config.json, which must be {rule}: {advice}"
    )


def is_eagle(document: Mapping[str, Any]) -> bool:
    """Whether this config.json describes an EAGLE or speculators head."""
    classes = document.get("architectures")
    names = [document.get("speculators_model_type", "")]
    names += classes if isinstance(classes, list) else []
    return "draft_vocab_size" in document or any("eagle" in str(name).lower() for name in names)


def check_heads(folder: Path) -> None:
    """Raise ModelError unless the directory has a file with heads."""
    check_pointers(f"the directory of heads {folder}", folder)
    if not folder.is_dir():
        problem = "is not a directory" if folder.exists() else "does not exist"
        raise ModelError(f"the directory of heads {folder} {problem}: {_HEADS}")
    if not any((folder / file).is_file() for file in HEAD_FILES):
        raise ModelError(
            f"the directory of heads {folder} has none of {', '.join(HEAD_FILES)}: {_HEADS}"
        )


def _rotations(settings: Any) -> list[Any]:
    parts = settings_of_rotations(settings)
    return [part.get("rope_type", part.get("type", "default")) for part in parts]


def settings_of_rotations(settings: Any) -> list[Mapping[str, Any]]:
    """They can differ by the type of layer."""
    if not isinstance(settings, dict):
        return []
    return [part for part in settings.values() if isinstance(part, dict)] or [settings]


def check_quantization(name: str, folder: Path) -> None:
    """Raise ModelError if `quantized` cannot read how the checkpoint is quantised."""
    settings = quantization(name, folder)
    if not settings:
        return
    settings = _dict(settings)
    if _dict(settings.get("sparsity_config")).get("format") == "dense":  # its others describe it
        settings = {**settings, "sparsity_config": None}
    _check_settings(name, settings, {"quant_method": tuple(QUANTIZATIONS)})
    method = str(settings["quant_method"]).lower()
    _check_settings(name, settings, QUANTIZATIONS[method])
    if method == "gptq" and settings.get("checkpoint_format"):
        _check_settings(name, settings, {"format": (None, settings["checkpoint_format"].lower())})
    _check_block(name, "weight_block_size", settings)
    if method != "compressed-tensors":
        return
    groups = settings.get("config_groups")
    if groups is not None and not isinstance(groups, dict):
        raise wrong_field(name, "config_groups", groups, "an object")
    for group in _dict(groups).values():
        _check_settings(name, _dict(group), QUANTIZED_GROUP)
        weights = _dict(_dict(group).get("weights"))
        wanted = QUANTIZED_WEIGHTS["float" if weights.get("type") == "float" else "int"]
        _check_settings(name, weights, wanted | {"type": tuple(QUANTIZED_WEIGHTS)})
        _check_block(name, "block_structure", weights)


def _check_block(name: str, field: str, settings: Mapping[str, Any]) -> None:
    """Raise ModelError unless the field has the rows and columns of a block, or is missing."""
    block = settings.get(field)
    is_block = isinstance(block, list) and len(block) == 2
    if block is not None and not (is_block and all(type(n) is int and n > 0 for n in block)):
        raise wrong_field(name, field, block, "two whole numbers above 0")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _check_settings(
    name: str, settings: dict[str, Any], wanted: dict[str, tuple[Any, ...]]
) -> None:
    for field, values in wanted.items():
        value = settings.get(field)
        value = value.lower() if isinstance(value, str) else value
        if value not in values:
            known = ", ".join(str(value) for value in values if value)
            raise ModelError(
                f"{name} is quantised with the {field} {cut(value)} (quantization_config in its "
                f"config.json), which cannot be read: use {known or 'none'}, or another checkpoint"
            )


def dtype_of(document: Mapping[str, Any]) -> str:
    """The precision of a checkpoint by its config.json; of one with images, that of its text."""
    for part in (document, _dict(document.get("text_config"))):
        if name := part.get("dtype") or part.get("torch_dtype"):
            return str(name)
    return "float32"


def model_type(name: str, folder: Path) -> Any:
    """That of config.json; None if there is none. Raises ModelError."""
    return (read_json(name, folder, "config.json") or {}).get("model_type")


def has_other_names(name: str, folder: Path) -> bool:
    """Whether the files have other tensors than the model that is served. Raises ModelError."""
    return model_type(name, folder) in (*WITH_IMAGES, GRANITE_4)


def is_plain_granite(document: Mapping[str, Any]) -> bool:
    """Whether a Granite 4 has neither experts nor states, and rotates. document: of config.json."""
    return (
        set(document.get("layer_types") or [None]) <= {*ATTENTION}
        and document.get("num_local_experts") == 0
        and document.get("position_embedding_type") == "rope"
    )


def quantization(name: str, folder: Path) -> Any:
    """quantization_config of config.json; None if there is none. Raises ModelError."""
    return (read_json(name, folder, "config.json") or {}).get("quantization_config")


def first_line(error: Exception) -> str:
    """The first line of the message; the type of the error if there is no message."""
    if isinstance(error, UnpicklingError):  # PyTorch advises to run the file's code
        return "it has more than tensors, or is damaged"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def read_json(name: str, folder: Path, file: str) -> dict[str, Any] | None:
    """The parsed file; None if it does not exist. Raises ModelError."""
    try:
        document = json.loads((folder / file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{name} has an unreadable {file} ({error}): replace it") from error
    if not isinstance(document, dict):
        raise ModelError(f"{name} has a {file} that is not a JSON object: replace it")
    return document
