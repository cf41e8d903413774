"""Is the draft's own confidence worth using? Real drafts of the shipped pair, charged with known
costs: with and without `core.confidence`, against the best fixed draft length in hindsight.

Recorded at every position of every text, by the proposer itself: what it drafts there, how sure it
is of each draft, and how many are right. Texts are coupled or greedy, so they do not depend on what
was drafted, and one recording serves every arm. An arm then goes through the texts in steps, B rows
at once; it learns from its own steps only, from nothing at the start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smartspec_py.core.acceptance import AcceptanceTracker
from smartspec_py.core.confidence import (
    ConfidenceCalibrator,
    DraftJudge,
    RecentGoodput,
    StepPrices,
)
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.planner import plan
from smartspec_py.core.types import DraftOption, SequenceView
from smartspec_py.engines.base import DraftTask
from smartspec_py.engines.noise import gumbel_noise, noise_key
from smartspec_py.engines.packed import RowInput
from smartspec_py.progress import tracked
from smartspec_py.proposers.draft_model import DraftModelProposer
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.config import DRAFT_MODEL, ServerConfig
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_py.sim.hardware import gpu_hardware
from smartspec_py.tracing.make import FinishedText, write_texts
from smartspec_py.workloads import WORKLOADS, generate
from studies.document import publish, table

PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
SEED, NUM_PROMPTS, MAX_TOKENS, CONTEXT = 7_300_001, 40, 96, 200
DEPTH, NUM_ROWS = 7, 32
TEMPERATURES = (0.0, 0.8)

JUDGE_S, JUDGE_PASS_S = 55e-6, 31e-6
"""What the feature's own arithmetic takes at 32 rows, measured on a loaded machine: of a step
(setting up 8 us, trimming 22, learning 25) and of each pass (who goes on 18, calibrating 13)."""

CPU_88M = CostModel(
    PassTable(
        (1, 32),
        (1, 2, 3, 4, 6, 8),
        (
            (0.0333, 0.0341, 0.0349, 0.0373, 0.0387, 0.0408),
            (0.140, 0.220, 0.280, 0.335, 0.445, 0.560),
        ),
    ),
    PassTable((1, 32), (1,), ((0.00235,), (0.007,))),
)
"""The shipped pair at 88 M on two cores: a profile at one row; at 32 rounded from the steps in
32-at-once-88m.json, beyond six tokens a row on the same slope."""

H100 = replace(gpu_hardware("h100", 1, "llama-3-8b", "eagle", 64).cost, host_s=0.001)
"""Published fit, with a millisecond of the loop's own."""

CASES = (
    ("88 M on a CPU", 1, CPU_88M),
    ("88 M on a CPU", 32, CPU_88M),
    *(("8B and EAGLE head on an H100", rows, H100) for rows in (1, 8, 32, 64)),
)
FIXED = tuple(f"fixed:{k}" for k in range(DEPTH + 1))
ARMS = ("goodput", "trim", "stop", "stop and trim")


@dataclass(frozen=True)
class Recorded:
    """num_drawn: draws of the target. steps: at positions 1.. the number of right drafts, and the
    confidence of each of at most DEPTH."""

    workload: str
    temperature: float
    num_drawn: int
    steps: Sequence[tuple[int, Sequence[float]]]

    def drafts(self, pos: int) -> tuple[int, Sequence[float]]:
        return self.steps[pos - 1] if pos <= len(self.steps) else (0, ())


class DraftAll:
    """A rule under which everybody drafts on; for the confidences."""

    def going_on(self, members: Sequence[int]) -> Sequence[bool]:
        return [True] * len(members)

    def hear(self, members: Sequence[int], confidences: Sequence[float]) -> None:
        """They are in the drafts."""


@dataclass
class Row:
    """A text under way: pos tokens were generated."""

    number: int
    text: Recorded
    pos: int = 1


class Arm:
    """One way to choose, over the texts with B rows; the last rows are not counted once no text is
    left to fill a row."""

    def __init__(self, name: str, cost: CostModel, num_rows: int) -> None:
        self._name, self._cost, self._num_rows = name, cost, num_rows
        self._tracker, self._calibrator = AcceptanceTracker(), ConfidenceCalibrator()
        self._recent = RecentGoodput()
        num_tokens = np.arange(num_rows, num_rows * (DEPTH + 1) + 1, dtype=np.float64)
        self._verify_s = cost.targets_s(num_rows, num_tokens, CONTEXT) + cost.step_host_s(num_rows)
        self._counts = np.zeros(3)
        self._seconds = 0.0
        self._num_steps = 0

    def run(self, texts: Sequence[Recorded]) -> dict[str, float]:
        waiting = [Row(number, text) for number, text in enumerate(texts)][::-1]
        live: list[Row] = []
        while len(waiting) + len(live) >= self._num_rows:
            while len(live) < self._num_rows:
                live.append(waiting.pop())
            self._step(live)
            for row in live:
                if row.pos >= row.text.num_drawn:
                    self._tracker.release(row.number)
            live = [row for row in live if row.pos < row.text.num_drawn]
        num_tokens, num_drafted, num_verified = self._counts.tolist()
        num_row_steps = self._num_steps * self._num_rows
        return {
            "tokens_per_s": num_tokens / self._seconds,
            "drafted": num_drafted / num_row_steps,
            "verified": num_verified / num_row_steps,
            "tokens": num_tokens / num_row_steps,
        }

    def _step(self, live: Sequence[Row]) -> None:
        drafts = [row.text.drafts(row.pos) for row in live]
        asked = [min(k, len(d[1])) for k, d in zip(self._asked(live), drafts, strict=True)]
        judge = self._judge(live) if self._name in ARMS[1:] else None
        lengths = np.array(asked)
        if judge is not None:
            lengths = self._drafted(judge, asked, drafts)
        draft_s = float(self._cost.draft_pass_s[_rows_by_pass(lengths)].sum())
        verified = lengths
        if judge is not None and "trim" in self._name and lengths.any():
            verified = judge.num_to_verify(lengths.tolist())
        accepted = np.minimum(verified, [right for right, _ in drafts])
        step_s = draft_s + float(self._verify_s[verified.sum()])
        if judge is not None and any(asked):
            judge.observe(verified.tolist(), accepted.tolist())
            step_s += JUDGE_S + JUDGE_PASS_S * (int(lengths.max()) + 1)
        self._apply(live, lengths, verified, accepted, step_s)

    def _asked(self, live: Sequence[Row]) -> Sequence[int]:
        """Draft lengths as planned; whoever stops by confidence may go as deep as it likes."""
        if self._name in FIXED:
            return [FIXED.index(self._name)] * len(live)
        probs = self._tracker.accept_probs([row.number for row in live], DEPTH)
        left = [max(0, min(DEPTH, MAX_TOKENS - row.pos - 1)) for row in live]
        views = [
            SequenceView(
                row.number,
                CONTEXT,
                MAX_TOKENS - row.pos,
                "goodput",
                (DraftOption(most, p[:most]),),
            )
            for row, most, p in zip(live, left, probs, strict=True)
        ]
        planned = plan(views, self._cost).draft_lens
        lengths = [planned[row.number] for row in live]
        if "stop" in self._name:
            return [DEPTH if k else 0 for k in lengths]
        return lengths

    def _judge(self, live: Sequence[Row]) -> DraftJudge:
        every = [True] * len(live)
        prices = StepPrices(self._verify_s, self._cost.draft_pass_s, self._recent.price)
        return DraftJudge(self._calibrator, [""] * len(live), every, every, DEPTH, prices)

    def _drafted(
        self,
        judge: DraftJudge,
        asked: Sequence[int],
        drafts: Sequence[tuple[int, Sequence[float]]],
    ) -> Any:
        """Pass by pass, as the proposer does it; [B]."""
        lengths = [0] * len(asked)
        members = list(range(len(asked)))
        for depth in range(DEPTH):
            members = [i for i in members if asked[i] > depth]
            if "stop" in self._name and members:
                goes = judge.going_on(members)
                members = [i for i, on in zip(members, goes, strict=True) if on]
            if not members:
                break
            judge.hear(members, [drafts[i][1][depth] for i in members])
            for i in members:
                lengths[i] += 1
        return np.array(lengths)

    def _apply(
        self, live: Sequence[Row], drafted: Any, verified: Any, accepted: Any, step_s: float
    ) -> None:
        numbers = [row.number for row in live]
        self._tracker.observe(numbers, verified.tolist(), accepted.tolist())
        num_tokens = 0
        for row, kept in zip(live, accepted.tolist(), strict=True):
            num_tokens += min(kept + 1, row.text.num_drawn - row.pos)
            row.pos += kept + 1
        self._recent.observe(num_tokens, step_s)
        self._counts += num_tokens, drafted.sum(), verified.sum()
        self._seconds += step_s
        self._num_steps += 1


def main() -> None:
    """argv: the folder to write to."""
    torch.set_num_threads(1)
    texts, features = record()
    by_case = [
        case_of(name, rows, cost, temperature, of_temperature(texts, temperature))
        for (name, rows, cost), temperature in product(CASES, TEMPERATURES)
    ]
    by_workload = [
        case_of(workload, 1, CPU_88M, temperature, of_temperature(texts, temperature, workload))
        for workload, temperature in product(WORKLOADS, TEMPERATURES)
    ]
    write(Path(sys.argv[1]), by_case, by_workload, features)


def case_of(
    name: str, num_rows: int, cost: CostModel, temperature: float, texts: Sequence[Recorded]
) -> dict[str, Any]:
    """Every arm. Where there are many rows the texts are served three times over: a few dozen steps
    would show the start alone."""
    served = list(texts) * 3 if num_rows > 1 else texts
    if num_rows == 1:
        served = served[:60]
    found = {arm: Arm(arm, cost, num_rows).run(served) for arm in (*FIXED, *ARMS)}
    best = max(FIXED, key=lambda arm: found[arm]["tokens_per_s"])
    return {
        "name": name,
        "rows": num_rows,
        "temperature": temperature,
        "best_fixed": best,
        "arms": found,
        "over_best": {
            arm: one["tokens_per_s"] / found[best]["tokens_per_s"] for arm, one in found.items()
        },
    }


def of_temperature(
    texts: Sequence[Recorded], temperature: float, workload: str | None = None
) -> list[Recorded]:
    """In an order that mixes the workloads."""
    found = [
        text
        for text in texts
        if text.temperature == temperature and workload in (None, text.workload)
    ]
    order = np.random.default_rng(SEED).permutation(len(found))
    return [found[i] for i in order.tolist()]


def record() -> tuple[list[Recorded], list[tuple[float, float, dict[str, float]]]]:
    """The recordings, and how well each feature tells what is accepted; see `feature_losses`."""
    engine_settings = {
        "kind": "torch",
        "model": str(PAIR / "target"),
        "draft": str(PAIR / "draft"),
        "dtype": "float32",
        "num_threads": 1,
    }
    limits = {
        "max_sequences": NUM_ROWS,
        "max_draft_len": DEPTH,
        "max_context_len": 384,
        "max_queue": 2 * NUM_ROWS,
    }
    config = ServerConfig.model_validate({"engine": engine_settings, "limits": limits})
    engine = build_engine(config, Path.cwd())
    server = Server(engine, config)
    server.start()
    jobs = list(product(TEMPERATURES, WORKLOADS, range(NUM_PROMPTS)))
    params = [
        GenerateParams(
            text=generate(workload, SEED, index).prompt,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            seed=SEED + index,
            policy="none",
        )
        for temperature, workload, index in jobs
    ]
    try:
        written = write_texts(server, params, 2 * NUM_ROWS)
        texts = list(tracked("generating", written, "texts", len(params)))
    finally:
        server.stop()
    proposer = engine.proposers[DRAFT_MODEL]
    assert isinstance(proposer, DraftModelProposer)
    finished = [text for text in texts if isinstance(text, FinishedText)]
    assert len(finished) == len(jobs)
    recorded = []
    for start in range(0, len(jobs), NUM_ROWS):
        steps = draft_everywhere(proposer, finished[start : start + NUM_ROWS], start)
        for (temperature, workload, _), text, of_text in zip(
            jobs[start:], finished[start:], steps, strict=False
        ):
            recorded.append(Recorded(workload, temperature, len(text.drawn), of_text))
    losses = [
        (
            temperature,
            *feature_losses(
                proposer, [t for t in finished if t.sampling.temperature == temperature]
            ),
        )
        for temperature in TEMPERATURES
    ]
    return recorded, losses


def draft_everywhere(
    proposer: DraftModelProposer, texts: Sequence[FinishedText], first: int
) -> list[list[tuple[int, Sequence[float]]]]:
    """`Recorded.steps` of each text, by the proposer's own passes; first: numbers the texts."""
    found: list[list[tuple[int, Sequence[float]]]] = [[] for _ in texts]
    pos = 1
    while live := [i for i, t in enumerate(texts) if pos < min(len(t.drawn), t.max_tokens - 1)]:
        tasks = [
            DraftTask(
                first + i,
                [*texts[i].prompt, *texts[i].drawn[:pos]],
                len(texts[i].prompt),
                min(DEPTH, texts[i].max_tokens - pos - 1),
                texts[i].sampling,
            )
            for i in live
        ]
        for i, draft in zip(live, proposer.propose(tasks, DraftAll()), strict=True):
            pairs = enumerate(zip(draft.tokens, texts[i].drawn[pos:], strict=False))
            wrong = (n for n, (drafted, true) in pairs if drafted != true)
            num_right = next(wrong, min(len(draft.tokens), len(texts[i].drawn) - pos))
            found[i].append((num_right, draft.confidences))
            proposer.observe(first + i, 0)
        pos += 1
    for i in range(len(texts)):
        proposer.release(first + i)
    return found


def feature_losses(
    proposer: DraftModelProposer, texts: Sequence[FinishedText]
) -> tuple[float, dict[str, float]]:
    """Nats a draft: the entropy of acceptance, and the loss of each feature in 16 bins of equal
    counts that were filled on the other half of the texts. Drafts given the true text."""
    rows, sides = [], []
    for number, text in enumerate(texts):
        known = [*text.prompt, *text.drawn]
        inputs = [RowInput(0, 0, known[:-1], len(text.drawn))]
        logits = proposer._runner.forward(inputs).logits.double()
        for i, true in enumerate(text.drawn):
            rows.append(_features(logits[i], text, i, true))
            sides.append(number % 2 == 0)
    values, side = np.array(rows), np.array(sides)
    is_right = values[:, 0] > 0
    rate = float(is_right.mean())
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    names = ("probability of the draft", "largest probability", "lead with the noise")
    losses = {name: _loss(values[:, 1 + i], is_right, side) for i, name in enumerate(names)}
    return float(entropy), losses


def _features(
    logits: torch.Tensor, text: FinishedText, index: int, true: int
) -> tuple[float, float, float, float]:
    """Whether the draft is right; then the features, in the order of `feature_losses`."""
    temperature, perturbed = text.sampling.temperature, logits
    if temperature:
        key = torch.tensor([noise_key(text.sampling.seed, len(text.prompt) + index)])
        noise = gumbel_noise(key, torch.arange(len(logits))[None])[0]
        perturbed = logits + temperature * noise
    lead = torch.topk(perturbed, 2)
    draft = int(lead.indices[0])
    log_probs = logits.log_softmax(-1)
    return (
        float(draft == true),
        float(log_probs[draft]),
        float((logits / (temperature or 1.0)).log_softmax(-1).max()),
        float(lead.values[0] - lead.values[1]),
    )


def _loss(feature: Any, is_right: Any, side: Any) -> float:
    total = 0.0
    for held in (side, ~side):
        edges = np.quantile(feature[~held], np.linspace(0, 1, 17)[1:-1])
        bins = np.searchsorted(edges, feature[~held])
        mean = is_right[~held].mean()
        probs = np.bincount(bins, is_right[~held], 16) + 2 * mean
        probs /= np.bincount(bins, minlength=16) + 2
        told = probs[np.searchsorted(edges, feature[held])]
        total -= np.log(np.where(is_right[held], told, 1 - told)).sum()
    return float(total / len(feature))


def write(
    folder: Path,
    by_case: Sequence[dict[str, Any]],
    by_workload: Sequence[dict[str, Any]],
    features: Sequence[tuple[float, float, dict[str, float]]],
) -> None:
    head = ("", "rows", "temperature", "best fixed", "over none", *ARMS, "over goodput")
    lengths_head = ("", "rows", "temperature", *(f"{arm}: drafted, verified" for arm in ARMS))
    sections = [
        _verdict(by_case),
        table(head, [_line(one) for one in by_case]),
        "Tokens a second over those of the best of fixed:0..7 in hindsight; the last column is "
        "*stop and trim* over *goodput*. *goodput*: the default policy, without confidences. "
        "*trim*: the same lengths, then only drafts worth it are verified. *stop*: whoever the "
        "planner lets draft does so until its next draft is not worth a pass; all are verified.",
        "At one row, by workload (88 M on a CPU):",
        table(head, [_line(one) for one in by_workload]),
        "Drafts a sequence and step:",
        table(lengths_head, [_lengths(one) for one in by_case]),
        "*trim* alone drafts deeper than *goodput*: the acceptance estimates that plan lengths see "
        "only verified drafts, which are the surer ones, and rise. Where passes are dear beside "
        "slots (H100) that loses 2 %, its own cost included. With *stop* lengths do not depend on "
        "those estimates, only whether to draft at all does.",
        "## Which feature",
        "Nats a draft lost in telling whether it is accepted, from a feature in 16 bins; less is "
        "better. Without any feature it is the entropy. The *lead with the noise* is how far the "
        "draft is ahead of the second after the shared Gumbel noise was added to the logits.",
        table(
            ("temperature", "no feature", *features[0][2]),
            [(t, entropy, *losses.values()) for t, entropy, losses in features],
        ),
        "So the probability of the drafted token is used, without temperature. A token that the "
        "noise carried to the top leads by as much as any other, but a surer target does not draw "
        "it.",
        "## How it was made, and what it does not show",
        f"{NUM_PROMPTS} prompts of each of four workloads at two temperatures (coupled), drafted "
        "by the shipped draft model at every position, so that every arm sees what it would really "
        "have drafted there, also behind a wrong draft. The planner knows costs exactly: 88 M from "
        "a profile (one row) and `32-at-once-88m.json` (32 rows; a draft pass of 7 ms there is "
        "assumed), H100 from the published fit (above 32 rows "
        "the roofline), with 1 ms for the loop. The feature's own arithmetic is charged, "
        f"{JUDGE_S * 1e6:.0f} us a step and {JUDGE_PASS_S * 1e6:.0f} us a pass: on the H100 1 to "
        "2 % of a step, as much as is left of the gain at 8 rows. Each arm learns "
        "from nothing, inside the time that is counted. With more than one row the "
        "texts come three times over.",
        "Not shown: other pairs. This one is small and undertrained, and its draft knows well when "
        "it guesses (the table above); one that knows it less gains less. The H100 is charged for "
        "the acceptance of this pair, not of its own. On a GPU each pass also has to hand one more "
        "number a row to the host, which is not charged. Nothing here was timed on a server.",
    ]
    figures = {"cases": by_case, "workloads": by_workload, "features": features}
    publish(folder, "confidence", "The draft's own confidence", sections, figures)


def _verdict(by_case: Sequence[dict[str, Any]]) -> str:
    def span(names: str, rows: Sequence[int]) -> str:
        found = [
            (one["over_best"]["stop and trim"], one["over_best"]["goodput"])
            for one in by_case
            if names in one["name"] and one["rows"] in rows
        ]
        over = [both / without for both, without in found]
        best = [both for both, _ in found]
        return (
            f"{min(over):.3f} to {max(over):.3f} of the default policy without it, "
            f"{min(best):.3f} to {max(best):.3f} of the best fixed length"
        )

    return (
        "**It pays where drafts or slots are dear beside the step, and about its own cost "
        "elsewhere.** Tokens a second with the draft's own confidence used to stop drafting and "
        f"to trim what is verified: on a CPU (1 and 32 rows) {span('CPU', (1, 32))}; on an H100 at "
        f"one row {span('H100', (1,))}; at 8 and 32 rows {span('H100', (8, 32))}; at 64 rows "
        f"{span('H100', (64,))}. Most of it is from stopping early; trimming adds where a slot is "
        "dear."
    )


def _line(one: dict[str, Any]) -> list[object]:
    over = one["over_best"]
    return [
        one["name"],
        one["rows"],
        one["temperature"],
        one["best_fixed"],
        1.0 / over["fixed:0"],
        *(over[arm] for arm in ARMS),
        over["stop and trim"] / over["goodput"],
    ]


def _lengths(one: dict[str, Any]) -> list[object]:
    shown = (one["arms"][arm] for arm in ARMS)
    counts = [f"{arm['drafted']:.1f}, {arm['verified']:.1f}" for arm in shown]
    return [one["name"], one["rows"], one["temperature"], *counts]


def _rows_by_pass(lengths: Any) -> Any:
    """Sequences in the draft passes 1..DEPTH."""
    return (lengths[:, None] > np.arange(DEPTH)).sum(axis=0)


if __name__ == "__main__":
    main()
