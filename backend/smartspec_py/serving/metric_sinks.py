"""Where metrics go: the Protocol, and the sinks that need no Triton."""

from __future__ import annotations

from typing import Protocol

from smartspec_py.serving.metric_families import FAMILIES, Kind, Labels, Series


class MetricSink(Protocol):
    """Where values go. Labels are those of the family's own, in its order."""

    def increment(self, name: str, labels: Labels, by: float) -> None: ...

    def set(self, name: str, labels: Labels, value: float) -> None: ...

    def observe(self, name: str, labels: Labels, value: float) -> None: ...


class NoMetrics:
    """A sink that drops everything."""

    def increment(self, name: str, labels: Labels, by: float) -> None: ...

    def set(self, name: str, labels: Labels, value: float) -> None: ...

    def observe(self, name: str, labels: Labels, value: float) -> None: ...


class MemoryMetrics:
    """A sink that keeps everything by (name, labels), and takes only what the table has."""

    def __init__(self) -> None:
        self._families = {family.name: family for family in FAMILIES}
        self.values: dict[Series, float] = {}
        self.observations: dict[Series, list[float]] = {}

    def increment(self, name: str, labels: Labels, by: float) -> None:
        assert by >= 0, f"{name} falls"
        series = self._checked(Kind.COUNTER, name, labels)
        self.values[series] = self.values.get(series, 0.0) + by

    def set(self, name: str, labels: Labels, value: float) -> None:
        self.values[self._checked(Kind.GAUGE, name, labels)] = value

    def observe(self, name: str, labels: Labels, value: float) -> None:
        series = self._checked(Kind.HISTOGRAM, name, labels)
        self.observations.setdefault(series, []).append(value)

    def _checked(self, kind: Kind, name: str, labels: Labels) -> Series:
        family = self._families[name]
        assert family.kind is kind, f"{name} is a {family.kind}"
        assert tuple(label for label, _ in labels) == family.labels, f"{name} has other labels"
        return name, labels
