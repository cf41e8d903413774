"""A fault in the work for one request costs this request, or drafts. The others never notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from heads_served import MODEL, TINY, config_of, serving

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.learn.acceptance import AcceptanceTracker
from smartspec_py.core.types import GuideType
from smartspec_py.engines import host_time
from smartspec_py.engines.base import SequenceStart
from smartspec_py.engines.decoding import shaping
from smartspec_py.engines.drafts.draft_model import DraftModelProposer
from smartspec_py.engines.drafts.lookup import PromptLookupProposer
from smartspec_py.engines.local import target as target_module
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.structured.grammar import GrammarState
from smartspec_py.serving import controller as controller_module
from smartspec_py.serving import lifecycle as lifecycle_module
from smartspec_py.serving.admission import CacheLedger
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.controller import Controller
from smartspec_py.serving.lifecycle import MOST_DEAR_STEPS, Lifecycle
from smartspec_py.serving.request import ErrorCode, Request
from smartspec_py.serving.server import Server
from smartspec_py.serving.source import Source
from smartspec_py.serving.speculation import Speculation
from smartspec_py.serving.text import TextStream
from smartspec_testing.local import LocalSink, generate

pytestmark = pytest.mark.slow

FAKE = {"kind": "fake", "tokenizer": str(MODEL)}
SEED = 666
"""Of the request whose work fails."""

PROMPT = "Task: chat\nuser: hello hello hello, say it again\nassistant:"
COST = CostModel(target=PassTable((1,), (1,), ((0.01,),)), draft=PassTable((1,), (1,), ((1e-6,),)))
"""Drafts cost nothing, so that they are planned."""

REQUESTS = [
    GenerateParams(
        PROMPT,
        16,
        policy="fixed:3",
        seed=SEED,
        temperature=0.5,
        repetition_penalty=1.1,
        bad_words=("the end",),
        bias_words=(" hello",),  # so that the text repeats and is looked up
        bias_weights=(50.0,),
        return_log_probs=True,
        prompt_log_probs=True,
    ),
    GenerateParams(PROMPT, 16, temperature=0.8, seed=1),
    GenerateParams(PROMPT, 16, repetition_penalty=1.2, seed=2, proposer="prompt_lookup"),
    GenerateParams(
        PROMPT, 16, seed=3, guide_type=GuideType.REGEX, guide="(one|two|three| and ){3,20}"
    ),
]
OTHERS = slice(1, None)


class Panic(BaseException):
    """As a library in Rust raises it: code that passes over an Exception alone lets it through."""


def is_victim(value: Any, sequences: set[int]) -> bool:
    """Whether an argument belongs to the request with SEED. sequences: its number, if known."""
    if isinstance(value, list | tuple) and not isinstance(value, SequenceStart):
        return any(is_victim(each, sequences) for each in value)
    if isinstance(value, int):
        return value in sequences
    sampling = getattr(value, "sampling", None)
    if sampling is not None and sampling.seed == SEED:
        return True
    return getattr(value, "sequence", None) in sequences


CALLS: list[tuple[Any, str]] = [
    (LocalTarget, "begin"),
    (LocalTarget, "find_more"),
    (LocalTarget, "_item"),
    (LocalTarget, "_scored"),
    (LocalTarget, "_settle"),
    (LocalTarget, "release"),
    (target_module, "verify"),
    (shaping, "_bans"),
    (shaping, "_penalties"),
    (DraftModelProposer, "num_available"),
    (DraftModelProposer, "propose"),
    (DraftModelProposer, "observe"),
    (DraftModelProposer, "draft_prefill_len"),
    (DraftModelProposer, "release"),
    (PromptLookupProposer, "num_available"),
    (PromptLookupProposer, "acceptance_group"),
    (Source, "_trial"),
    (Lifecycle, "_advance"),
    (Lifecycle, "_charge"),
    (lifecycle_module, "_keep"),
]
"""Calls of a step about one request, or about several of which it is one."""

SHARED_CALLS: list[tuple[Any, str]] = [
    (AcceptanceTracker, "observe"),
    (AcceptanceTracker, "accept_probs"),
    (Speculation, "has_target"),
    (Speculation, "has_forced"),
    (Speculation, "views"),
    (Speculation, "propose"),
    (Controller, "mode"),
    (Controller, "observe"),
    (controller_module, "plan"),
]
"""Calls of a step about all requests. They cost drafts, or what a step would have taught."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = config_of({"max_context_len": 128}, draft=str(TINY / "draft"), device="cpu")
    with serving(config, cost=COST) as found:
        yield found


@pytest.fixture(scope="module")
def expected(server: Server) -> list[LocalSink]:
    sinks = generate(server, REQUESTS, 60.0)
    assert [sink.error for sink in sinks] == [None] * 4
    return sinks


def check_others(server: Server, expected: list[LocalSink]) -> LocalSink:
    """Serve the requests. Returns the sink of the first, whose work may fail."""
    found = generate(server, REQUESTS, 60.0)
    assert server.failure is None
    assert [sink.num_finals for sink in found] == [1] * 4
    for one, other in zip(found[OTHERS], expected[OTHERS], strict=True):
        assert (one.error, one.tokens, one.text) == (None, other.tokens, other.text)
    return found[0]


@pytest.mark.parametrize(
    ("owner", "name"), CALLS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fault_in_the_work_for_one_request(
    owner: Any,
    name: str,
    server: Server,
    expected: list[LocalSink],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works: Callable[..., Any] = getattr(owner, name)
    sequences, raised = set[int](), list[int]()
    begin = Lifecycle._begin

    def note(self: Lifecycle, request: Request) -> None:
        if request.sampling.seed == SEED:
            sequences.add(request.sequence)
        begin(self, request)

    def fails(*arguments: Any, **named: Any) -> Any:
        if is_victim(list(arguments), sequences):
            raised.append(1)
            if name == "release":
                works(*arguments, **named)  # else its row is never free again
            raise Panic("a fault")
        return works(*arguments, **named)

    monkeypatch.setattr(Lifecycle, "_begin", note)
    monkeypatch.setattr(owner, name, fails)
    victim = check_others(server, expected)
    assert raised, "nothing was injected"
    if victim.error is None:
        assert victim.tokens == expected[0].tokens
    else:
        assert "a fault" in victim.error[1]
    monkeypatch.undo()
    assert check_others(server, expected).tokens == expected[0].tokens
    server.loop.lifecycle.check_integrity()


@pytest.mark.parametrize(
    ("owner", "name"), SHARED_CALLS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fault_in_the_work_for_all(
    owner: Any,
    name: str,
    server: Server,
    expected: list[LocalSink],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def fails_often(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) % 3:
            raise Panic("a fault")
        return works(*arguments, **named)

    monkeypatch.setattr(owner, name, fails_often)
    victim = check_others(server, expected)
    assert calls, "nothing was injected"
    assert victim.tokens == expected[0].tokens


def test_keys_of_a_draft_model_that_cannot_be_dropped(
    server: Server,
    expected: list[LocalSink],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a tight cache, which drops those of all requests here."""
    works = Speculation.drop_cache

    def fails(self: Speculation, request: Request) -> None:
        if request.sampling.seed == SEED:
            raise Panic("a fault")
        works(self, request)

    monkeypatch.setattr(CacheLedger, "drafts_to_drop", lambda self, live: list(live))
    monkeypatch.setattr(Speculation, "drop_cache", fails)
    victim = check_others(server, expected)
    assert victim.error is not None
    assert "a fault" in victim.error[1]


def test_a_text_that_cannot_be_decoded(
    server: Server,
    expected: list[LocalSink],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the responder's thread: with the first text that is finished."""
    works, failed = TextStream.finish, list[TextStream]()

    def fails_once(self: TextStream) -> str:
        if not failed:
            failed.append(self)
            raise Panic("a fault")
        return works(self)

    monkeypatch.setattr(TextStream, "finish", fails_once)
    found = generate(server, REQUESTS, 60.0)
    assert [sink.num_finals for sink in found] == [1] * 4
    assert sum(sink.error is not None for sink in found) == 1


def test_a_fault_in_the_pass_ends_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig.model_validate(
        {"engine": FAKE, "limits": {"max_sequences": 4, "max_context_len": 128}}
    )
    server = Server(build_engine(config, Path.cwd()), config)

    def fails(*_: Any) -> None:
        raise Panic("a fault")

    monkeypatch.setattr(type(server.loop._target), "poll", fails)
    found = [LocalSink() for _ in range(3)]
    for sink in found:
        server.submit(GenerateParams("a", 4), sink)
    server.start()
    for sink in found:
        sink.wait(60.0)
    server.stop()
    assert server.failure is not None
    assert [sink.num_finals for sink in found] == [1] * 3
    assert all(sink.error and sink.error[1].endswith("Panic: a fault") for sink in found)


@pytest.mark.parametrize("name", ["_read", "_excluded", "_forced_tokens", "_long_run"])
def test_a_fault_of_a_grammar(
    name: str,
    server: Server,
    expected: list[LocalSink],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fourth request has a grammar. It fails with the name of its field."""

    def fails(*_: Any) -> None:
        raise Panic("a fault")

    monkeypatch.setattr(GrammarState, name, fails)
    *others, guided = generate(server, REQUESTS, 60.0)
    assert server.failure is None
    assert [sink.num_finals for sink in (*others, guided)] == [1] * 4
    assert [sink.tokens for sink in others] == [sink.tokens for sink in expected[:3]]
    assert guided.error is not None
    assert guided.error[1].startswith("guided_decoding_guide: cannot be followed further: ")


def penalties_take(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which nothing else takes time than each of the penalties of one request."""
    now_s = [0.0]
    works = shaping._penalties

    def takes_long(one: shaping.Shaping, *arguments: Any) -> Any:
        now_s[0] += seconds * (one.sampling.seed == SEED)
        return works(one, *arguments)

    monkeypatch.setattr(shaping, "_penalties", takes_long)
    monkeypatch.setattr(host_time.time, "thread_time", lambda: now_s[0])


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_request_whose_own_work_delays_the_others_ends(
    num_requests: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, it delays nobody."""
    penalties_take(0.06, monkeypatch)
    params = [replace(REQUESTS[0], policy="none", max_tokens=24)]
    params.append(replace(REQUESTS[1], max_tokens=40))
    victim, *others = generate(server, params[:num_requests], 60.0)
    assert [sink.error for sink in others] == [None] * (num_requests - 1)
    if num_requests == 1:
        assert victim.error is None
        return
    assert victim.error is not None
    code, message = victim.error
    assert code is ErrorCode.INVALID_ARGUMENT
    assert message == (
        "bad_words: takes 60 ms of each step of all requests, must take at most 50 ms: "
        "use a simpler value"
    )
    assert server.loop.lifecycle.host_s["shaping"] > 16 * 0.06


def test_a_request_whose_drafts_delay_the_others_loses_them_first(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each position takes 0.03 s: with a draft, a step takes more than it may, and less without."""
    penalties_take(0.03, monkeypatch)
    params = [replace(REQUESTS[0], policy="fixed:1", max_tokens=60)]
    params.append(replace(REQUESTS[1], max_tokens=60))
    sinks = generate(server, params, 60.0)
    assert [sink.error for sink in sinks] == [None, None]
    victim = sinks[0].progress
    assert victim is not None
    assert MOST_DEAR_STEPS <= victim.num_drafted < MOST_DEAR_STEPS + 4
    assert victim.num_steps > 2 * MOST_DEAR_STEPS - victim.num_drafted
