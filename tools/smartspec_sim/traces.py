"""Reads the step traces that `smartspec_py.serving.step_trace` writes.

The first line of a trace is a header with `format`, `version` and what holds for the whole file;
each line after it is a step. Another format or version is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from smartspec_py.core.cost import CostModel, cost_from_json, tupled
from smartspec_py.core.plan.planner import BatchTable, PlannerSettings
from smartspec_py.core.types import NO_TOKEN, DraftOption, SequenceView, SpecPlan
from smartspec_py.engines.base import Event
from smartspec_py.serving.step import Decision, Reason, StepRecord
from smartspec_py.serving.step_trace import NUMBERS, STEP_FORMAT, STEP_VERSION


class TraceError(ValueError):
    """A trace cannot be read. The message names the place and the reason."""


def parse_steps(name: str, text: str) -> list[StepRecord]:
    """The steps of a trace. name: where the text comes from, for errors. Raises TraceError."""
    first, *lines = text.split("\n")
    with _naming(f"{name}, line 1"):
        header = json.loads(first)
        found = header.get("format"), header.get("version")
        if found != (STEP_FORMAT, STEP_VERSION):
            raise ValueError(
                f"{found[0]!r} of version {found[1]!r}, not {STEP_FORMAT!r} of version "
                f"{STEP_VERSION}"
            )
        profile = cost_from_json(header["profile"])
        table = header["batch_table"]
        batch_table = table and BatchTable(**{k: tupled(v) for k, v in table.items()})
    steps = []
    for number, line in enumerate(lines, start=2):
        if line:
            with _naming(f"{name}, line {number}"):
                steps.append(_step(json.loads(line), profile, batch_table))
    return steps


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Turn errors of what was read into TraceErrors that name the place."""
    try:
        yield
    except KeyError as error:
        raise TraceError(f"{place}: {error} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{place}: {error}") from error


def _step(raw: Mapping[str, Any], profile: CostModel, batch_table: BatchTable | None) -> StepRecord:
    """Tokens of events come back as NO_TOKEN."""
    settings = PlannerSettings(
        batch_table=batch_table,
        num_prefilling=raw["num_prefilling"],
        warm_shapes=raw["warm_shapes"],
        forced=dict(raw["forced"]),
    )
    mappings = {name: dict(raw["plan"][name]) for name in ("draft_lens", "choices")}
    decision = Decision(
        plan=SpecPlan(**{**raw["plan"], **mappings}),
        views=[_view(view) for view in raw["views"]],
        cost=replace(profile, **raw["factors"]),
        settings=settings,
        reason=Reason(raw["reason"]),
    )
    return StepRecord(
        decision=decision,
        events=[_event(event) for event in raw["events"]],
        drafted=dict(raw["drafted"]),
        **{name: raw[name] for name in NUMBERS},
    )


def _event(raw: Mapping[str, Any]) -> Event:
    tokens = (NO_TOKEN,) * raw["num_tokens"]
    return Event(raw["sequence"], tokens, raw["num_drafted"], raw["num_accepted"])


def _view(raw: Mapping[str, Any]) -> SequenceView:
    """Probabilities come back as tuples. The plan is the same."""
    options = tuple(
        DraftOption(**{name: tupled(value) for name, value in option.items()})
        for option in raw["options"]
    )
    return SequenceView(**{**raw, "options": options})
