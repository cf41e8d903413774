"""The sink that puts metrics on Triton's metrics port, beside Triton's own `nv_*`."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from smartspec_py.serving.metric_families import FAMILIES, Kind, Labels, Series

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
        self._families = {family.name: family for family in FAMILIES}
        # Not when this module is imported: the stub puts MetricFamily in only when it initialises.
        self._declared = {
            family.name: pb_utils.MetricFamily(
                name=family.name,
                description=family.meaning,
                kind=getattr(pb_utils.MetricFamily, family.kind.name),
            )
            for family in FAMILIES
        }
        self._metrics: dict[Series, Any] = {}
        self._owner: int | None = None

    def put(self, name: str, labels: Labels, value: float) -> None:
        """Creates the metric of a series when it is first used."""
        self._owner = self._owner or threading.get_ident()
        assert self._owner == threading.get_ident(), f"{name}: another thread owns the metrics"
        family = self._families[name]
        metric = self._metrics.get((name, labels))
        if metric is None:
            metric = self._metrics[name, labels] = self._declared[name].Metric(
                labels=self._labels | dict(labels),
                buckets=list(map(float, family.buckets)) if family.buckets else None,
            )
        getattr(metric, _METHODS[family.kind])(value)
