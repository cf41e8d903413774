"""`smartspec profile`: what is counted, the fitted laws, and the table on its way to the server."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import LIMITS, fake_engine
from typer.testing import CliRunner

from smartspec_bench.grid_search import (
    Found,
    GridSearchError,
    SearchPlan,
    Tally,
    batch_sizes,
    search,
    tally_of,
)
from smartspec_bench.power_law import (
    PowerLaw,
    StepLine,
    fitted_line,
    fitted_power_law,
    law_draft_len,
    power_law_draft_len,
)
from smartspec_bench.prompts import MIXED, generated
from smartspec_cli.app import app
from smartspec_py.core.plan.planner import BatchTable
from smartspec_py.core.types import DraftOption, SequenceView
from smartspec_py.engines.base import Event
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.config import ServerConfig, read_config
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_testing.engines import FakeEngineConfig
from smartspec_testing.local import generate

PAIR = Path(__file__).parents[1] / "engines_build" / "tiny"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_batch_sizes_double_up_to_the_largest(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def record(
    accepted: list[int], draft_len: int, num_prefill: int = 0, lag: int = 0, num_missing: int = 0
) -> Any:
    """A step of 0.5 s in which each sequence has 100 tokens of context."""
    events = [
        Event(n, (1,) * (kept + 1), num_drafted=draft_len, num_accepted=kept)
        for n, kept in enumerate(accepted)
    ]
    return SimpleNamespace(
        batch_size=len(accepted),
        num_drafted=draft_len * len(accepted) - num_missing,
        num_prefill_tokens=num_prefill,
        num_generated=sum(accepted) + len(accepted),
        decision=SimpleNamespace(
            views=[
                SequenceView(n, 100, 100, "fixed:3", (DraftOption(3, (0.5,) * 3, lag),))
                for n in range(len(accepted))
            ]
        ),
        events=events,
        total_s=0.5,
    )


def test_a_tally_by_hand() -> None:
    """Two steps of two sequences with 3 drafts each. Kept: 0 of 3 is 1 trial, 3 of 3 are 3, 1 of 3
    are 2, so 1 + 3 + 2 + 2 = 8 trials, 5 kept; 9 tokens, of which 4 are the target's own."""
    found = tally_of([record([0, 3], 3), record([1, 1], 3)], 2, 3)
    assert found == Tally(2, 4, 9, 8, 5, 400, 1.0)
    assert found.tokens_per_s == 9.0
    assert found.step_s == 0.5


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (record([1], 3), "the batch has shrunk"),
        (record([1, 1], 2), "another draft length"),
        (record([1, 1], 3, num_missing=1), "one was near its end and drafted less"),
        (record([1, 1], 3, num_prefill=1), "a prompt was read"),
        (record([1, 1], 3, lag=60), "the draft read a prompt"),
    ],
)
def test_steps_that_do_not_count(other: Any, why: str) -> None:
    assert tally_of([other], 2, 3) == Tally(), why
    assert tally_of([other, record([0, 0], 3)], 2, 3).num_steps == 1, why


def test_a_draft_that_is_not_asked_may_lag() -> None:
    assert tally_of([record([0, 0], 0, lag=60)], 2, 0) == Tally(1, 2, 2, 0, 0, 200, 0.5)


def tally(num_generated: int, num_accepted: int, total_s: float) -> Tally:
    return Tally(10, 10, num_generated, 20, num_accepted, 500, total_s)


def test_what_was_found_by_hand() -> None:
    """k = 0: 10, 20 and 40 tokens/s, median 20; k = 1: 15, 30 and 30, median 30. Acceptance is of
    all rounds: 5 + 10 + 15 of 60 trials; a draft a step brings 30 in 30 steps."""
    rounds = {
        (1, 0): [tally(10, 0, 1.0), tally(10, 0, 0.5), tally(10, 0, 0.25)],
        (1, 1): [tally(15, 5, 1.0), tally(30, 10, 1.0), tally(15, 15, 0.5)],
    }
    found = Found(rounds, [1], 1)
    assert found.tokens_per_s(1) == [20.0, 30.0]
    assert found.step_s(1) == [0.05, 0.1]
    assert found.best_draft_len(1) == 1
    assert found.accept_prob == 0.5
    assert found.mean_accepted() == [1.0]
    assert found.context_len == 50
    assert found.num_rounds == 3
    # rounds lie (40 - 10) / 20 and (30 - 15) / 30 apart
    assert found.spread == 1.0


def test_of_equals_the_shortest_is_best() -> None:
    same = [tally(10, 5, 1.0)]
    assert Found({(4, 0): same, (4, 1): same, (4, 2): same}, [4], 2).best_draft_len(4) == 0


def test_laws_are_fitted_to_what_follows_them() -> None:
    """0.7 k^0.5 accepted; 5 ms and 2 ms a draft."""
    law = fitted_power_law([0.7 * k**0.5 for k in range(1, 8)])
    assert law is not None
    assert (law.scale, law.power) == pytest.approx((0.7, 0.5))
    line = fitted_line([0.005 + 0.002 * k for k in range(1, 8)])
    assert line is not None
    assert (line.token_s, line.base_s) == pytest.approx((0.002, 0.005))


@pytest.mark.parametrize("seed", range(5))
def test_the_closed_form_is_the_optimum_of_the_laws(seed: int) -> None:
    """Against every k of a fine grid: seconds a token, (base + token k) / (1 + scale k^power)."""
    draw = random.Random(seed).uniform
    law, line = PowerLaw(draw(0.5, 0.9), draw(0.3, 0.8)), StepLine(draw(1e-3, 4e-3), 8e-3)
    steps = [n / 100 for n in range(1, 10_000)]
    best = min(
        steps, key=lambda k: (line.base_s + line.token_s * k) / (1 + law.scale * k**law.power)
    )
    assert law_draft_len(law, line) == pytest.approx(best, abs=0.02)


def test_what_cannot_be_fitted_has_no_optimum() -> None:
    assert fitted_power_law([0.7]) is None
    assert fitted_power_law([0.7, 0.0]) is None
    assert fitted_line([0.005]) is None
    law, line = PowerLaw(0.7, 0.5), StepLine(0.002, 0.005)
    assert law_draft_len(law, line) is not None
    assert law_draft_len(None, line) is None
    assert law_draft_len(law, None) is None
    assert law_draft_len(PowerLaw(0.7, 1.2), line) is None, "more than proportional"
    assert law_draft_len(law, StepLine(-0.001, 0.005)) is None, "drafts that cost nothing"


def plan(**more: Any) -> SearchPlan:
    values: dict[str, Any] = {
        "sizes": (1, 2),
        "max_draft_len": 2,
        "num_prompts": 2,
        "max_tokens": 24,
        "temperature": 0.0,
        "num_rounds": 2,
        "max_seconds": 1e9,
    }
    return SearchPlan(**(values | more))


def found_with(accept_prob: float, wanted: SearchPlan) -> tuple[Found, list[str]]:
    """By the fake engine, and which runs it was told of."""
    config = ServerConfig(engine=FakeEngineConfig(kind="fake", tokenizer="none"), limits=LIMITS)
    server, told = Server(fake_engine(accept_prob=accept_prob), config), list[str]()
    server.start()
    try:
        return search(server, wanted, lambda: generated(MIXED, 1), told.append), told
    finally:
        server.stop()


@pytest.mark.parametrize("accept_prob", [0.0, 1.0])
def test_a_search_runs_every_length_at_every_size(accept_prob: float) -> None:
    """An engine that accepts all or nothing gives k + 1 tokens or one, in each step that counts.
    Size 1 takes turns with two prompts: 3 lengths x (2 + 1) batches, in each of 2 rounds."""
    wanted = plan()
    found, told = found_with(accept_prob, wanted)
    assert found.num_rounds == 2
    assert len(told) == 2 * wanted.num_runs == 18
    assert [text.rpartition(" ")[2] for text in told[:9]] == list("012120012")
    assert [text.rpartition(" ")[2] for text in told[9:]] == list("120201120")
    assert found.accept_prob == accept_prob
    assert found.mean_accepted() == [accept_prob, 2 * accept_prob]
    for (size, draft_len), cell in found.rounds.items():
        for one in cell:
            assert one.num_sequences == size * one.num_steps
            assert one.num_generated == one.num_sequences * (1 + accept_prob * draft_len)


def test_no_round_begins_that_would_end_too_late() -> None:
    assert found_with(1.0, plan(max_seconds=0.0))[0].num_rounds == 1


def test_texts_too_short_for_their_drafts_are_said() -> None:
    with pytest.raises(GridSearchError, match="batch of 1 drafted 1 tokens for each: allow more"):
        found_with(1.0, plan(max_tokens=2))


def test_prompts_that_do_not_fit_are_said() -> None:
    with pytest.raises(GridSearchError, match=r"cannot be served: .*max_tokens"):
        found_with(1.0, plan(max_tokens=100_000))


@pytest.mark.parametrize("draft_len", [0, 2])
def test_the_server_drafts_by_the_table_of_its_configuration(draft_len: int) -> None:
    table = {"rows": [1, 4], "draft_lens": [draft_len, 1]}
    config = ServerConfig.model_validate(
        {
            "engine": {"kind": "fake", "tokenizer": "none"},
            "limits": LIMITS.model_dump(),
            "planner": {"batch_table": table},
        }
    )
    server = Server(fake_engine(accept_prob=1.0), config)
    server.start()
    generate(server, [GenerateParams("a prompt", 40, policy="batch_table", proposer="draft_model")])
    server.stop()
    planned = [
        r for r in server.loop.records if r.decision.reason == "planned" and r.batch_size == 1
    ]
    # the last steps draft no more than there is left to say
    lengths = [length for r in planned[:-2] for length in r.decision.plan.draft_lens.values()]
    assert set(lengths) == {draft_len}
    assert server.loop.controller.settings.batch_table == BatchTable((1, 4), (draft_len, 1))


OPTIONS = [
    *("--model", TARGET, "--draft", DRAFT, "--dtype", "float32", "--device", "cpu"),
    *("--num-threads", "1", "--rows", "2", "--max-draft-len", "2", "--max-context-len", "160"),
    *("--prompts", "2", "--max-tokens", "12", "--rounds", "1"),
]


def test_the_command_on_the_shipped_pair(tmp_path: Path) -> None:
    """Its table is an engine.json's planner section, and a server with the same settings finds its
    profile; the numbers hang together. A second run measures no passes."""
    cache, file = tmp_path / "profiles", tmp_path / "table.json"
    options = [*OPTIONS, "--profile-cache", str(cache), "--table", str(file), "--json", "-"]
    result = CliRunner().invoke(app, ["profile", *options])
    assert result.exit_code == 0, result.output
    assert "profiled in" in result.stderr
    document = json.loads(result.stdout)
    one, two = document["sizes"]
    assert (one["batch_size"], two["batch_size"]) == (1, 2)
    assert 0.3 < document["accept_prob"] < 1.0
    for size in (one, two):
        speeds = size["tokens_per_s"]
        assert len(speeds) == len(size["step_s"]) == 3
        assert speeds[size["grid_search"]] == max(speeds)
        assert 0 <= size["cost_model"] <= 2
    table = {"rows": [1, 2], "draft_lens": [one["grid_search"], two["grid_search"]]}
    assert document["batch_table"] == table
    engine = {"kind": "torch", "model": TARGET, "draft": DRAFT, "dtype": "float32"}
    engine |= {"device": "cpu", "num_threads": 1, "profile_cache": str(cache)}
    limits = {"max_sequences": 2, "max_draft_len": 2, "max_context_len": 160}
    section = json.loads(file.read_text())
    (tmp_path / "engine.json").write_text(
        json.dumps(section | {"engine": engine, "limits": limits})
    )
    config = read_config(tmp_path / "engine.json")
    assert config.planner.batch_table is not None
    assert config.planner.batch_table.model_dump(mode="json") == table
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(before) == 1
    build_engine(config, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before


def test_own_prompts_and_a_kept_profile(tmp_path: Path) -> None:
    prompts = tmp_path / "own.jsonl"
    texts = (prompt.text for prompt in islice(generated(MIXED, 3), 2))
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options = [
        *OPTIONS,
        "--rows",
        "1",
        "--max-draft-len",
        "1",
        "--input",
        str(prompts),
        "--json",
        "-",
    ]
    for said in ("profiled in", "profile read from"):
        result = CliRunner().invoke(app, ["profile", *options, "--profile-cache", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert said in result.stderr
    document = json.loads(result.stdout)
    assert document["power_law"] is None, "one length is no law"
    assert document["sizes"][0]["power_law"] is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--rows", "0"), "--rows"),
        (("--max-draft-len", "17"), "--max-draft-len"),
        (("--max-tokens", "6"), "--max-tokens: got 6, must be at least 7 for a draft length of 2"),
        (("--dtype", "int4"), "--dtype"),
        (("--draft", "nowhere"), "the draft nowhere is not a directory"),
        (("--table", "no/such/folder/table.json"), "--table: no/such/folder/table.json must be"),
        (("--input", "nowhere.jsonl"), "nowhere.jsonl: "),
    ],
)
def test_what_was_typed_wrong(options: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(app, ["profile", *OPTIONS, *options])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("base_s", "draft_len"), [(3.0, 1.0), (8.0, 4.0), (15.0, 9.0)])
def test_the_closed_form_of_the_power_law(base_s: float, draft_len: float) -> None:
    """scale 1, power 1/2, token_s 1: with x = sqrt(k) the root is that of x^2 + 2x = base_s.

    At base_s = 8 tokens a second are 2.732/11, 3/12, 3.236/13 for 3, 4, 5 drafts: best at 4.
    """
    assert power_law_draft_len(1.0, 0.5, 1.0, base_s) == pytest.approx(draft_len)


@pytest.mark.parametrize("changed", [{"power": 1.0}, {"scale": 0.0}, {"token_s": 0.0}])
def test_a_power_law_out_of_range_is_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="power"):
        power_law_draft_len(
            **({"scale": 1.0, "power": 0.5, "token_s": 1.0, "base_s": 1.0} | changed)
        )
