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

itl: (last token - first chunk) / (tokens behind the first chunk), one number a request. A closed
phase sends the next request when the last has ended, so it was due when it left.

draft length: tokens drafted in a decoding step of one sequence. acceptance rate: accepted over
drafted tokens. speed-up: mean e2e of none over that of the policy.

load: share of the saturation rate of none, which is finished requests a second while the queue is
never empty. ratio: geometric mean over the repeats of the policy's mean e2e over the other's under
the same arrivals and prompts; below 1 the policy is faster. Intervals are 95 %, Student's t on the
logarithms of the repeats' ratios. best fixed: the fixed length with the lowest mean e2e in one half
of the repeats, compared in the other half, and the other way round.

verdict: met or missed where the whole interval lies on one side of the bound, open where the bound
is within it, and where requests failed."""


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
