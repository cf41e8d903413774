"""Constants of a graph."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset15 as op

from smartspec_py.engines.runtimes.openvino.operators import (
    float_,
    int_,
    ints,
    parameter,
    share_constants,
)


def test_equal_small_constants_are_shared() -> None:
    """Of another type, shape or value, or of more bytes, they are not."""
    numbers = parameter("numbers", [-1], np.float32)
    large = [op.constant(np.ones(5000, np.float32)) for _ in range(2)]
    out = op.multiply(op.multiply(numbers, float_(2.0)), float_(2.0))
    out = op.add(op.add(out, float_(3.0)), op.convert(int_(2), np.float32))
    for many in large:
        out = op.add(out, op.reduce_sum(many, ints(0)))
    model = ov.Model([op.result(out)], [numbers], "sums")
    share_constants(model)
    kinds = [node.get_type_name() for node in model.get_ordered_ops()]
    # 2.0, 3.0, the whole 2, the axis, and both large ones; before, 8
    assert kinds.count("Constant") == 6
    found = ov.Core().compile_model(model, "CPU")(np.array([1.0, 2.0], np.float32))[0]
    assert found.tolist() == [10009.0, 10013.0]
