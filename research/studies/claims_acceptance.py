"""Which law do accepted drafts follow: Su's power law c s^g, or a constant probability?

Both say how many of s drafts are accepted on average. The power law has two parameters and the
geometric law has one. Therefore they are also fitted on short drafts and tested on longer ones.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_sim.traces.oracle import OracleSequence, read_oracle
from smartspec_sim.workload import KindSpec, LengthSpec

Floats = NDArray[np.float64]

REPOSITORY = Path(__file__).resolve().parents[2]

LENGTHS = tuple(range(1, 13))
"""Draft lengths s at which the mean is taken."""
FITTED_TO = 6
"""The longest length in the fit that is tested on longer lengths."""
PROBS = np.linspace(0.01, 0.99, 981)
POWERS = np.linspace(0.01, 1.0, 991)
NUM_PROMPTS = 25
WORKLOADS = ("chat", "sql", "summarize", "qa")

Law = Callable[[Floats, Floats, int], tuple[tuple[float, ...], Floats]]
"""Arguments: lengths, means, and how many of them to fit. Returns the parameters and the fitted
values."""


@dataclass(frozen=True, slots=True)
class Fit:
    """rms: error in tokens over all lengths, fitted to all. far: mean relative error at the lengths
    above FITTED_TO, fitted to those up to it; positive if it predicts too many. parameters: fitted
    to all."""

    parameters: tuple[float, ...]
    rms: float
    far: float


@dataclass(frozen=True, slots=True)
class Laws:
    """Of one set of texts. accepted: mean number of accepted drafts at each of LENGTHS."""

    name: str
    num_steps: int
    accepted: tuple[float, ...]
    geometric: Fit
    power: Fit


def laws(name: str, accepted: Sequence[float], num_steps: int) -> Laws:
    measured = np.asarray(accepted)
    return Laws(
        name, num_steps, tuple(accepted), _fit(measured, _geometric), _fit(measured, _power)
    )


def _fit(measured: Floats, law: Law) -> Fit:
    lengths = np.array(LENGTHS, dtype=np.float64)
    parameters, fitted = law(lengths, measured, len(lengths))
    _, from_short = law(lengths, measured, FITTED_TO)
    relative = (from_short / measured - 1)[FITTED_TO:]
    rms = float(np.sqrt(np.mean((fitted - measured) ** 2)))
    return Fit(parameters, rms, float(relative.mean()))


def _geometric(lengths: Floats, measured: Floats, num_fitted: int) -> tuple[tuple[float], Floats]:
    """a (1 - a^s) / (1 - a), the a of least squares on a grid."""
    found = PROBS * (1 - PROBS ** lengths[:, None]) / (1 - PROBS)
    errors = ((found - measured[:, None]) ** 2)[:num_fitted].sum(axis=0)
    best = int(errors.argmin())
    return (float(PROBS[best]),), found[:, best]


def _power(
    lengths: Floats, measured: Floats, num_fitted: int
) -> tuple[tuple[float, float], Floats]:
    """c s^g, the g of least squares on a grid, each with its best c."""
    basis = lengths[:, None] ** POWERS
    short, seen = basis[:num_fitted], measured[:num_fitted, None]
    scales = (short * seen).sum(axis=0) / (short**2).sum(axis=0)
    best = int(((scales * short - seen) ** 2).sum(axis=0).argmin())
    return (float(scales[best]), float(POWERS[best])), scales[best] * basis[:, best]


def drawn_laws(name: str, kind: KindSpec, num_texts: int = 400) -> Laws:
    """Of texts that the simulator draws."""
    kind = kind.model_copy(update={"output": LengthSpec(mean=200)})
    rngs = (np.random.default_rng([1, number]) for number in range(num_texts))
    requests = [kind.draw(number, 0.0, rng) for number, rng in enumerate(rngs, start=1)]
    texts = [
        [text.accepted(position, LENGTHS[-1]) for position in range(request.output_len)]
        for request in requests
        if (text := request.acceptances[0]) is not None
    ]
    return _walked(name, [(runs, len(runs) - 1) for runs in texts])


def traced_laws(texts: Sequence[OracleSequence]) -> list[Laws]:
    """Of the shipped pair's texts, by workload and together."""
    found = []
    for name in (*WORKLOADS, "all four"):
        some = [t for t in texts if name in (t.workload, "all four")]
        ends = [min(t.num_positions, t.max_tokens) - 1 for t in some]
        runs = [list(t.proposers[DRAFT_MODEL].accepted) for t in some]
        found.append(_walked(f"shipped pair, {name}", list(zip(runs, ends, strict=True))))
    return found


def _walked(name: str, texts: Sequence[tuple[Sequence[int], int]]) -> Laws:
    """Means over the steps of a server with each fixed length. texts: runs of right drafts by
    position, and the last position that can be drafted for. Steps whose drafts would reach beyond
    it are left out, because the end of the text cuts them."""
    means, num_steps = [], 0
    for length in LENGTHS:
        kept = [n for runs, end in texts for n in _steps(runs, end, length)]
        means.append(float(np.mean(kept)))
        num_steps += len(kept)
    return laws(name, means, num_steps)


def _steps(runs: Sequence[int], end: int, length: int) -> Iterator[int]:
    position = 1
    while position + length <= end:
        kept = min(runs[position], length)
        yield kept
        position += kept + 1


def shipped_texts() -> list[OracleSequence]:
    """An oracle trace of the shipped pair, greedy, in float32. It is the same in every run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trace.jsonl"
        pair = REPOSITORY / "engines_build" / "tiny"
        command = [sys.executable, "-m", "smartspec_cli.app", "trace", "--oracle"]
        command += ["--model", str(pair / "target"), "--draft", str(pair / "draft")]
        command += ["--out", str(out), "--prompts", str(NUM_PROMPTS), "--temperatures", "0"]
        command += ["--max-draft-len", str(LENGTHS[-1] + 3), "--device", "cpu"]
        subprocess.run(command, check=True, capture_output=True)
        return read_oracle(out)[1]
