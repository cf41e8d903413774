"""`smartspec profile`: the computed speeds, and the table on its way to the server."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from harness import LIMITS, fake_engine
from typer.testing import CliRunner

from smartspec_bench.prompts import TINY, generated
from smartspec_cli.app import app
from smartspec_cli.commands.profile import batch_sizes, speeds_of
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig, read_config
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan.planner import BatchTable
from smartspec_py.engines import profile
from smartspec_py.serving.build import build_engine
from smartspec_testing.local import generate, serving

PAIR = Path(__file__).parents[1] / "engines_build" / "tiny"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_batch_sizes_double_up_to_the_largest(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def test_speeds_by_hand() -> None:
    """A target pass takes 1 s plus 0.5 s per further token, a draft pass 0.1 s. Acceptance 0.5: one
    draft gives 1.5 tokens in 1.6 s, two give 1.75 in 2.2 s."""
    cost = CostModel(
        target=PassTable((1,), (1, 3), ((1.0, 2.0),)), draft=PassTable((1,), (1,), ((0.1,),))
    )
    expected = [1.0, 1.5 / 1.6, 1.75 / 2.2]
    assert speeds_of(cost, 0.5, 1, 2) == pytest.approx(expected)


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
    params = GenerateParams("a prompt", 40, policy="batch_table", proposer="draft_model")
    with serving(fake_engine(accept_prob=1.0), config) as server:
        generate(server, [params])
    lengths = [
        length
        for step in server.loop.records
        if step.decision.reason == "planned"
        for length in step.decision.plan.draft_lens.values()
    ]
    assert max(lengths) == draft_len  # fewer at the end, or where the machine was slow
    assert server.loop.controller.settings.batch_table == BatchTable((1, 4), (draft_len, 1))


SETTINGS = {
    "engine": {"dtype": "float32", "device": "cpu", "num_threads": 1},
    "limits": {"max_sequences": 2, "max_draft_len": 2, "max_context_len": 160, "profile_s": 1},
}


def test_the_command_on_the_shipped_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table is an engine.json's planner section, and a server with the same settings finds its
    profile. A second run measures no passes."""
    monkeypatch.setattr(profile, "BUSY_FACTOR", 0.0)  # other tests run meanwhile
    cache, file = tmp_path / "profiles", tmp_path / "table.json"
    prompts = tmp_path / "own.jsonl"
    texts = (prompt.text for prompt in islice(generated(TINY, 3), 2))
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    settings = SETTINGS | {"engine": SETTINGS["engine"] | {"profile_cache": str(cache)}}
    options = ["--model", TARGET, "--draft", DRAFT, "--prompts", "2", "--table", str(file)]
    for section, values in settings.items():
        for key, value in values.items():
            options += ["--set", f"{section}.{key}={value}"]
    for message in ("profiled in", "profile read from"):
        result = CliRunner().invoke(
            app, ["profile", *options, "--input", str(prompts), "--json", "-"]
        )
        assert result.exit_code == 0, result.output
        assert message in result.stderr
    document = json.loads(result.stdout)
    assert 0.1 < document["accept_prob"] <= 1.0
    speeds = document["tokens_per_s"]
    assert [len(row) for row in speeds.values()] == [3, 3]
    best = [row.index(max(row)) for row in speeds.values()]
    assert document["batch_table"] == {"rows": [1, 2], "draft_lens": best}
    settings["engine"] |= {"kind": "local", "model": TARGET, "draft": DRAFT}
    section = json.loads(file.read_text())
    (tmp_path / "engine.json").write_text(json.dumps(section | settings))
    config = read_config(tmp_path / "engine.json")
    assert config.planner.batch_table == BatchTable((1, 2), tuple(best))
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    build_engine(config, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before
