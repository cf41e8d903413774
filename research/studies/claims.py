"""The claims of the two papers, one row each: theirs, ours, and a verdict made by a stated rule."""

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
## How it was made

The server's own loop, planner and estimates on a virtual clock (docs/evaluate/simulator.md). All
policies of a load see the same requests and texts, from one seed, so that differences between them
are not luck; other seeds were not run. *Best fixed* is always chosen in hindsight. A verdict
follows a rule in the study: *reproduced* where every part of the claim holds (rates within 20 %,
speed-ups within 10 %, shares as large as theirs), *in part* where some do. Where theirs only says
that it adapts, goodput must be within 1 % (dynamic load: 2 %) of the best single choice over the
whole run and within 5 % in each phase. The rules were written after first trial runs, not before.

Sources: [P] abstract, [Q] quoted by third parties, [A] the first author's public vLLM fork. The
papers' bodies could not be opened here.

Costs:

- *engine 7B*: vLLM of mid-2024 on one A100, from verifying times that SmartSpec's first author
  published (vLLM pull request 5691, batch expansion, 24 to 768 tokens: 15.4 to 96.2 ms). Drafting
  and rejection sampling are from the shares of a step in that author's fork; both are rough. A
  token of a prompt costs what a decoded one does.
- *engine 33B*: the same with target passes 2.4 times as long (weights a GPU, on two). A guess.
- *fit 8B*, *fit 70B*: the same author's published linear fits on H100s, with EAGLE and with a draft
  of 1B; beyond 32 rows the larger of fit and roofline.
- *roofline*: data sheets. Shown for the best k only: it makes speculation look better than any
  engine of the papers did.

What the engine's drafts cost decides some verdicts. A first version charged rejection sampling once
a step instead of by draft, and prompts at the data sheet's rate; it gave a best k of 4 -> 1 at
acceptance 0.7, which would be *reproduced*, and 6, 5, 3 for Su et al. at 0.8. It was left because
prompt tokens came out cheaper beside long drafts than beside none.

Loads have the data sets' reported lengths and acceptance. What is not simulated stands in
docs/evaluate/simulator.md."""


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
        f"Of {len(findings)} claims: {counted}. Places on an axis (rates, batches) "
        "depend on an engine and a machine that the papers do not fully describe."
    )
    rows = [(f.claim, f.source, f.theirs, f.ours, f"**{f.verdict}**: {f.why}") for f in findings]
    header = ("claim", "source", "theirs", "ours", "verdict, and why")
    return [
        lead,
        notes,
        table(header, rows),
        "## Figures",
        *(text for finding in findings for text in finding.tables),
        MADE,
    ]


def figures(found: Mapping[Case, Outcome], laws: Sequence[Laws]) -> dict[str, object]:
    runs = [asdict(case) | asdict(one) for case, one in found.items()]
    return {"runs": runs, "acceptance": [asdict(one) for one in laws]}


if __name__ == "__main__":
    main()
