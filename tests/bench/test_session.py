"""A run on a live server whose engine is made up, and what the command refuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from runs import ABOUT, LIMITS, SETTINGS, Heard, load
from servers import fake_config, serving
from typer.testing import CliRunner

from smartspec_bench.client import BenchError, Client
from smartspec_bench.document import read
from smartspec_bench.session import Kept, run
from smartspec_cli.app import app
from smartspec_launch.triton_server import TritonServer

CUT_SETTINGS = replace(SETTINGS, policies=("none", "goodput"), shapes=("closed",))


@pytest.mark.triton
@pytest.mark.slow
def test_a_run_on_a_live_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 turns a repeat; the same requests for each policy; interrupted, the document stays.
    The bandwidth is measured on less memory: what it is matters to nobody here. Metrics are 0.25 s
    old at most; what is waited beyond that is for servers that are busy."""
    monkeypatch.setattr("smartspec_bench.warm_up.COPY_BYTES", 1 << 22)
    monkeypatch.setattr("smartspec_bench.session.IDLE_S", 0.3)
    monkeypatch.setattr("smartspec_bench.client.POLL_S", 0.05)
    path = tmp_path / "run.json"
    with serving(fake_config(0.001, limits=LIMITS, explain=True), tmp_path) as server:
        kept, heard = Kept(ABOUT, path), Heard()
        asyncio.run(run(server.address, 4, load(SETTINGS), kept, heard.listener))
        whole = read(path)
        kept, cut = Kept(ABOUT, path), Heard(fails_after=2)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(run(server.address, 4, load(CUT_SETTINGS), kept, cut.listener))
        asyncio.run(_refused(server))
    assert heard.left == list(range(14, -1, -1))
    assert whole.phases == heard.phases
    assert all(phase.num_failed == 0 for phase in whole.phases)
    sent = {(p.shape, p.repeat, p.num_sent) for p in whole.phases}
    assert len(sent) == 4
    assert set(whole.ceilings.saturation_rps) == {"none", "fixed:2", "goodput"}
    assert {c.shape for c in whole.comparisons} == set(SETTINGS.shapes)
    assert {p.mean_draft_len for p in whole.phases if p.policy == "none"} == {0.0}
    assert all(p.time_shares for p in whole.phases)
    assert len(read(path).phases) == 2


async def _refused(server: TritonServer) -> None:
    """A wrong field fails every request, and the warm-up tells the first reason."""
    from smartspec_bench.warm_up import warm_up

    async with Client(server.address, {"max_tokens": 0, "stream": True}, 5.0) as client:
        with pytest.raises(BenchError, match="max_tokens"):
            await warm_up(client, SETTINGS, 4, lambda text: None)


PAIR = ["--model", "engines_build/tiny/target", "--draft", "engines_build/tiny/draft"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--form", "long"], "--form: 'long' must be one of short, full"),
        (["--policies", "none,fixed:2"], "must include goodput, which is the policy under test"),
        (["--policies", "goodput,fixed:2"], "must include none"),
        (["--policies", "none,goodput,fixed:x"], "--policies: 'fixed:x' must be"),
        (["--shapes", "round"], "--shapes: 'round' must be one of"),
        (["--workloads", "poems"], "--workloads: 'poems' must be one of"),
        (["--loads", "0.1,0"], "--loads: got '0.1,0', must be numbers above 0"),
        (["--step-loads", "a"], "--step-loads: got 'a'"),
        (["--shift-workloads", "chat"], "--shift-workloads: must be two or more"),
        (["--slo", "e2e"], "--slo: 'e2e'"),
    ],
)
def test_wrong_options_are_named(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "load", *PAIR, *options])
    assert result.exit_code == 2
    assert message in result.stderr


def test_help_has_the_definitions() -> None:
    shown = CliRunner().invoke(app, ["bench", "load", "--help"], env={"COLUMNS": "120"}).stdout
    for word in ("token_goodput_tps", "slo_goodput_rps", "no coordinated omission", "best fixed"):
        assert word in " ".join(shown.split())


def test_compare_on_the_command_line(tmp_path: Path) -> None:
    example = str(Path(__file__).parent / "example.json")
    shown = CliRunner().invoke(app, ["bench", "compare", example, example])
    assert shown.exit_code == 0
    assert "1.000" in shown.stdout
    missing = CliRunner().invoke(app, ["bench", "compare", example, str(tmp_path / "no.json")])
    assert missing.exit_code == 2
    assert "no.json" in missing.stderr
