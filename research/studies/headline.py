"""The results table of the README, from the runs in docs/results: `scripts/study headline`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from smartspec_bench.document import Comparison, Document, Phase, read

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- results: scripts/study headline -->", "<!-- end of results -->"

RUNS = {
    "AMD EPYC (Zen 4), OpenVINO": "lockstep-amd.json",
    "Intel Xeon, PyTorch": "lockstep-intel.json",
}
"""Title and document of each run."""

LOADS = {
    ("closed", 0.0): "one request at a time",
    ("steady", 0.7): "70 % of saturation",
    ("steady", 1.1): "110 % of saturation",
    ("step", 0.0): "load that rises and falls",
}
"""Shape and load of each row."""

HEADER = (
    "| load | no speculation | best fixed length | SmartSpec | faster by | p99 | TTFT |",
    "|---|---|---|---|---|---|---|",
)


def table(title: str, name: str) -> str:
    """The rows of one run. Times are milliseconds; p99 and TTFT are in the order of the columns."""
    document = read(ROOT / "docs" / "results" / name)
    rows = [row(document, *place, text) for place, text in LOADS.items()]
    date = document.about.date[:10]
    caption = f"**{title}** ([{name}](docs/results/{name}), {date})"
    return "\n".join([caption, "", *HEADER, *rows])


def row(document: Document, shape: str, load: float, text: str) -> str:
    phases = [one for one in document.phases if (one.shape, one.load) == (shape, load)]
    fixed = {one.policy for one in phases if one.policy.startswith("fixed")}
    best = min(fixed, key=lambda policy: _mean(phases, policy, "e2e_ms", "mean"))
    policies = ("none", best, "goodput")
    means = [f"{_mean(phases, policy, 'e2e_ms', 'mean'):,.0f}" for policy in policies]
    means[1] += f" ({best})"
    tails, first = (
        " / ".join(f"{_mean(phases, policy, metric, part):,.0f}" for policy in policies)
        for metric, part in (("e2e_ms", "p99"), ("ttft_ms", "mean"))
    )
    faster = faster_by(_over_best(document, shape, load))
    return f"| {' | '.join([text, *means, faster, tails, first])} |"


def faster_by(found: Comparison) -> str:
    """A ratio of mean latencies, and its interval, in percent saved. Bold if it excludes 0."""
    values = (found.ratio, found.high, found.low)
    mean, least, most = (round(100 * (1 - value)) for value in values)
    shown = f"{mean} %" if found.low <= 1 <= found.high else f"**{mean} %**"
    return f"{shown} ({least} to {most})"


def _over_best(document: Document, shape: str, load: float) -> Comparison:
    """Where the load changes there are comparisons with each fixed length: the one with the
    best."""
    found = [
        one
        for one in document.comparisons
        if (one.shape, one.load, one.policy, one.metric) == (shape, load, "goodput", "e2e_ms.mean")
        and one.against.startswith("fixed")
    ]
    return max(found, key=lambda one: one.ratio)


def _mean(phases: Sequence[Phase], policy: str, metric: str, part: str) -> float:
    """Geometric mean over the repeats, in milliseconds."""
    values = [getattr(getattr(one, metric), part) for one in phases if one.policy == policy]
    return math.exp(sum(map(math.log, values)) / len(values))


def section() -> str:
    """What stands between the marks."""
    return "\n\n".join(table(title, name) for title, name in RUNS.items())


def page(text: str) -> str:
    """The README with the section as the runs have it. Raises ValueError without the marks."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{README.name} must have {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{section()}\n\n{END}{after}"


def main() -> None:
    README.write_text(page(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
