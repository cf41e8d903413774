"""Cost models for hardware that is not at hand: published fits, and a roofline from data sheets.

By the roofline, a pass of n tokens over B rows, each with a context of c tokens, takes

    T = max(weights / (MEMORY_SHARE bandwidth), 2 parameters n / (COMPUTE_SHARE flops))
        + B c kv_bytes / (KV_SHARE bandwidth)

Bandwidth and flops are the sums over all GPUs. The shares come from the published fit of Llama-3-8B
on an H100. We assume that they hold for other models and GPUs too. A published fit is used up to
the number of rows it was made for. Above it, the larger of fit and roofline is used. Times never
fall with more rows: a negative coefficient of a fit comes from collinear data.

Model sizes come from the published config.json, with 2 bytes per parameter. Keys and values also
take 2 bytes each, which is 4 * layers * kv_heads * head_dim bytes per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from smartspec_py.core.cost import CostModel, PassTable

T = TypeVar("T")

MEMORY_SHARE = 0.69
"""Share of the data sheet's bandwidth reached for weights. From the fit: 16.06 GB in 6.94 ms, at
3.35 TB/s."""

KV_SHARE = 0.80
"""The same share for keys and values. From the fit: 131,072 bytes in 4.859e-5 ms."""

COMPUTE_SHARE = 0.88
"""Share of the data sheet's dense BF16 rate. From the fit: 16.06 GFLOP in 1.844e-2 ms, at
989 TFLOP/s."""

USABLE_MEMORY = 0.9
"""Share of a GPU's memory for weights and KV cache. Activations, CUDA graphs and the driver take
the rest."""

BYTES_PER_PARAMETER = 2

PUBLISHED_ROWS = 32
"""Largest number of rows of the fits, which used up to about 30 sequences."""

ROW_GRID = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKEN_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class HardwareError(ValueError):
    """The hardware is unknown, or the models do not fit. The message says what is possible."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, by its data sheet. memory: bytes. bandwidth: bytes per second. flops: dense BF16
    operations per second."""

    memory: float
    bandwidth: float
    flops: float
    source: str


GPUS: Mapping[str, Gpu] = {
    "a100-40gb": Gpu(40e9, 1.555e12, 312e12, "NVIDIA A100 data sheet, SXM4 40 GB"),
    "a100-80gb": Gpu(80e9, 2.039e12, 312e12, "NVIDIA A100 data sheet, SXM4 80 GB"),
    "h100": Gpu(80e9, 3.35e12, 989e12, "NVIDIA H100 data sheet, SXM5; half of the sparse rate"),
    "h200": Gpu(141e9, 4.8e12, 989e12, "NVIDIA H200 data sheet, SXM; half of the sparse rate"),
    "l40s": Gpu(48e9, 0.864e12, 362e12, "NVIDIA L40S data sheet; half of the sparse rate"),
    "l4": Gpu(24e9, 0.3e12, 121e12, "NVIDIA L4 data sheet; half of the sparse rate"),
}


@dataclass(frozen=True)
class ModelSize:
    """kv_bytes: KV cache bytes per token."""

    parameters: float
    kv_bytes: int

    @property
    def weight_bytes(self) -> float:
        return self.parameters * BYTES_PER_PARAMETER


MODELS: Mapping[str, ModelSize] = {
    "llama-160m": ModelSize(0.162e9, 4 * 12 * 12 * 64),
    "llama-3.2-1b": ModelSize(1.24e9, 4 * 16 * 8 * 64),
    "llama-3.2-3b": ModelSize(3.21e9, 4 * 28 * 8 * 128),
    "vicuna-7b": ModelSize(6.74e9, 4 * 32 * 32 * 128),
    "llama-3-8b": ModelSize(8.03e9, 4 * 32 * 8 * 128),
    "vicuna-13b": ModelSize(13.0e9, 4 * 40 * 40 * 128),
    "vicuna-33b": ModelSize(32.5e9, 4 * 60 * 52 * 128),
    "llama-3.1-70b": ModelSize(70.6e9, 4 * 80 * 8 * 128),
}


@dataclass(frozen=True)
class Fit:
    """Seconds of a pass: kv_s * (context tokens of all rows) + token_s * tokens + row_s * rows +
    base_s."""

    kv_s: float
    token_s: float
    row_s: float
    base_s: float

    def pass_s(self, batch_size: int, num_tokens: float) -> float:
        """Seconds without the term for context, which `PassTable` adds."""
        return self.token_s * num_tokens + self.row_s * batch_size + self.base_s


PUBLISHED: Mapping[tuple[str, str, int], Fit] = {
    ("llama-3-8b", "h100", 1): Fit(4.859e-8, 1.844e-5, -4.331e-5, 6.939e-3),
    ("llama-3.1-70b", "h100", 4): Fit(6.244e-8, 6.402e-5, -3.974e-5, 18.345e-3),
}
"""Fits of target passes by (model, GPU, number of GPUs). The coefficients are from the public vLLM
fork of SmartSpec's first author (branches of 2024-10 to 2025-04). They were fitted to traces
similar to ShareGPT."""

EAGLE = "eagle"
EAGLE_TARGET = "llama-3-8b"
EAGLE_PASS_S = 0.4522e-3 + 0.4471e-3 / 3
"""Seconds of one draft token of the EAGLE head for Llama-3-8B on an H100, from the same source.
Each step with drafts also takes a constant 0.4471 ms. A cost per pass has no such constant, so it
is spread over 3 passes."""
EAGLE_ROW_S = 5.528e-6
EAGLE_READ_S = 4.387e-8
EAGLE_SIZE = ModelSize(0.25e9, 4 * 8 * 128)
"""Size of one layer of the target and of its KV cache."""


@dataclass(frozen=True)
class Hardware:
    """A machine with a pair of models, as the simulator needs it.

    target_bytes, draft_bytes: KV cache bytes per token. 0 means unknown: memory is not modelled.
    cache_bytes: memory for both caches. notes: sources of the numbers.
    """

    cost: CostModel
    target_bytes: int = 0
    draft_bytes: int = 0
    cache_bytes: int = 0
    notes: tuple[str, ...] = ()


def gpu_hardware(
    gpu_name: str, num_gpus: int, target_name: str, draft_name: str | None, max_rows: int
) -> Hardware:
    """The named models on the named GPUs. draft_name: None means no draft model.

    Raises HardwareError for an unknown name, or if the weights alone do not fit.
    """
    gpu = _known(GPUS, gpu_name, "--gpu")
    target = _known(MODELS, target_name, "--model")
    draft = _draft_size(draft_name, target_name)
    room = num_gpus * gpu.memory * USABLE_MEMORY
    weights = target.weight_bytes + (draft.weight_bytes if draft else 0.0)
    if weights >= room:
        raise HardwareError(
            f"{target_name} and {draft_name} have {weights / 1e9:.1f} GB of weights, but "
            f"{num_gpus} x {gpu_name} can hold only {room / 1e9:.1f} GB; use more or larger GPUs"
        )
    fit = PUBLISHED.get((target_name, gpu_name, num_gpus))
    table = _target_table(target, gpu, num_gpus, fit, max_rows)
    notes = [
        f"{gpu_name}: {gpu.source}",
        f"target: roofline of {target_name} on {num_gpus} x {gpu_name}"
        if fit is None
        else f"target: published fit up to {PUBLISHED_ROWS} rows, roofline above",
    ]
    if draft is None:
        cost = CostModel(table)
        notes.append("no draft model: draft passes take no time")
    elif draft_name == EAGLE:
        cost = CostModel(table, _eagle_table(max_rows), catch_up_s=EAGLE_READ_S)
        notes.append("draft: published fit of the EAGLE head on an H100")
    else:
        # The draft model runs on one GPU: tensor parallelism would only add communication time.
        read_s = 2 * draft.parameters / (COMPUTE_SHARE * gpu.flops)
        cost = CostModel(table, _target_table(draft, gpu, 1, None, max_rows), catch_up_s=read_s)
        notes.append(f"draft: roofline of {draft_name} on one {gpu_name}")
    return Hardware(
        cost,
        target.kv_bytes,
        draft.kv_bytes if draft else 0,
        int(room - weights),
        tuple(notes),
    )


def check_fits(hardware: Hardware, max_rows: int, max_context_len: int) -> None:
    """Raise HardwareError if max_rows rows of maximum length do not fit in the cache memory."""
    each = (hardware.target_bytes + hardware.draft_bytes) * max_context_len
    if each * max_rows > hardware.cache_bytes:
        raise HardwareError(
            f"{max_rows} rows of {max_context_len} tokens need {each * max_rows / 1e9:.1f} GB of "
            f"cache, but only {hardware.cache_bytes / 1e9:.1f} GB are free beside the weights; set "
            f"--rows to at most {hardware.cache_bytes // each}"
        )


def roofline(model: ModelSize, gpu: Gpu, num_gpus: int) -> Callable[[int, float], float]:
    """A function of rows and tokens: seconds of a pass without context."""
    read_s = model.weight_bytes / (MEMORY_SHARE * gpu.bandwidth * num_gpus)
    token_s = 2 * model.parameters / (COMPUTE_SHARE * gpu.flops * num_gpus)
    return lambda batch_size, num_tokens: max(read_s, token_s * num_tokens)


def _target_table(
    model: ModelSize, gpu: Gpu, num_gpus: int, fit: Fit | None, max_rows: int
) -> PassTable:
    by_roofline = roofline(model, gpu, num_gpus)
    kv_s = model.kv_bytes / (KV_SHARE * gpu.bandwidth * num_gpus)
    if fit is None:
        return _table(by_roofline, kv_s, max_rows)

    def pass_s(batch_size: int, num_tokens: float) -> float:
        if batch_size <= PUBLISHED_ROWS:
            return fit.pass_s(batch_size, num_tokens)
        return max(by_roofline(batch_size, num_tokens), fit.pass_s(PUBLISHED_ROWS, num_tokens))

    return _table(pass_s, fit.kv_s, max_rows)


def _eagle_table(max_rows: int) -> PassTable:
    return _table(lambda rows, _: EAGLE_PASS_S + EAGLE_ROW_S * rows, 0.0, max_rows, (1,))


def _table(
    pass_s: Callable[[int, float], float],
    context_s: float,
    max_rows: int,
    tokens: tuple[int, ...] = TOKEN_GRID,
) -> PassTable:
    """Evaluate the function on the grid. For the same number of tokens per row, times never fall
    with more rows."""
    rows = (*(r for r in ROW_GRID if r < max_rows), max_rows)
    columns = [list(accumulate((pass_s(r, r * t) for r in rows), max)) for t in tokens]
    seconds = tuple(zip(*columns, strict=True))
    return PassTable(rows, tokens, seconds, context_s=context_s)


def _draft_size(name: str | None, target_name: str) -> ModelSize | None:
    if name is None:
        return None
    if name == EAGLE:
        if target_name != EAGLE_TARGET:
            raise HardwareError(f"--draft: {EAGLE} is available for {EAGLE_TARGET} only")
        return EAGLE_SIZE
    return _known(MODELS, name, "--draft")


def _known(table: Mapping[str, T], name: str, option: str) -> T:
    if name not in table:
        raise HardwareError(f"{option}: {name!r} must be one of {', '.join(table)}")
    return table[name]
