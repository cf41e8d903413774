"""What ran where: the first part of the document."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from smartspec_bench.document import About
from smartspec_py.serving.config import LimitsConfig
from smartspec_py.serving.profile import machine_name
from smartspec_sim import latency

PACKAGES = (
    "smartspec-py",
    "torch",
    "transformers",
    "numpy",
    "nvidia-pytriton",
    "tritonclient",
    "aiohttp",
)

DEFINITIONS = f"""\
{latency.DEFINITIONS}

itl: (last token - first chunk) / (tokens after the first chunk), per request. In closed phases a
request is due when the one before has ended.

draft length: tokens drafted per step and request. acceptance rate: accepted divided by drafted
tokens. speed-up: mean e2e of none divided by that of the policy.

load: share of the saturation rate of none, measured with a queue that is never empty. ratio: mean
e2e of the policy divided by the other's, under the same arrivals and prompts, as geometric mean
over the repeats; below 1 the policy is faster. Intervals are 95 %, Student's t on the logarithms of
the ratios. best fixed: the fixed length with the lowest mean e2e, chosen on one half of the repeats
and compared on the other half, and the other way round.

verdict: met or missed if the whole interval is on one side of the bound; open if the bound is
inside it, or if requests failed."""


def describe(
    form: str, model: Path, draft: Path, limits: LimitsConfig, settings_text: str
) -> About:
    """settings_text: dtype and threads, for the name of the pair."""
    return About(
        title=f"{model.name} with {draft.name} under load",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["smartspec", *sys.argv[1:]]),
        machine=machine_name(),
        cores=os.cpu_count() or 1,
        versions={"python": sys.version.split()[0], **_versions()},
        commit=_commit(),
        pair=f"target {model.name}, draft {draft.name}, {settings_text}",
        limits=limits.model_dump(),
        form=form,
        definitions=DEFINITIONS,
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Of the checkout that this package is in; `-dirty` where files differ; empty without one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
