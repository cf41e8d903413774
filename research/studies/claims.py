"""The claims of the two papers, one row each: theirs, ours, and a verdict by a stated rule."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from smartspec_sim.workload import KindSpec
from studies import claims_served
from studies.claims_acceptance import Laws, drawn_laws, shipped_texts, traced_laws
from studies.claims_changing import changing
from studies.claims_rows import (
    IN_PART,
    NOT,
    REPRODUCED,
    Finding,
    acceptance_laws,
    without_serving,
)
from studies.claims_runs import Case, Outcome, run_cases
from studies.claims_trees import chosen_trees
from studies.document import publish, table

MADE = """\
The server's own step loop ran on a virtual clock ([simulator](../evaluate/simulator.md)). All
policies of a load see the same requests and texts, from one seed. *Best fixed* is chosen in
hindsight. Verdicts follow rules in the study: *reproduced* if every part of the claim holds (rates
within 20 %, speed-ups within 10 %, shares as large as theirs), *in part* if some do. If the paper
only says that it adapts, goodput must be within 1 % (load that changes: 2 %) of the best single
choice and within 5 % in each phase. The rules were written after first trial runs. The JSON file
has every run.

Sources: [P] abstract, [Q] quoted by third parties, [A] the first author's public vLLM fork. The
full papers were not available.

Costs, which decide some of the verdicts:

- *engine 7B*: vLLM of mid-2024 on an A100, from verification times in vLLM pull request 5691 by
  SmartSpec's first author (24 to 768 tokens: 15.4 to 96.2 ms). Drafting and rejection sampling are
  rough, from shares of a step in that author's fork.
- *engine 33B*: the same with target passes 2.4 times as long. A guess.
- *fit 8B*, *fit 70B*: the same author's published fits on H100s, with EAGLE and with a 1B draft;
  beyond 32 rows the larger of fit and roofline.

Loads have the reported lengths and acceptance of the data sets."""


TREES = Path("docs/results/trees.json")


def main() -> None:
    folder = Path(sys.argv[1])
    found = run_cases(claims_served.cases())
    laws = [
        drawn_laws("drawn, independent", KindSpec(accept_sd=0.0, persistence=0.0)),
        drawn_laws("drawn, as the simulator's default", KindSpec()),
        *traced_laws(shipped_texts()),
    ]
    findings = [
        *without_serving(),
        *claims_served.served(found),
        *changing(found),
        acceptance_laws(laws),
        chosen_trees(json.loads(TREES.read_text(encoding="utf-8"))),
    ]
    findings.sort(key=lambda finding: finding.source.startswith("Su"))
    notes = claims_served.granularity(found)
    publish(folder, "claims", "The papers' claims", sections(findings, notes), figures(found, laws))


def sections(findings: Sequence[Finding], notes: str) -> list[str]:
    counts = Counter(finding.verdict for finding in findings)
    counted = ", ".join(f"{counts[v]} {v}" for v in (REPRODUCED, IN_PART, NOT))
    lead = (
        f"Which claims of the two papers hold in the simulator? Of {len(findings)}: {counted}. "
        "Rates and batch sizes depend on an engine and a machine that the papers do not fully "
        "describe."
    )
    rows = [(f.claim, f.source, f.theirs, f.ours, f"**{f.verdict}**: {f.why}") for f in findings]
    header = ("claim", "source", "theirs", "ours", "verdict, and why")
    return [lead, notes, table(header, rows), MADE]


def figures(found: Mapping[Case, Outcome], laws: Sequence[Laws]) -> dict[str, object]:
    runs = [asdict(case) | asdict(one) for case, one in found.items()]
    return {"runs": runs, "acceptance": [asdict(one) for one in laws]}


if __name__ == "__main__":
    main()
