"""What a CUDA graph would capture, run on tensors without memory (PyTorch's `meta` device).

A captured pass must not read a value on the host, use tensors of the host, have shapes that depend
on data, or write to tensors other than the static buffers, the cache and its own results. Tensors
without memory have no numbers, so wrong results and missing kernels are not found here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_model_types import VOCAB_SIZE, make_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.engines.runtimes.pytorch.causal import CausalModel
from smartspec_py.engines.runtimes.pytorch.compiled import merge_products
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner, Shape
from smartspec_py.engines.runtimes.pytorch.packed import ATTENTION_NAME
from smartspec_py.engines.runtimes.runner import RunnerConfig

pytestmark = pytest.mark.usefixtures("without_triton")


META = torch.device("meta")


class CaptureError(Exception):
    """An operation that a capture does not allow."""


class Capture(TorchDispatchMode):
    """Raises CaptureError. static: tensors that outlive the pass. `meta` tensors themselves raise
    NotImplementedError or RuntimeError if a value is read, or if a shape depends on it."""

    def __init__(self, static: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._writable = list(static)  # a reference to each, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs)), _tensors(out)
        if any(tensor.device != META for tensor in (*given, *made)):
            raise CaptureError(f"{func} uses a tensor of the host")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and not any(_is_same(value, own) for own in self._writable):
                raise CaptureError(f"{func} writes to a foreign tensor")
        self._writable += [
            tensor for tensor in made if not any(_is_same(tensor, one) for one in given)
        ]
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.untyped_storage()._cdata == right.untyped_storage()._cdata


def make_runner(kind: str, state_layers: tuple[int, ...] = ()) -> GraphRunner:
    config = RunnerConfig(
        Path(), META, torch.bfloat16, 4, 512, VOCAB_SIZE, state_layers=state_layers
    )  # fmt: skip
    with META:
        model = AutoModelForCausalLM.from_config(
            make_config(kind), dtype=config.dtype, attn_implementation=ATTENTION_NAME
        )
    merge_products(model)
    return GraphRunner(CausalModel(model.eval(), config), config)


def capture_of(runner: GraphRunner) -> Capture:
    runner._allocate()
    buffers = [runner._staged, runner._hidden, runner.cache.buffer]
    return Capture(buffers if runner._states is None else [*buffers, runner._states])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "starcoder2", "gpt_neox", "phi3"])
def test_a_pass_can_be_captured(kind: str) -> None:
    for layers in ((), (0, 1)):
        runner = make_runner(kind, layers)
        for shape in (Shape(1, 512), Shape(48, 512)):
            with torch.no_grad(), capture_of(runner):
                runner._body(shape)()


@pytest.mark.parametrize(
    "planted",
    [
        lambda runner: runner._hidden.sum().item(),
        lambda runner: runner._hidden[runner._hidden > 0],
        lambda runner: runner._staged.tolist(),
        lambda runner: runner._hidden[0].copy_(torch.zeros(32)),
        lambda runner: runner._model.model.lm_head.weight.zero_(),
    ],
    ids=["reads", "has a shape by data", "copies to the host", "uses the host", "writes a weight"],
)
def test_planted_faults_are_found(planted: Callable[[GraphRunner], Any]) -> None:
    runner = make_runner("llama")
    with (
        pytest.raises((CaptureError, RuntimeError, NotImplementedError)),
        torch.no_grad(),
        capture_of(runner),
    ):
        planted(runner)
