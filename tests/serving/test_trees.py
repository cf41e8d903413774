"""Which requests can have trees, what is asked of their proposer, and what is learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from smartspec_py.core.types import SamplingParams, SequenceId, SpecPlan, Verification
from smartspec_py.engines.base import Event, Grammar
from smartspec_py.engines.draft import Draft, Tree
from smartspec_py.engines.proposer import DraftTask, Proposer, ProposerCapabilities
from smartspec_py.serving.request import Request, RequestState
from smartspec_py.serving.speculation import Speculation

SAMPLED = SamplingParams(temperature=1.0)
TREE = Draft((7, 8, 9, 5), tree=Tree((0, 0, 1, 1)))


class Heads(Proposer):
    """Heads with three drafts, or the tree above."""

    capabilities = ProposerCapabilities(
        3, tree_context_len=200, tree_s=(0.5, 0.1), has_position_rates=True
    )

    def __init__(self) -> None:
        self.tasks: list[DraftTask] = []

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        return 3

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        self.tasks += tasks
        return [TREE if task.depth else Draft((7,) * task.draft_len) for task in tasks]


def made(sequence: int = 1, **fields: Any) -> Request:
    given = {"sampling": SamplingParams(), "policy": "goodput", "max_draft_len": 3} | fields
    request = Request(sequence, [1] * 20, 20, 300, **given)
    request.proposers, request.state = ("heads",), RequestState.DECODING
    return request


@pytest.mark.parametrize(
    ("request_", "limits", "depths"),
    [
        (made(), {}, [0, 1, 2, 3]),
        (made(sampling=SAMPLED), {}, [0, 1, 2, 3]),
        (made(sampling=replace(SAMPLED, verification=Verification.REJECTION)), {}, [0]),
        (made(grammar=object()), {}, [0]),
        (made(policy="fixed:3"), {}, [0]),
        (made(policy="goodput_global"), {}, [0]),
        (made(max_draft_len=2), {}, [0, 1, 2]),
        (made(), {1: 3}, [0]),  # where memory is limited
    ],
)
def test_options(request_: Request, limits: dict[int, int], depths: list[int]) -> None:
    (view,) = Speculation({"heads": Heads()}).views([request_], limits, 0.0)
    assert [option.depth for option in view.options] == depths
    assert view.options[0].max_draft_len == request_.max_draft_len
    for option in view.options[1:]:
        assert option.max_draft_len == (8 if option.depth == 1 else 63)
        assert option.draft_s == pytest.approx(0.5 * option.depth)


def test_room_for_trees() -> None:
    """In the row, and in the pass: up to 8 requests share 128 nodes."""
    speculation, long = Speculation({"heads": Heads()}), made()
    long.tokens += [1] * 117
    assert len(speculation.views([long], {}, 0.0)[0].options) == 4
    long.tokens.append(1)
    assert len(speculation.views([long], {}, 0.0)[0].options) == 1
    views = speculation.views([made(number) for number in range(8)], {}, 0.0)
    assert {view.options[3].max_draft_len for view in views} == {16}
    assert views[0].options[2].draft_s == pytest.approx(2 * (0.5 / 8 + 0.1 * 7 / 8))
    many = speculation.views([made(number) for number in range(9)], {}, 0.0)
    assert {len(view.options) for view in many} == {1}


def test_what_is_drafted_and_learned() -> None:
    """The best guess after the root is right, and then the second: so another guess is likely."""
    heads, request = Heads(), made()
    speculation = Speculation({"heads": heads})
    before = speculation.views([request], {}, 0.0)[0].options
    for _ in range(40):
        views = speculation.views([request], {}, 0.0)
        drafts = speculation.propose([request], views, SpecPlan({1: 20}, choices={1: 2}))
        assert drafts == {1: TREE}
        speculation.observe([(request, Event(1, (7, 5, 3), 4, 2))], views)
    assert (heads.tasks[0].depth, heads.tasks[0].draft_len) == (2, 20)
    after = speculation.views([request], {}, 0.0)[0].options
    assert after[0].accept_probs[1] < 0.9 * after[0].accept_probs[0]
    assert after[0].accept_probs[1] < before[0].accept_probs[1]
    accepted = [np.cumprod(option.accept_probs).sum() for option in (before[2], after[2])]
    chains = [np.cumprod(option.accept_probs[:2]).sum() for option in (before[0], after[0])]
    assert accepted[1] / chains[1] > 1.2 * accepted[0] / chains[0], "others are right"
