"""For each quantization: the tool that makes the checkpoint, its flags and the supported models.

The source is the READMEs of examples/models/core/llama, .../qwen and examples/quantization of
TensorRT-LLM. convert_checkpoint.py uses the weights only, except for smoothquant and an int8 cache.
quantize.py calibrates on texts. It needs a GPU, usually with memory for the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from smartspec_py.engines.trtllm.engine_config import Role
from smartspec_trtllm.build_models import BuildError, HfModel


class Quantization(StrEnum):
    """Of weights and, after the `a`, of activations."""

    NONE = "none"
    FP8 = "fp8"
    INT8_WO = "int8_wo"
    INT4_WO = "int4_wo"
    INT4_AWQ = "int4_awq"
    W4A8_AWQ = "w4a8_awq"
    GPTQ = "gptq"
    SMOOTHQUANT = "smoothquant"
    NVFP4 = "nvfp4"


class KvCacheDtype(StrEnum):
    """Precision of the KV cache. auto: the precision of the activations."""

    AUTO = "auto"
    FP8 = "fp8"
    INT8 = "int8"


class Tool(StrEnum):
    """The script that makes a checkpoint."""

    CONVERT = "convert"
    QUANTIZE = "quantize"


@dataclass(frozen=True)
class Recipe:
    """kv_cache: supported cache precisions besides auto. families: models with documented support.
    group_size: weights that share a scale; each rank must hold whole groups."""

    tool: Tool
    flags: tuple[str, ...]
    kv_cache: frozenset[KvCacheDtype]
    families: frozenset[str] = frozenset({"llama", "qwen"})
    group_size: int | None = None


_INT8 = frozenset({KvCacheDtype.INT8})
_FP8 = frozenset({KvCacheDtype.FP8})
_AWQ_FLAGS = ("--awq_block_size", "128", "--calib_size", "32")

RECIPES = {
    Quantization.NONE: Recipe(Tool.CONVERT, (), _INT8 | _FP8),
    Quantization.FP8: Recipe(Tool.QUANTIZE, ("--qformat", "fp8", "--calib_size", "512"), _FP8),
    Quantization.INT8_WO: Recipe(
        Tool.CONVERT, ("--use_weight_only", "--weight_only_precision", "int8"), _INT8
    ),
    Quantization.INT4_WO: Recipe(
        Tool.CONVERT, ("--use_weight_only", "--weight_only_precision", "int4"), _INT8
    ),
    Quantization.INT4_AWQ: Recipe(
        Tool.QUANTIZE, ("--qformat", "int4_awq", *_AWQ_FLAGS), _INT8 | _FP8, group_size=128
    ),
    Quantization.W4A8_AWQ: Recipe(
        Tool.QUANTIZE, ("--qformat", "w4a8_awq", *_AWQ_FLAGS), _FP8, group_size=128
    ),
    Quantization.GPTQ: Recipe(
        Tool.CONVERT,
        ("--use_weight_only", "--weight_only_precision", "int4_gptq", "--per_group"),
        frozenset(),
    ),
    Quantization.SMOOTHQUANT: Recipe(
        Tool.CONVERT, ("--smoothquant", "0.5", "--per_token", "--per_channel"), _INT8
    ),
    Quantization.NVFP4: Recipe(
        Tool.QUANTIZE,
        ("--qformat", "nvfp4", "--calib_size", "512"),
        _FP8,
        families=frozenset({"llama"}),
    ),
}

FOR_EXTERNAL_DRAFTS = frozenset({Quantization.NONE, Quantization.FP8})
"""Quantizations that examples/draft_target_model/README.md lists: FP16, BF16 and FP8."""


def checkpoint_flags(
    model: HfModel, quantization: Quantization, kv_cache: KvCacheDtype, tp: int
) -> tuple[Tool, tuple[str, ...]]:
    """The tool, and its flags except directories, dtype and ranks. Raises BuildError."""
    recipe = RECIPES[quantization]
    _check_source(model, quantization)
    _check_family(model, quantization, recipe)
    _check_kv_cache(model, quantization, kv_cache, recipe)
    group_size = _group_size(model, quantization, recipe)
    _check_groups(model, quantization, group_size, tp)
    groups = ("--group_size", str(group_size)) if quantization is Quantization.GPTQ else ()
    return recipe.tool, (*recipe.flags, *groups, *_kv_cache_flags(recipe.tool, kv_cache))


def option(model: HfModel, name: str) -> str:
    """The name of the option for this model."""
    return f"--{name}" if model.role is Role.TARGET else f"--draft-{name}"


def _check_source(model: HfModel, quantization: Quantization) -> None:
    method = model.quantization.get("quant_method")
    has_gptq = method == "gptq"
    if method and not (has_gptq and quantization is Quantization.GPTQ):
        remedy = "choose gptq" if has_gptq else "give the model without quantization"
        raise BuildError(
            f"{option(model, 'quantization')}: {quantization} cannot start from the {model.role} "
            f"{model.folder}, whose quant_method is {method!r}: {remedy}"
        )
    if quantization is not Quantization.GPTQ:
        return
    if not has_gptq:
        raise BuildError(
            f"{option(model, 'quantization')}: gptq needs a checkpoint whose quantization_config "
            f"has quant_method gptq, and the {model.role} {model.folder} has none: give one, or "
            "choose int4_awq"
        )
    for key, wanted in (("bits", 4), ("desc_act", False)):
        value = model.quantization.get(key, wanted)
        if value != wanted:
            raise BuildError(
                f"quantization_config.{key}: the {model.role} {model.folder} has {value}, but the "
                f"converter supports only {wanted}: give another GPTQ checkpoint"
            )


def _check_family(model: HfModel, quantization: Quantization, recipe: Recipe) -> None:
    if model.family not in recipe.families:
        fit = ", ".join(name for name, other in RECIPES.items() if model.family in other.families)
        raise BuildError(
            f"{option(model, 'quantization')}: {quantization} is not documented for a "
            f"{model.family} model: choose one of {fit}"
        )


def _check_kv_cache(
    model: HfModel, quantization: Quantization, kv_cache: KvCacheDtype, recipe: Recipe
) -> None:
    allowed = recipe.kv_cache | {KvCacheDtype.AUTO}
    if recipe.tool is Tool.CONVERT and model.family == "qwen":
        allowed -= {KvCacheDtype.FP8}  # its converter has no --fp8_kv_cache
    if kv_cache not in allowed:
        raise BuildError(
            f"{option(model, 'kv-cache-dtype')}: {kv_cache} cannot be combined with "
            f"{quantization} for a {model.family} model: choose one of "
            f"{', '.join(sorted(allowed))}, or another quantization"
        )


def _group_size(model: HfModel, quantization: Quantization, recipe: Recipe) -> int | None:
    if quantization is not Quantization.GPTQ:
        return recipe.group_size
    size = model.quantization.get("group_size", 128)
    if size not in (64, 128):
        raise BuildError(
            f"quantization_config.group_size: the {model.role} {model.folder} has {size}, must be "
            "64 or 128: give another GPTQ checkpoint"
        )
    return int(size)


def _check_groups(
    model: HfModel, quantization: Quantization, group_size: int | None, tp: int
) -> None:
    """Check that the layers that are split by their input give whole groups to each rank."""
    if group_size is None:
        return
    widths = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
    }
    for key, width in widths.items():
        if width // tp % group_size:
            raise BuildError(
                f"{option(model, 'quantization')}: {quantization} has groups of {group_size}, but "
                f"{key} {width} over {tp} ranks is not a multiple of it in the {model.role} "
                f"{model.folder}: choose fewer ranks or another quantization"
            )


def _kv_cache_flags(tool: Tool, kv_cache: KvCacheDtype) -> tuple[str, ...]:
    if kv_cache is KvCacheDtype.AUTO:
        return ()
    if tool is Tool.QUANTIZE:
        return ("--kv_cache_dtype", kv_cache)
    return (f"--{kv_cache}_kv_cache",)
