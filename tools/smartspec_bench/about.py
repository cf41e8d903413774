"""Describes the run and the machine: the first part of the document."""

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
request is due when the previous one has ended.

draft length: tokens drafted per step and request. acceptance rate: accepted tokens / drafted
tokens. speed-up: mean e2e of none / mean e2e of the policy.

load: rate / saturation rate of none. The saturation rate is measured with a queue that is never
empty. ratio: mean e2e of the policy / mean e2e of the other policy, with the same arrivals and
prompts. It is the geometric mean over the repeats. Below 1 the policy is faster. Intervals are
95 %, by Student's t on the logarithms of the ratios. best fixed: the fixed length with the lowest
mean e2e. Each half of the repeats is compared with the length that is best in the other half.

verdict: met or missed if the whole interval is on one side of the bound. open if the interval
includes the bound, or if requests failed."""


def describe(
    form: str, model: Path, draft: Path, limits: LimitsConfig, settings_text: str
) -> About:
    """Describe this run on this machine.

    settings_text: dtype and number of threads, shown with the pair.
    """
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
    """The commit of the checkout of this package, with `-dirty` if files differ; else empty."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
