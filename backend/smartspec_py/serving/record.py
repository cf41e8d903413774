"""What one request's speculation did, as a JSON document in the shape of vLLM's.

AIPerf and other load generators read it from the root of a response. The field names are vLLM's; a
verification is a step with at least one draft. Steps without drafts are no verifications and appear
nowhere in it: counted as steps that accepted nothing, they would pull the mean length towards 1
just where not to speculate was right.

With h = acceptance_histogram and n = num_spec_steps, readers may rely on: sum(h) = n;
sum(j h[j]) = num_accepted_draft_tokens <= num_draft_tokens; len(h) = num_spec_tokens + 1;
mean_acceptance_length = 1 + accepted / n, the target's own token included;
draft_acceptance_rate = accepted / drafted. per_step_drafted shows how the draft length was chosen.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from smartspec_py.core.types import SpecMetrics


class SpecRecord:
    """Verifications of one request, in order. The loop adds them; read it when the request is over.

    num_spec_tokens: the largest draft length that this request could have had.
    """

    def __init__(self, num_spec_tokens: int) -> None:
        self._num_spec_tokens = num_spec_tokens
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Take in a step; one without drafts is left out."""
        assert 0 <= num_accepted <= num_drafted <= self._num_spec_tokens, "not a verification"
        if num_drafted > 0:
            self._drafted.append(num_drafted)
            self._accepted.append(num_accepted)

    def to_json(self, level: SpecMetrics) -> str:
        """The document; empty at level NONE. A request that never verified has no block in it."""
        if level is SpecMetrics.NONE:
            return ""
        document = {"speculative_decoding": self._fields(level)} if self._drafted else {}
        return json.dumps(document, separators=(",", ":"))

    def _fields(self, level: SpecMetrics) -> dict[str, Any]:
        num_steps = len(self._drafted)
        num_drafted, num_accepted = sum(self._drafted), sum(self._accepted)
        counts = Counter(self._accepted)
        fields: dict[str, Any] = {
            "mean_acceptance_length": 1 + num_accepted / num_steps,
            "draft_acceptance_rate": num_accepted / num_drafted,
            "acceptance_histogram": [counts[j] for j in range(self._num_spec_tokens + 1)],
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": num_drafted,
            "num_spec_tokens": self._num_spec_tokens,
        }
        if level is SpecMetrics.DETAILED:
            fields["per_step_accepted"] = self._accepted
            fields["per_step_drafted"] = self._drafted
        return fields
