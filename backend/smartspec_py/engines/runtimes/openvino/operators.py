"""Inputs and constants of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino.opset15 as op


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
