"""Inputs and constants of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op

MOST_SHARED_BYTES = 1 << 14
"""Of a constant that may be shared: a block of `weights.rotation` in float32."""


def parameter(name: str, shape: Sequence[int], dtype: Any) -> Any:
    node = op.parameter(list(shape), dtype, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def int_(value: int) -> Any:
    return op.constant(np.int64(value))


def ints(*values: int) -> Any:
    return op.constant(np.array(values, np.int64))


def float_(value: float) -> Any:
    return op.constant(np.float32(value))


def share_constants(model: ov.Model) -> None:
    """Let operators with equal small constants have one in common. OpenVINO's passes over the graph
    take less time: a model of 0.5 B is compiled in 0.85 of the time (AMD EPYC Zen 3)."""
    kept: dict[tuple[str, tuple[int, ...], bytes], Any] = {}
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_byte_size() > MOST_SHARED_BYTES:
            continue
        kind = node.get_element_type().get_type_name()
        first = kept.setdefault((kind, tuple(node.shape), node.data.tobytes()), node.output(0))
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(first)
