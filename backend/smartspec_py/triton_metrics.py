"""The sink that puts metrics on Triton's metrics port, beside Triton's own `nv_*`."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from smartspec_py.serving.metric_families import FAMILIES, Family, Kind
from smartspec_py.serving.metrics import Series

_METHODS = {Kind.COUNTER: "increment", Kind.GAUGE: "set", Kind.HISTOGRAM: "observe"}


class TritonMetrics:
    """`put` is a `MetricSink`. It belongs to the first thread that calls it, and asserts that no
    other does.

    If two threads call the same Triton metric at once, the whole server crashes with signal 6 or
    11: each call releases the interpreter's lock and then writes to the metric's shared memory.
    """

    def __init__(self, model: str, version: str) -> None:
        """Declare all families. Another thread may call this, because it calls no metric."""
        # One reference for ever. When Triton's Python process ends, it has already cut its
        # connection to the server. The destructor of a metric uses the connection, and so ends the
        # process by a segmentation fault (github.com/triton-inference-server/server/issues/8662).
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._labels = {"model": model, "version": version}
        # Not when this module is imported: the stub puts MetricFamily in only when it initialises.
        self._declared = {
            family: pb_utils.MetricFamily(
                name=family.name,
                description=family.meaning,
                kind=getattr(pb_utils.MetricFamily, family.kind.name),
            )
            for family in FAMILIES
        }
        self._metrics: dict[Series, Any] = {}
        self._owner: int | None = None

    def put(self, family: Family, labels: tuple[str, ...], value: float) -> None:
        """Creates the metric of a series when it is first used."""
        self._owner = self._owner or threading.get_ident()
        assert self._owner == threading.get_ident(), "another thread owns the metrics"
        metric = self._metrics.get((family, labels))
        if metric is None:
            metric = self._metrics[family, labels] = self._declared[family].Metric(
                labels=self._labels | dict(zip(family.labels, labels, strict=True)),
                buckets=list(map(float, family.buckets)) or None,
            )
        getattr(metric, _METHODS[family.kind])(value)
