"""Chooses kernels by measuring them on a model's own shapes, when it is loaded on a CPU.

No kernel is the fastest on every processor: with float32, oneDNN takes 0.6 of MKL's time for 4 to
16 rows on an AMD EPYC and 1.1 of it for one or two on an Intel Xeon (docs/performance.md).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from smartspec_py.engines.torch.linears import KERNELS, PLAIN, Shape, linears, product_of, shape_of

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 128)
"""Tokens of a pass. Each counts alike: a kernel's score is the geometric mean of its times."""

SAMPLE_BYTES = 128 << 20
"""Of weights that are multiplied in turn, as in a pass: more than a core's caches keep."""

NUM_ROUNDS = 3
"""The best counts: what disturbs a product only adds to it."""

ATTENTION_ROWS = (1, 8, 32)
ATTENTION_WIDTHS = (1, 4)
ATTENTION_CONTEXT = 256
ATTENTION_LAYERS = 4
"""Of keys and values that are read in turn."""


@dataclass(frozen=True)
class KernelChoice:
    """kernels: by the shape of a linear layer; plain where there is none. cache_dtype: of keys and
    values; None is that of the model."""

    kernels: Mapping[Shape, str] = field(default_factory=dict)
    cache_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        names = sorted(set(self.kernels.values())) or [PLAIN]
        most = max(names, key=list(self.kernels.values()).count)
        others = [f"{o} x {i} {name}" for (o, i), name in self.kernels.items() if name != most]
        cache = (
            "" if self.cache_dtype is None else f", keys and values in {_name(self.cache_dtype)}"
        )
        return f"linear layers by {', '.join([most, *sorted(others)])}{cache}"

    def to_json(self) -> dict[str, Any]:
        rows = [[*shape, name] for shape, name in self.kernels.items()]
        return {"kernels": rows, "cache_dtype": self.cache_dtype and _name(self.cache_dtype)}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> KernelChoice:
        """Raises KeyError, TypeError, ValueError or AttributeError for what `to_json` did not
        make, and for kernels that are not there any more."""
        kernels = {(int(o), int(i)): str(name) for o, i, name in document["kernels"]}
        if unknown := set(kernels.values()) - set(KERNELS):
            raise ValueError(f"no such kernel: {min(unknown)}")
        name = document["cache_dtype"]
        return KernelChoice(kernels, None if name is None else getattr(torch, name))


def choose(
    model: torch.nn.Module, batch_invariant: bool, heads: tuple[int, int, int]
) -> KernelChoice:
    """Measure for a model on a CPU. heads: of queries, of keys, and their width.

    Of batch-invariant layers the kernels are measured with the padding that they need.
    """
    start = time.perf_counter()
    times = _product_times(model, batch_invariant)
    shapes = dict.fromkeys(shape for _, shape, _ in times)
    kernels = {
        shape: min(_names(times), key=lambda name: _score(times, name, shape)) for shape in shapes
    }
    dtype = next(model.parameters()).dtype
    cache_dtype = torch.float32
    if dtype != torch.float32 and not batch_invariant:
        cache_dtype = min((torch.float32, dtype), key=lambda one: _attention_score(one, *heads))
    choice = KernelChoice(kernels, cache_dtype)
    logger.info("%s, measured in %.1f s", choice, time.perf_counter() - start)
    for shape in shapes:
        scores = {name: _score(times, name, shape) for name in _names(times)}
        best = min(scores.values())
        text = ", ".join(f"{name} {score / best:.2f}" for name, score in scores.items())
        logger.info("layers of %d x %d, over the fastest: %s", *shape, text)
    return choice


def kept_choice(path: Path) -> KernelChoice | None:
    """What an earlier start stored; None where there is nothing that can be used."""
    try:
        return KernelChoice.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        logger.warning("%s cannot be read (%s): measuring again", path, error)
        return None


Times = dict[tuple[str, Shape, int], float]
"""Seconds by kernel, shape and rows; of all layers of that shape in the sample."""


@torch.inference_mode()
def _product_times(model: torch.nn.Module, batch_invariant: bool) -> Times:
    layers = _sample(linears(model))
    times: Times = {}
    refused: set[str] = set()
    for _, name in product(range(NUM_ROUNDS), KERNELS):
        if name in refused:
            continue
        try:
            found = _round(layers, name, batch_invariant)
        except (RuntimeError, AttributeError) as error:
            logger.info("linear layers are not computed by %s: %s", name, str(error).split("\n")[0])
            refused.add(name)
            continue
        for key, seconds in found.items():
            times[key] = min(seconds, times.get(key, math.inf))
    return times


def _round(layers: Sequence[torch.nn.Linear], name: str, batch_invariant: bool) -> Times:
    products = [product_of(layer, name, batch_invariant) for layer in layers]
    times: Times = {}
    for num_rows in ROWS:
        inputs = {
            n: layers[0].weight.new_ones(num_rows, n) for n in {one.in_features for one in layers}
        }
        for layer, multiply in zip(layers, products, strict=True):
            start = time.perf_counter()
            multiply(inputs[layer.in_features])
            key = (name, shape_of(layer), num_rows)
            times[key] = times.get(key, 0.0) + time.perf_counter() - start
    return times


def _sample(layers: Sequence[torch.nn.Linear]) -> list[torch.nn.Linear]:
    """The first of SAMPLE_BYTES, and one of each shape."""
    sample, num_bytes = [], 0
    seen: set[Shape] = set()
    for layer in layers:
        if num_bytes < SAMPLE_BYTES or shape_of(layer) not in seen:
            sample.append(layer)
            num_bytes += layer.weight.nbytes
            seen.add(shape_of(layer))
    return sample


def _names(times: Times) -> list[str]:
    return list(dict.fromkeys(name for name, _, _ in times))


def _score(times: Times, name: str, shape: Shape) -> float:
    """Seconds, the geometric mean over ROWS."""
    return math.exp(sum(math.log(times[name, shape, rows]) for rows in ROWS) / len(ROWS))


@torch.inference_mode()
def _attention_score(dtype: torch.dtype, num_heads: int, num_kv_heads: int, width: int) -> float:
    """Seconds of attention with keys and values of a precision, the geometric mean over sizes."""
    shape = (ATTENTION_LAYERS, 2, max(ATTENTION_ROWS), ATTENTION_CONTEXT, num_kv_heads, width)
    cache = torch.ones(shape, dtype=dtype).transpose(3, 4)
    logs = []
    for num_rows, num_tokens in product(ATTENTION_ROWS, ATTENTION_WIDTHS):
        num_queries = num_tokens * num_heads // num_kv_heads
        queries = torch.ones(num_rows, num_kv_heads, num_queries, width, dtype=dtype)
        mask = torch.zeros(num_rows, 1, num_queries, ATTENTION_CONTEXT, dtype=dtype)
        best = math.inf
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter()
            for keys, values in cache[:, :, :num_rows].unbind():
                F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            best = min(best, time.perf_counter() - start)
        logs.append(math.log(best))
    return math.exp(sum(logs) / len(logs))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
