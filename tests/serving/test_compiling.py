"""Grammars are compiled in processes that can be ended, and their requests get one answer each.

Times are limits against a hang, not expectations.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until
from test_guided import PAIR, config_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.core.types import FinishReason, GuideType
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.structured.compiler import CompiledGrammar, GrammarCompiler
from smartspec_py.engines.structured.guides import GrammarError
from smartspec_py.engines.structured.trial import CompileLimits, CrashError, TooSlowError
from smartspec_py.serving import server as server_module
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.request import ErrorCode, RequestError
from smartspec_py.serving.server import Server
from smartspec_testing.local import LocalSink, serving

pytestmark = pytest.mark.slow  # so that they run beside the others

WAIT_S = 60.0
SHUTTING_DOWN = (ErrorCode.UNAVAILABLE, "the server is shutting down")
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(30)]})
PATTERNS = json.dumps(
    {"type": "object", "patternProperties": {f"^x{n}_.*$": {"type": "integer"} for n in range(900)}}
)
UNLIMITED = CompileLimits(quick_s=3600.0, most_s=3600.0, most_bytes=2**40)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Several servers use it, one after the other."""
    made = build_engine(config_of(), PAIR)
    for part in (made.target, *made.proposers.values()):
        part.close = lambda: None  # type: ignore[method-assign]
    return made


def running(
    engine: Engine, limits: CompileLimits, **config: Any
) -> contextlib.AbstractContextManager[Server]:
    return serving(engine, config_of(**config), compile_limits=limits)


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> Iterator[GrammarCompiler]:
    made = new_compiler(engine)
    yield made
    made.close()


def new_compiler(engine: Engine, **limits: Any) -> GrammarCompiler:
    vocab_size = engine.target.capabilities.vocab_size
    return GrammarCompiler(engine.tokenizer, vocab_size, engine.end_tokens, CompileLimits(**limits))


def ask(
    server: Server, guide: str, kind: GuideType = GuideType.JSON_SCHEMA, **fields: Any
) -> LocalSink:
    sink = LocalSink()
    params = GenerateParams("x", 20, guide_type=kind, guide=guide, **fields)
    server.submit(params, sink)
    return sink


def choose(server: Server, *texts: str, **fields: Any) -> LocalSink:
    return ask(server, json.dumps(texts), GuideType.CHOICE, **fields)


def engine_tokens(compiler: GrammarCompiler, text: str) -> list[int]:
    return list(compiler._tokenizer.tokenize_str(text))


def children(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(number) for number in path.read_text().split()]


def helper(server: Server) -> int:
    compiler = server._compiling._compiler
    assert compiler is not None
    return compiler._trials._helper.pid


def num_trials(server: Server) -> int:
    return len(children(helper(server)))


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


# Limits


def test_grammars_that_do_not_end_are_refused_with_the_limit(engine: Engine) -> None:
    compiler = new_compiler(engine, most_s=0.3)
    for guide in (ENDLESS, PATTERNS):
        with pytest.raises(TooSlowError, match=r"compiling took longer than 0\.3 s; use a simpler"):
            compiler.compile(GuideType.JSON_SCHEMA, guide)
        with pytest.raises(GrammarError, match=r"longer than 0\.3 s"):
            compiler.find(GuideType.JSON_SCHEMA, guide)
    compiler.close()


def test_a_grammar_that_takes_much_memory_is_refused_with_the_limit(engine: Engine) -> None:
    compiler = new_compiler(engine, most_s=WAIT_S, most_bytes=8 * 2**20)
    with pytest.raises(GrammarError, match="took more than 8 MiB of memory; use a simpler"):
        compiler.compile(GuideType.JSON_SCHEMA, ENDLESS)
    compiler.close()


CHAIN = "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(5000)) + 'a5000: "x"'
REFERENCES = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}]} for n in range(5000)}
CHAINED = {"$defs": REFERENCES | {"a5000": {"type": "null"}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize(
    ("kind", "guide"),
    [(GuideType.EBNF_GRAMMAR, CHAIN), (GuideType.JSON_SCHEMA, json.dumps(CHAINED))],
    ids=["rules", "references"],
)
def test_a_grammar_that_overflows_the_stack_ends_its_own_process(
    compiler: GrammarCompiler, kind: GuideType, guide: str
) -> None:
    """In the server it ended all requests."""
    with pytest.raises(CrashError, match="its compiler crashed: it may nest too deeply"):
        compiler.compile(kind, guide)


def test_a_server_with_limits_of_its_own_compiles(engine: Engine) -> None:
    """As from `LimitCPU` of systemd: a process cannot have more than its parent."""
    compiler = new_compiler(engine)
    resource.prlimit(compiler._trials._helper.pid, resource.RLIMIT_CPU, (5, 5))
    compiler.compile(GuideType.REGEX, "a{3}")
    compiler.close()


def test_limits_that_are_reached_at_the_first_tokens_are_found(compiler: GrammarCompiler) -> None:
    """An object of 1,800 optional properties has too many items in the row behind its brace."""
    properties = {f"name{n}": {"type": "integer"} for n in range(1800)}
    for depth in range(3):
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        for _ in range(depth):
            members = {"text": {"type": "string"}, "value": schema}
            schema = {"type": "object", "properties": members, "required": list(members)}
        with pytest.raises(GrammarError, match=r"Current row has \d+ items; max is 5000"):
            compiler.compile(GuideType.JSON_SCHEMA, json.dumps(schema))


def test_many_texts_work(compiler: GrammarCompiler) -> None:
    """Once, each text of a choice took an item of each row."""
    texts = [f"{n} is the number of a text of sixty characters, or about that" for n in range(5500)]
    state = compiler.compile(GuideType.CHOICE, json.dumps(texts)).start(0)
    tokens = engine_tokens(compiler, texts[5432])
    assert state.num_allowed((), tokens) == len(tokens)
    assert state.forbidden(tokens, (), (0,)) is not None
    assert not state.error


# Answers


def test_others_are_answered_while_a_grammar_compiles(engine: Engine) -> None:
    """More of them than there are places; slow ones leave the places to the others."""
    limits = CompileLimits(quick_s=0.05, most_s=3600.0, num_quick=1)
    with running(engine, limits) as server:
        endless = [ask(server, ENDLESS + " " * n) for n in range(4)]
        other = choose(server, "yes", "no")
        other.wait(WAIT_S)
        assert other.text in ("yes", "no")
        assert [sink.num_finals for sink in endless] == [0] * 4
    assert [sink.error for sink in endless] == [SHUTTING_DOWN] * 4
    assert [sink.num_finals for sink in (*endless, other)] == [1] * 5


def test_a_slow_grammar_gets_its_time(engine: Engine) -> None:
    """It is put back after no time at all, and waits for the place of slow ones."""
    limits = CompileLimits(quick_s=0.0, most_s=3600.0)
    with running(engine, limits) as server:
        sinks = [choose(server, f"yes {n}") for n in range(3)]
        for sink in sinks:
            sink.wait(WAIT_S)
    assert [sink.text for sink in sinks] == ["yes 0", "yes 1", "yes 2"]


def test_a_stop_does_not_wait_for_a_grammar(engine: Engine) -> None:
    threads = set(threading.enumerate())
    with running(engine, UNLIMITED) as server:
        sink = ask(server, ENDLESS)
        wait_until(lambda: num_trials(server) == 1)
        processes = [helper(server), *children(helper(server))]
    assert (sink.error, sink.num_finals) == (SHUTTING_DOWN, 1)
    assert set(threading.enumerate()) == threads
    wait_until(lambda: not any(map(is_alive, processes)))
    with pytest.raises(RequestError, match="shutting down"):
        ask(server, ENDLESS)


@pytest.mark.parametrize("leaves", ["deadline", "disconnect"])
def test_a_request_that_is_answered_gives_up_its_place(engine: Engine, leaves: str) -> None:
    """The process ends when nobody waits for the grammar: two do at first."""
    with running(engine, UNLIMITED) as server:
        stays = ask(server, ENDLESS)
        wait_until(lambda: num_trials(server) == 1)
        goes = ask(server, ENDLESS, deadline_ms=30 if leaves == "deadline" else None)
        goes.is_gone = leaves == "disconnect"
        goes.wait(WAIT_S)
        assert num_trials(server) == 1
        assert stays.num_finals == 0
        stays.is_gone = True
        wait_until(lambda: num_trials(server) == 0)
        stays.wait(WAIT_S)
        assert server.num_open == 0
        assert server._compiling._jobs == {}
    late = "deadline_ms: 30 ms passed before the first token"
    left = "the client has disconnected"
    assert goes.error == (ErrorCode.UNAVAILABLE, late if leaves == "deadline" else left)
    assert stays.error == (ErrorCode.UNAVAILABLE, left)
    assert [sink.num_finals for sink in (goes, stays)] == [1, 1]


def test_the_number_of_waiting_requests_is_bounded(engine: Engine) -> None:
    with running(engine, UNLIMITED, max_queue=2) as server:
        sinks = [ask(server, ENDLESS) for _ in range(2)]
        with pytest.raises(RequestError, match="too many requests wait for their grammars"):
            ask(server, ENDLESS)
        sinks[0].is_gone = True
        sinks[0].wait(WAIT_S)
        sinks.append(ask(server, ENDLESS))
    assert [sink.num_finals for sink in sinks] == [1, 1, 1]


class Held:
    """Lets the compiler wait until the test opens it, and notes what was compiled, in order."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = server._compiling._compiler
        assert compiler is not None
        self.compiled: list[str] = []
        self.is_open = threading.Event()
        self.error: BaseException | None = None
        self._compile = compiler.compile
        monkeypatch.setattr(compiler, "compile", self.compile)

    def compile(
        self, kind: GuideType, guide: str, most_s: float, is_wanted: Callable[[], bool]
    ) -> CompiledGrammar:
        self.compiled.append(guide)
        assert self.is_open.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return self._compile(kind, guide, most_s, is_wanted)


ALONE = CompileLimits(quick_s=3600.0, most_s=3600.0, num_quick=1, num_slow=0)


def test_identical_grammars_are_compiled_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(engine, CompileLimits()) as server:
        held = Held(server, monkeypatch)
        sinks = [choose(server, "yes", "no", seed=n) for n in range(5)]
        held.is_open.set()
        for sink in sinks:
            sink.wait(WAIT_S)
        assert {sink.finish_reason for sink in sinks} == {FinishReason.STOP}
        again = choose(server, "yes", "no")
        again.wait(WAIT_S)
        assert len(held.compiled) == 1


def test_priority_and_deadline_hold_while_grammars_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One grammar compiles. Then the one with the higher priority; not the one that is late."""
    with running(engine, ALONE) as server:
        held = Held(server, monkeypatch)
        first = choose(server, "first")
        wait_until(lambda: bool(held.compiled))
        late = choose(server, "late", deadline_ms=30)
        low, high = choose(server, "low"), choose(server, "high", priority=1)
        late.wait(WAIT_S)
        held.is_open.set()
        for sink in (first, low, high):
            sink.wait(WAIT_S)
        assert [json.loads(guide) for guide in held.compiled] == [["first"], ["high"], ["low"]]
    assert late.error is not None
    assert [sink.num_finals for sink in (first, late, low, high)] == [1, 1, 1, 1]


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_a_tokenizer_that_does_not_work_costs_requests_with_a_grammar(
    kind: type[BaseException], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise kind("index out of bounds")

    monkeypatch.setattr(server_module, "GrammarCompiler", fails)
    with running(engine, ALONE) as server:
        with pytest.raises(RequestError, match="index out of bounds"):
            choose(server, "one")
        works = LocalSink()
        server.submit(GenerateParams("x", 2), works)
        works.wait(WAIT_S)
    assert works.error is None


def test_whatever_is_raised_each_request_gets_one_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the compiler, and when a request is enqueued. The thread goes on."""
    with running(engine, ALONE) as server:
        held = Held(server, monkeypatch)
        held.is_open.set()
        held.error = Panic("index out of bounds")
        panicked = choose(server, "one")
        panicked.wait(WAIT_S)
        held.error = None
        starting = CompiledGrammar.start
        monkeypatch.setattr(CompiledGrammar, "start", lambda self, num_prompt: 1 // 0)
        failed = choose(server, "two")
        failed.wait(WAIT_S)
        monkeypatch.setattr(CompiledGrammar, "start", starting)
        works = choose(server, "three")
        works.wait(WAIT_S)
    assert panicked.error == (ErrorCode.INTERNAL, "Panic: index out of bounds")
    assert failed.error is not None
    assert failed.error[0] is ErrorCode.INTERNAL
    assert works.text == "three"
    assert [sink.num_finals for sink in (panicked, failed, works)] == [1, 1, 1]


# Processes


def test_a_trial_that_is_killed_fails_its_request_alone(engine: Engine) -> None:
    """It may be tried again."""
    with running(engine, UNLIMITED) as server:
        for _ in range(2):
            sink = ask(server, ENDLESS)
            wait_until(lambda: num_trials(server) == 1)
            os.kill(children(helper(server))[0], signal.SIGKILL)
            # It closes its connection before it is gone.
            wait_until(lambda: num_trials(server) == 0)
            sink.wait(WAIT_S)
            assert sink.error is not None
            assert sink.error[0] is ErrorCode.INVALID_ARGUMENT
            assert (
                "its compiler crashed: it may nest too deeply, or need much memory" in sink.error[1]
            )
        works = choose(server, "yes", "no")
        works.wait(WAIT_S)
        assert works.finish_reason is FinishReason.STOP


def test_a_helper_that_is_killed_is_replaced(engine: Engine) -> None:
    """What it has begun goes on."""
    with running(engine, UNLIMITED) as server:
        sink = ask(server, ENDLESS)
        wait_until(lambda: num_trials(server) == 1)
        killed, (trial,) = helper(server), children(helper(server))
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: not is_running(killed))
        works = choose(server, "yes", "no")
        works.wait(WAIT_S)
        assert works.finish_reason is FinishReason.STOP
        assert helper(server) != killed
        assert (is_running(trial), sink.num_finals) == (True, 0)
    wait_until(lambda: not is_running(trial))
    assert sink.error == SHUTTING_DOWN


def test_a_helper_that_hangs_is_replaced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(engine, UNLIMITED) as server:
        stopped = helper(server)
        os.kill(stopped, signal.SIGSTOP)
        monkeypatch.setattr("smartspec_py.engines.structured.trial.HANGS_S", 0.1)
        fails = ask(server, "(a|b){3}", GuideType.REGEX)
        fails.wait(WAIT_S)
        assert fails.error == (
            ErrorCode.UNAVAILABLE,
            "guided_decoding_guide: compiling had no result within 0 s",
        )
        monkeypatch.undo()
        wait_until(lambda: not is_running(stopped))
        works = choose(server, "yes", "no")
        works.wait(WAIT_S)
        assert works.finish_reason is FinishReason.STOP


def is_running(process: int) -> bool:
    """False for a zombie, which its parent has not asked for yet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def test_no_process_outlives_the_server(engine: Engine) -> None:
    """The helper reads the end of its connection, also if the server was killed."""
    compiler = new_compiler(engine, most_s=3600.0, most_bytes=2**40)
    trials = compiler._trials
    errors: list[BaseException] = []

    def run() -> None:
        try:
            compiler.compile(GuideType.JSON_SCHEMA, ENDLESS, None, lambda: not errors)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(children(trials._helper.pid)) == 1)
    processes = [trials._helper.pid, *children(trials._helper.pid)]
    trials._control.close()
    assert trials._helper.wait(WAIT_S) == 0
    errors.append(Panic())
    thread.join(WAIT_S)
    wait_until(lambda: not any(map(is_running, processes)))
    compiler.close()


# The compiler


def test_a_tokenizer_without_a_decoder_is_refused() -> None:
    with pytest.raises(GrammarError, match="this model's tokenizer is not supported"):
        GrammarCompiler(Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), 2, (1,))


def test_compiled_grammars_are_kept_and_bounded(engine: Engine, compiler: GrammarCompiler) -> None:
    for number in range(80):
        compiler.compile(GuideType.REGEX, f"a{{{number + 1}}}")
    assert len(compiler._kept) == 64
    grammar = compiler.compile(GuideType.CHOICE, '["ab", "cd"]')
    assert compiler.find(GuideType.CHOICE, '["ab", "cd"]') is grammar
    first, second = grammar.start(1), grammar.start(1)
    ends = engine.end_tokens
    tokens = engine.tokenizer.encode("ab", add_special_tokens=False).ids
    forbidden = first.forbidden([7, *tokens], (), ends)
    assert forbidden is not None
    assert (~forbidden).nonzero()[0].tolist() == sorted(ends)
    other = second.forbidden([7], (), ends)
    assert other is not None
    assert (~other).sum() > len(ends), "the copies share their state"


def test_the_memory_of_compiled_grammars_is_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smartspec_py.engines.structured.compiler.MAX_KEPT_BYTES", 40 * 2**20)
    for number in range(4):
        texts = json.dumps([f"{number} {n}" for n in range(10_000)])
        compiler.compile(GuideType.CHOICE, texts)
    kept = [one for one in compiler._kept.values() if isinstance(one, CompiledGrammar)]
    assert kept[-1].num_bytes > 2**20
    assert sum(one.num_bytes for one in kept) <= 40 * 2**20
