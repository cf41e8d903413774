"""Converts the options of `smartspec bench load` to settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smartspec_bench.plan import FORMS, JUDGED, MIXED, NONE, SHAPES, Settings
from smartspec_bench.workloads import WORKLOADS
from smartspec_cli.commands import USAGE_ERROR, fail
from smartspec_py.core.plan.planner import parse_policy
from smartspec_sim.latency import Slo, parse_slo


def changed(form: str, **options: Any) -> Settings:
    """The settings of a form, changed by the given options. A wrong value ends the command.

    options: values by name; None if the option was not given.
    """
    if form not in FORMS:
        fail(f"--form: {form!r} must be one of {', '.join(FORMS)}", USAGE_ERROR)
    given = {name: value for name, value in options.items() if value is not None}
    settings = replace(FORMS[form], **given)
    _check_policies(settings.policies)
    _check_among("shapes", settings.shapes, SHAPES)
    _check_among("workloads", settings.workloads, (*WORKLOADS, MIXED))
    _check_among("shift-workloads", settings.shift_workloads, (*WORKLOADS, MIXED))
    if len(settings.shift_workloads) < 2:
        fail("--shift-workloads: must be two or more workloads", USAGE_ERROR)
    return settings


def _check_policies(policies: Sequence[str]) -> None:
    for name in policies:
        try:
            parse_policy(name)
        except ValueError as error:
            fail(f"--policies: {name!r} must be {error}", USAGE_ERROR)
    for name, why in ((NONE, "the baseline"), (JUDGED, "the policy under test")):
        if name not in policies:
            fail(f"--policies: must include {name}, which is {why}", USAGE_ERROR)


def _check_among(option: str, names: Sequence[str], allowed: Sequence[str]) -> None:
    for name in names:
        if name not in allowed:
            fail(f"--{option}: {name!r} must be one of {', '.join(allowed)}", USAGE_ERROR)


def names_of(text: str | None) -> tuple[str, ...] | None:
    """Names separated by commas, without duplicates."""
    return None if text is None else tuple(dict.fromkeys(text.split(",")))


def shares_of(option: str, text: str | None) -> tuple[float, ...] | None:
    """Numbers separated by commas. Ends the command if a part is not a number above 0."""
    if text is None:
        return None
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = (math.nan,)
    if not all(0 < share < math.inf for share in shares):
        fail(f"--{option}: got {text!r}, must be numbers above 0 separated by commas", USAGE_ERROR)
    return shares


def slo_of(text: str | None) -> Slo | None:
    try:
        return None if text is None else parse_slo(text)
    except ValueError as error:
        fail(f"--slo: {error}", USAGE_ERROR)
