"""Oracle traces against what a real server accepts, step by step; their file; step traces."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from smartspec_bench.prompts import Prompt, PromptFileError, read_prompts
from smartspec_bench.workloads import generate as make_document
from smartspec_cli.commands.trace import trace
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan.planner import PlannerSettings, plan
from smartspec_py.core.types import (
    NO_TOKEN,
    DraftOption,
    FinishReason,
    SamplingParams,
    SequenceView,
    SpecMetrics,
    SpecPlan,
    Verification,
)
from smartspec_py.engines.base import Event
from smartspec_py.serving.config import DRAFT_MODEL, HEADS, PROMPT_LOOKUP, ServerConfig
from smartspec_py.serving.request import GenerateParams, RequestError
from smartspec_py.serving.server import Engine, Server
from smartspec_py.serving.step import Decision, Reason, StepRecord
from smartspec_py.serving.step_trace import NUMBERS, StepTraceFile
from smartspec_sim.acceptance import HEADS_WIDTH, NO_RANK
from smartspec_sim.traces.files import TraceError
from smartspec_sim.traces.make import FinishedText, finished_text, trace_text, write_texts
from smartspec_sim.traces.oracle import (
    OracleHeader,
    OracleSequence,
    ProposerTrace,
    read_oracle,
    run_lengths,
    write_oracle,
)
from smartspec_sim.traces.steps import decide, read_steps, unexplained, write_steps
from smartspec_sim.traces.walks import WalkStep, rates, walk
from smartspec_sim.workload import PhaseSpec, WorkloadSpec, draw, with_texts
from smartspec_testing.local import LocalSink, generate

PAIR = Path(__file__).parents[1] / "engines_build" / "tiny"
MODELS = ["--model", str(PAIR / "target"), "--draft", str(PAIR / "draft")]
MAX_DRAFT_LEN = 7
DRAFT_LENS = (1, 3, 7)
PROPOSERS = (DRAFT_MODEL, PROMPT_LOOKUP, HEADS)
SEED = 6_100_003

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=1": {"temperature": 1.0},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "min_tokens": 30,
    },
    "truncated": {
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "bad_words": ("and",),
        "ignore_eos": True,
    },
}
PROMPTS = [("qa", 48), ("sql", 32), ("summarize", 32), ("chat", 24), ("qa", 1), ("sql", 2)]
"""Workload and max_tokens: texts that end by themselves, that are cut, and that have no step."""


ONE_REQUEST = WorkloadSpec(phases=(PhaseSpec(duration_s=1, rate=1),), arrivals="constant")


@dataclass(frozen=True)
class Served:
    """A trace, and the steps (drafted, accepted) of each proposer and draft length."""

    sequence: OracleSequence
    steps: dict[tuple[str, int], list[tuple[int, int]]]


@contextmanager
def pair_server() -> Iterator[tuple[Server, Engine]]:
    from smartspec_py.serving.build import build_engine

    folders = {"model": "target", "draft": "draft", "heads": "heads"}
    engine = {"kind": "torch", **{key: str(PAIR / name) for key, name in folders.items()}}
    limits = {"max_sequences": 16, "max_draft_len": MAX_DRAFT_LEN, "max_context_len": 384}
    config = ServerConfig.model_validate(
        {"engine": {**engine, "dtype": "float32", "num_threads": 1}, "limits": limits}
    )
    built = build_engine(config, Path())
    server = Server(built, config)
    server.start()
    try:
        yield server, built
    finally:
        server.stop()


def params_of(sampling: str) -> list[GenerateParams]:
    return [
        GenerateParams(
            text=make_document(workload, SEED, index).prompt,
            max_tokens=max_tokens,
            seed=SEED + index,
            policy="none",
            **{
                name: min(value, max_tokens) if name == "min_tokens" else value
                for name, value in SAMPLINGS[sampling].items()
            },
        )
        for index, (workload, max_tokens) in enumerate(PROMPTS)
    ]


def steps_of(sink: LocalSink) -> list[tuple[int, int]]:
    assert sink.error is None
    assert sink.summary is not None
    found = json.loads(sink.summary.spec_metrics).get("speculative_decoding", {})
    pairs = zip(found.get("per_step_drafted", []), found.get("per_step_accepted", []), strict=True)
    return list(pairs)


@pytest.fixture(scope="module")
def served() -> dict[str, list[Served]]:
    """By sampling: each text once without speculation, traced, and once under every draft length
    and proposer."""
    arms = [(proposer, k) for proposer in PROPOSERS for k in DRAFT_LENS]
    plain = [request for name in SAMPLINGS for request in params_of(name)]
    asked = [
        replace(request, policy=f"fixed:{k}", proposer=proposer, spec_metrics=SpecMetrics.DETAILED)
        for request in plain
        for proposer, k in arms
    ]
    with pair_server() as (server, engine):
        texts = list(write_texts(server, plain, len(plain)))
        steps = iter(list(map(steps_of, generate(server, asked))))
    found = []
    for text in texts:
        assert isinstance(text, FinishedText)
        traced = trace_text(engine, text, "test", MAX_DRAFT_LEN)
        found.append(Served(traced, {arm: next(steps) for arm in arms}))
    size = len(PROMPTS)
    return {name: found[i * size : (i + 1) * size] for i, name in enumerate(SAMPLINGS)}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("draft_len", DRAFT_LENS)
def test_a_trace_says_what_a_server_accepts(
    served: dict[str, list[Served]], name: str, proposer: str, draft_len: int
) -> None:
    """Step by step and exactly. In float32 a pass over the whole text and passes of a few tokens
    differ by at most 2e-5 in a logit; some 500 draws here have their two best so close on about one
    machine in a hundred, and there always.

    The server's record leaves steps without drafts out. A draft model or head that draws the
    end token wrongly drafts less than the trace says; it was rejected there anyway.
    """
    for one in served[name]:
        steps = [s for s in walk(one.sequence, proposer, draft_len) if s.num_drafted]
        found = one.steps[proposer, draft_len]
        assert [s.num_accepted for s in steps] == [accepted for _, accepted in found]
        for step, (drafted, accepted) in zip(steps, found, strict=True):
            if proposer == PROMPT_LOOKUP or accepted == drafted:
                assert step.num_drafted == drafted
            assert step.num_drafted >= drafted > 0


def test_the_texts_above_are_worth_comparing(served: dict[str, list[Served]]) -> None:
    """Both endings, end tokens that were drafted, steps that accepted all or nothing."""
    every = [one for group in served.values() for one in group]
    assert {one.sequence.finish for one in every} == {FinishReason.STOP, FinishReason.LENGTH}
    for proposer in (DRAFT_MODEL, PROMPT_LOOKUP):
        accepted = {n for one in every for _, n in one.steps[proposer, 7]}
        assert {0, 1, 2, 3, 7} <= accepted
    stopped = [one.sequence for one in every if one.sequence.finish is FinishReason.STOP]
    assert any(one.accepted(DRAFT_MODEL, one.num_generated, 1) for one in stopped)
    available = {n for one in every for n in one.sequence.proposers[PROMPT_LOOKUP].available or b""}
    assert {0, 1, 7} <= available


def test_guesses_after_a_wrong_one_are_traced(served: dict[str, list[Served]]) -> None:
    """Of the wrong best guesses for the next token, 0.22 to 0.45 had a right one among the next
    three on the four workloads. There is no guess for the first token, and none after the last."""
    ranks = [one.sequence.proposers[HEADS].ranks or () for one in served["greedy"]]
    assert all(set(of_text[0]) == {NO_RANK} for of_text in ranks)
    assert all(of_text[-1][1:] == bytes([NO_RANK] * 3) for of_text in ranks)
    wrong = [of_position[0] for of_text in ranks for of_position in of_text[1:] if of_position[0]]
    assert len(wrong) > 30
    assert 0.1 < sum(rank < HEADS_WIDTH for rank in wrong) / len(wrong) < 0.7


def test_run_lengths_by_hand() -> None:
    """Right, right, wrong, right, right, right: runs 2 1 0 3 2 1. With at most 2 drafts and 6
    tokens in all, 5 4 3 2 1 0 may be accepted at positions 0 to 5: 2 1 0 2 1 0. With room for 7
    tokens the last may be accepted too."""
    matches = [True, True, False, True, True, True]
    assert list(run_lengths(matches, 2, 6)) == [2, 1, 0, 2, 1, 0]
    assert list(run_lengths(matches, 7, 7)) == [2, 1, 0, 3, 2, 1]
    assert run_lengths([], 7, 7) == b""


def by_hand() -> OracleSequence:
    """Eight draws, the last the end token, of at most 10 tokens."""
    return OracleSequence(
        workload="hand",
        num_prompt=5,
        max_tokens=10,
        num_generated=7,
        finish=FinishReason.STOP,
        sampling=SamplingParams(temperature=0.5, seed=2**64 - 1, logit_bias=((3, 0.1),)),
        proposers={
            DRAFT_MODEL: ProposerTrace(bytes([1, 0, 3, 2, 1, 0, 2, 1])),
            PROMPT_LOOKUP: ProposerTrace(bytes([0, 0, 0, 1, 0, 0, 0, 0]), bytes([0, 0, 0, 3] * 2)),
        },
    )


@pytest.mark.parametrize(
    ("proposer", "draft_len", "expected"),
    [
        (DRAFT_MODEL, 0, [(pos, 0, 0) for pos in range(1, 8)]),
        (DRAFT_MODEL, 1, [(1, 1, 0), (2, 1, 1), (4, 1, 1), (6, 1, 1)]),
        (DRAFT_MODEL, 4, [(1, 4, 0), (2, 4, 3), (6, 2, 2)]),
        (PROMPT_LOOKUP, 2, [(1, 0, 0), (2, 0, 0), (3, 2, 1), (5, 0, 0), (6, 0, 0), (7, 2, 0)]),
    ],
)
def test_walk_by_hand(proposer: str, draft_len: int, expected: list[tuple[int, int, int]]) -> None:
    """At 6 of 10 tokens the draft ends with the end token; at 7 there is room for two drafts, since
    the target adds the last token itself."""
    assert list(walk(by_hand(), proposer, draft_len)) == [WalkStep(*step) for step in expected]


def test_rates_by_hand() -> None:
    """At 4 drafts the steps accept 0 of 4, 3 of 4 and 2 of 2. First drafts: 2 of 3 right; second 2
    of 2; third 1 of 1; the fourth 0 of 1. A step of 4 gains 1 + 5/3 tokens; of 1: 1 + 3/4."""
    found = rates([by_hand()], DRAFT_MODEL, 4, (1, 4))
    assert found.accept_probs == (2 / 3, 1.0, 1.0, 0.0)
    assert found.mean_acceptance_len == {1: 1.75, 4: 1 + 5 / 3}
    assert (found.num_texts, found.num_tokens) == (1, 7)
    assert rates([by_hand()], PROMPT_LOOKUP, 4, ()).accept_probs == (0.5, 0.0, None, None)


def test_synthetic_texts_have_the_acceptance_they_were_given() -> None:
    """Steps accept 1 + .8 + .4 + .3 = 2.5 tokens on average, with a deviation below 1.3 each. Each
    begins where the last ended, so 40,000 positions are 16,000 steps and the mean deviates by less
    than 0.0103. Bounds of 0.052 are five deviations: a false alarm in a million seeds."""
    sequence = OracleSequence.from_probabilities(np.random.default_rng(1), (0.8, 0.5, 0.75), 40_000)
    found = rates([sequence], DRAFT_MODEL, 3, (1, 3))
    assert found.mean_acceptance_len[3] == pytest.approx(2.5, abs=0.052)
    assert found.mean_acceptance_len[1] == pytest.approx(1.8, abs=0.052)
    assert found.accept_probs == pytest.approx((0.8, 0.5, 0.75), abs=0.052)
    assert sequence.accepted(DRAFT_MODEL, 39_999, 3) == 0, "the last token is the target's own"
    always = OracleSequence.from_probabilities(np.random.default_rng(1), (1.0,) * 9, 5)
    assert list(always.proposers[DRAFT_MODEL].accepted) == [4, 3, 2, 1, 0]


HEADER = OracleHeader("big", "small", "float32", 4, 9, "2030-01-01", {"lookup": {"max_ngram": 4}})


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_oracle(path, HEADER, [by_hand(), by_hand()])
    assert read_oracle(path) == (HEADER, [by_hand(), by_hand()])
    assert [p.name for p in tmp_path.iterdir()] == ["trace.jsonl"]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"version":2', '"version":3', "of version 3, not 'smartspec oracle trace' of version 2"),
        ('"seed":9,', "", "line 1: "),
        ('"num_generated":7', '"num_generated":8', "line 2: draft_model: 8 positions, not 9"),
        ('"accepted":[1,', '"accepted":[300,', "line 2: bytes must be in range(0, 256)"),
        ('"finish":"stop",', "", "line 2: 'finish' is missing"),
        ('"workload":"hand"', '"workload"', "line 2: Expecting ':'"),
    ],
)
def test_a_broken_file_names_its_line(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_oracle(path, HEADER, [by_hand()])
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(TraceError) as caught:
        read_oracle(path)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("sampling", "finish", "sentence"),
    [
        (SamplingParams(verification=Verification.REJECTION), "length", "rejection"),
        (SamplingParams(), "cancelled", "cut short"),
    ],
)
def test_what_depends_on_more_than_the_target_is_refused(
    sampling: SamplingParams, finish: str, sentence: str
) -> None:
    request: Any = SimpleNamespace(sampling=sampling, tokens=[1, 2], num_prompt=2, max_tokens=3)
    with pytest.raises(TraceError, match=sentence):
        finished_text(request, [5], FinishReason(finish))


COST = CostModel(
    target=PassTable((1, 64), (1, 16), ((0.010, 0.013), (0.020, 0.070))),
    draft=PassTable((1, 64), (1,), ((0.001,), (0.002,))),
    catch_up_s=1 / 3e4,
)
DEARER = replace(COST, draft=PassTable((1, 64), (1,), ((0.008,), (0.016,))))


def random_views(rng: np.random.Generator) -> list[SequenceView]:
    """Up to 12 sequences; every field varies."""
    views = []
    for sequence in range(int(rng.integers(0, 12))):
        most = int(rng.integers(0, 8))
        views.append(
            SequenceView(
                sequence=sequence,
                context_len=int(rng.integers(1, 500)),
                remaining=int(rng.integers(1, 100)),
                policy=str(rng.choice(["none", "fixed:3", "goodput", "goodput"])),
                options=(
                    DraftOption(
                        max_draft_len=most,
                        accept_probs=tuple(rng.random(most).tolist()),
                        draft_lag=int(rng.integers(0, 100)),
                        has_draft_passes=bool(rng.random() < 0.7),
                    ),
                ),
            )
        )
    return views


def recorded(seeds: range) -> StepTraceFile:
    steps = []
    for seed in seeds:
        views = random_views(np.random.default_rng(seed))
        forced = {v.sequence: seed % 4 for v in views} if seed % 5 == 0 else {}
        settings = PlannerSettings(None, seed % 4, seed % 3, seed % 5, forced)
        cost, reason = (
            replace(COST, draft_factor=1 + seed % 2),
            Reason.GUARD if forced else Reason.PLANNED,
        )
        decision = Decision(plan(views, cost, settings), views, cost, settings, reason)
        lengths = {view.sequence: seed for view in views}
        steps.append(
            StepRecord(
                decision=decision,
                events=[Event(v.sequence, (NO_TOKEN,) * 2, 3, 1) for v in views],
                drafted=lengths,
                **dict.fromkeys(NUMBERS, seed / 7),
            )
        )
    return StepTraceFile({"model": "tiny"}, COST, steps)


def test_a_recorded_plan_is_decided_again(tmp_path: Path) -> None:
    """From the file alone, to the last bit of what is expected; another cost decides otherwise."""
    trace = recorded(range(60))
    path = tmp_path / "steps.jsonl"
    write_steps(path, trace)
    again = read_steps(path)
    assert again == trace
    assert unexplained(again.steps) == []
    plans = [step.decision.plan for step in trace.steps]
    assert [decide(step) for step in again.steps] == plans
    dearer = [decide(step, DEARER) for step in again.steps]
    assert any(new.draft_lens != old.draft_lens for new, old in zip(dearer, plans, strict=True))
    chosen = [k for old in plans for k in old.draft_lens.values()]
    assert len(set(chosen)) > 4, "the views must leave something to decide"


def test_cost_models_come_back_with_what_prompts_take(tmp_path: Path) -> None:
    """Every table; and a trace from before prompts were measured is read without."""
    cost = replace(COST, prompt=PassTable((1,), (1, 16), ((1 / 3, 2.0),)))
    path = tmp_path / "steps.jsonl"
    write_steps(path, StepTraceFile({}, cost, []))
    assert read_steps(path).profile == cost
    write_steps(path, StepTraceFile({}, COST, []))
    path.write_text(path.read_text().replace(',"prompt":null', ""))
    assert '"prompt":null' not in path.read_text()
    assert read_steps(path).profile == COST


def test_a_plan_that_was_tampered_with_is_found() -> None:
    trace = recorded(range(3, 9))
    steps = list(trace.steps)
    decision = steps[2].decision
    tampered = replace(decision, plan=replace(decision.plan, expected_s=1.0))
    steps[2] = replace(steps[2], decision=tampered)
    assert unexplained(steps) == [2]


def test_arrays_and_options_are_written_as_plain_numbers(tmp_path: Path) -> None:
    """What the planner hands out may be NumPy's; it comes back as tuples of the same numbers."""
    probs = (0.1, 0.7)
    options = DraftOption(2, probs), DraftOption(2, probs, has_draft_passes=False)
    view = SequenceView(4, 10, 9, "none", options)
    as_arrays = tuple(option._replace(accept_probs=np.array(probs)) for option in options)
    arrays = replace(view, options=as_arrays)
    spec_plan = SpecPlan({4: 2}, 1.5, 0.25, {4: 1})
    numpys = SpecPlan({4: int(np.int64(2))}, np.float64(1.5), np.float64(0.25), {4: np.int64(1)})
    (step,) = recorded(range(1)).steps
    step = replace(step, decision=replace(step.decision, views=[arrays], plan=numpys))
    path = tmp_path / "steps.jsonl"
    write_steps(path, StepTraceFile({}, COST, [step]))
    (again,) = read_steps(path).steps
    assert again.decision.views == [view]
    assert again.decision.plan == spec_plan


def test_a_step_without_a_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write_steps(path, recorded(range(2)))
    path.write_text(path.read_text().replace('"factors"', '"other"'))
    with pytest.raises(TraceError, match="line 2: 'factors' is missing"):
        read_steps(path)


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(trace)
    return CliRunner().invoke(app, [*MODELS, *arguments])


def test_the_command_writes_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own prompts at two temperatures; one of them does not fit and is left out, and said so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompts = tmp_path / "own.jsonl"
    lines = [
        {"prompt": "Task: qa", "max_tokens": 9},
        {"prompt": "x " * 300},
        {"prompt": "Task: sql"},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "trace.jsonl"
    options = ["--temperatures", "0,1", "--max-tokens", "12", "--max-context-len", "64"]
    options += ["--heads", str(PAIR / "heads")]
    result = run("--oracle", "--input", str(prompts), "--out", str(out), "--json", "-", *options)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["num_refused"] == 2
    header, sequences = read_oracle(out)
    assert (header.model, header.max_draft_len, header.date[:2]) == ("target", 7, "20")
    assert [one.max_tokens for one in sequences] == [9, 9, 12, 12]
    assert {one.workload for one in sequences} == {"own"}
    assert [row["proposer"] for row in summary["rates"]] == list(PROPOSERS)
    (text, *_) = with_texts(draw(ONE_REQUEST), sequences, seed=1)
    assert text.proposers == PROPOSERS
    assert summary["rates"][0] == {
        "proposer": DRAFT_MODEL,
        "workload": "own",
        "num_texts": 4,
        "num_tokens": sum(one.num_generated for one in sequences),
        "accept_probs": list(rates(sequences, DRAFT_MODEL, 7, ()).accept_probs),
        "mean_acceptance_len": {
            str(k): v
            for k, v in rates(sequences, DRAFT_MODEL, 7, (1, 3, 5, 7)).mean_acceptance_len.items()
        },
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--workloads", "poems"], "--workloads: 'poems' must be one of all, chat,"),
        (["--workloads", "qa", "--input", "x"], "--workloads and --input cannot be used together"),
        (["--input", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--input", os.devnull], "holds no prompt"),
        (["--temperatures", "hot"], "--temperatures: got 'hot'"),
        (["--max-draft-len", "100"], "--max-draft-len"),
        (["--dtype", "int4"], "--dtype"),
        (["--draft", "nowhere"], "nowhere is not a directory"),
    ],
)
def test_what_was_typed_wrong_is_one_line(options: list[str], sentence: str) -> None:
    result = run("--out", "trace.jsonl", *options)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert run("--out", "no/such/folder/t.jsonl").exit_code == 2


CONVERSATIONS = [
    {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}]},
    {"id": "b", "conversations": []},
    {"id": "c", "conversations": [{"from": "gpt", "value": "x"}, {"from": "user", "value": "Yo"}]},
]


def test_prompts_of_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "a\\u2028b"}\n\n{"prompt": "c", "max_tokens": 3}\n')
    assert read_prompts(path) == [Prompt("a\u2028b"), Prompt("c", 3)]
    for text in (json.dumps(CONVERSATIONS), "\n".join(map(json.dumps, CONVERSATIONS))):
        path.write_text(text)
        assert [prompt.text for prompt in read_prompts(path)] == ["Hi", "Yo"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"prompt": "a"}\n{"prompt"}', "p, line 2: Expecting"),
        ('{"text": "a"}', "p, line 1: unknown key 'text'"),
        ('{"max_tokens": 3}', "p, line 1: prompt: got None"),
        ('{"prompt": "a", "max_tokens": 0}', "p, line 1: max_tokens: got 0"),
        ('{"prompt": "a", "max_tokens": true}', "p, line 1: max_tokens: got True"),
        ("[1]", "p, entry 1: no JSON object"),
        ('[{"conversations": 1}]', "p, entry 1: conversations: must be a list"),
        ('[{"conversations": [{}]}]', 'p, entry 1: conversations: each must have "from"'),
        ("[", "p: Expecting"),
    ],
)
def test_a_wrong_prompt_names_its_place(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "p"
    path.write_text(text)
    with pytest.raises(PromptFileError) as caught:
        read_prompts(path)
    assert sentence in str(caught.value)


def test_a_request_that_fits_nowhere_is_handed_back() -> None:
    """In its place among the others."""
    with pair_server() as (server, _):
        requests = [GenerateParams(text=t, max_tokens=2, seed=1) for t in ("a", "b " * 400, "c")]
        found = list(write_texts(server, requests, 2))
    assert [isinstance(one, RequestError) for one in found] == [False, True, False]
