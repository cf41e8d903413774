"""Answers that are large: bounded before the work, and written in parts between which other
requests have their turn."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from endpoint_client import CHAT, HELLO, TEXTS, http
from standins import Echo

from smartspec_gateway.openai.json_parts import PART, Encoded, parts, sliced
from smartspec_gateway.openai.logprobs import MAX_ENTRIES, documents
from smartspec_gateway.openai.model import Model, Piece
from smartspec_gateway.openai.pieces import pieces_of
from smartspec_py.api.inputs import MAX_ANSWER_VALUES

FULL = {"logprobs": True, "top_logprobs": 20}
ECHO = {"prompt": "a " * 3000, "logprobs": 20, "echo": True}
TOO_MUCH: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": HELLO, "n": 128, "max_tokens": 2008, **FULL}, "n"),
    (CHAT, {"messages": HELLO, "n": 128, "max_tokens": 373, **FULL}, "n"),
    (CHAT, {"messages": HELLO, "max_tokens": 50_000, **FULL}, "max_tokens"),
    (TEXTS, {"prompt": ["a"] * 128, "max_tokens": 2008, "logprobs": 20}, "max_tokens"),
    (TEXTS, {**ECHO, "n": 16, "max_tokens": 1}, "n"),
    (TEXTS, {**ECHO, "n": 16}, "n"),
    (TEXTS, {**ECHO, "prompt": ["a " * 3000] * 16}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), TOO_MUCH)
def test_an_answer_that_would_be_too_large_is_refused(
    path: str, body: dict[str, Any], param: str
) -> None:
    """Before anything is generated, with the fields and the range. As a stream it is served."""
    model = Echo()
    error = http(model, context_len=65_536).post(path, json=body).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: got ")
    assert f"21 log-probabilities each, must be at most {MAX_ANSWER_VALUES} val" in error["message"]
    assert not model.asked
    streamed = http(model, context_len=65_536).post(path, json=body | {"stream": True})
    assert streamed.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (CHAT, {"messages": HELLO, **FULL}, MAX_ANSWER_VALUES // 22),
        (CHAT, {"messages": HELLO, "n": 16, **FULL}, MAX_ANSWER_VALUES // 22 // 16),
        (CHAT, {"messages": HELLO, "n": 128}, MAX_ANSWER_VALUES // 128),
        (TEXTS, {"prompt": [[300] * 9] * 16, "echo": True}, MAX_ANSWER_VALUES // 16 - 9),
    ],
)
def test_without_a_limit_an_answer_gets_the_tokens_that_fit(
    path: str, body: dict[str, Any], most: int
) -> None:
    """The header tells the limit. A stream gets the rest of the context."""
    model = Echo()
    answer = http(model, context_len=131_072).post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert {one["max_tokens"] for one in model.asked} == {most}
    assert answer.headers["x-max-tokens"] == str(most)
    streamed = http(model, context_len=131_072).post(path, json=body | {"stream": True})
    assert "x-max-tokens" not in streamed.headers
    assert model.asked[-1]["max_tokens"] > 131_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 8100, **FULL}),
        (CHAT, {"messages": HELLO, **FULL}),
        (CHAT, {"messages": HELLO, "n": 128}),
        (CHAT, {"messages": HELLO, "n": 128, "max_tokens": 372, **FULL}),
        (TEXTS, {"prompt": "a " * 3000, "max_tokens": 0, "logprobs": 20, "echo": True}),
    ],
)
def test_a_whole_context_of_log_probs_is_served(path: str, body: dict[str, Any]) -> None:
    assert http(context_len=8192).post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        {"a": [1, 2.5, True, None, "x\n\u2028é"], "b": {"c": {}}, "": [[]]},
        "é\n\\" * PART,
        ["x" * (3 * PART + 1), {"y": "🙂" * PART}],
    ],
)
def test_parts_are_the_json_of_the_value(value: Any) -> None:
    shown = list(parts(value))
    assert json.loads("".join(shown)) == value
    assert max(map(len, shown)) <= 6 * PART, "an escape takes up to six characters"
    assert json.loads("".join(parts([Encoded('{"a":1}')]))) == [{"a": 1}]


def entries(first: int, num: int) -> list[Any]:
    return [[first + i, -0.5, [[first + i, -0.5]] * 20] for i in range(num)]


@pytest.mark.parametrize("given", [{}, {"prompt": 1}, {"prompt": 70, "output": 3}, {"output": 64}])
def test_log_probs_come_in_documents_of_bounded_size(given: dict[str, int]) -> None:
    whole = {name: entries(7, num) for name, num in given.items()}
    found = list(documents(json.dumps(whole, separators=(",", ":"))))
    assert all(len(each) <= MAX_ENTRIES for one in found for each in one.values())
    joined: dict[str, list[Any]] = {}
    for one in found:
        for name, each in one.items():
            joined.setdefault(name, []).extend(each)
    assert joined == whole


class FromTriton:
    """Responses of Triton with a whole prompt's log-probabilities in one document."""

    async def responses(self, *_: Any) -> AsyncIterator[list[bytes]]:
        logs = json.dumps({"prompt": entries(0, 2000)}, separators=(",", ":"))
        last = {"text_output": "x", "num_output_tokens": 1, "finish_reason": "stop"}
        yield [json.dumps(last | {"token_log_probs": logs}).encode()]


class Turns:
    """Counts the turns of another task of the event loop."""

    def __init__(self) -> None:
        self.num = 0

    async def run(self) -> None:
        while True:
            self.num += 1
            await asyncio.sleep(0)


def test_many_log_probs_leave_turns_to_others() -> None:
    """Another task runs after each part of at most MAX_ENTRIES tokens, where they are read and
    where they are passed on."""

    async def run() -> None:
        turns, seen, sizes = Turns(), [], []
        other = asyncio.create_task(turns.run())
        model = Model(FromTriton(), "smartspec")  # type: ignore[arg-type]
        async for found in pieces_of(model, [{}]):
            if found:
                seen.append(turns.num)
                sizes.append(len((found[1].log_probs or {}).get("prompt", [])))
        other.cancel()
        assert sum(sizes) == 2000
        assert max(sizes) <= MAX_ENTRIES
        assert all(after > before for before, after in itertools.pairwise(seen))

    asyncio.run(run())


@pytest.mark.parametrize(
    "document",
    [{"text": "x" * 1_000_000}, {"tools": [{"a": i} for i in range(50_000)]}],
    ids=["text", "objects"],
)
def test_a_large_document_leaves_turns_to_others(document: Any) -> None:
    """A part has a bounded number of characters, and another task runs between two."""

    async def run() -> None:
        turns, seen, sizes = Turns(), [], []
        other = asyncio.create_task(turns.run())
        async for part in sliced(parts(document)):
            seen.append(turns.num)
            sizes.append(len(part))
        other.cancel()
        assert max(sizes) <= 2 * PART
        assert len(sizes) >= sum(sizes) // (2 * PART)
        assert all(after > before for before, after in itertools.pairwise(seen))

    asyncio.run(run())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXTS, "/v1/responses", "/v1/messages"])
def test_a_long_text_arrives_whole(path: str, streams: bool) -> None:
    text = "é\u2028" * 100_000
    model = Echo(pieces=[Piece(text, 1, "stop", 5)])
    body: dict[str, Any] = {"stream": streams, "messages": HELLO, "max_tokens": 9}
    if path == TEXTS:
        body = {"prompt": "a", "stream": streams}
    elif path == "/v1/responses":
        body = {"input": "a", "stream": streams}
    answer = http(model).post(path, json=body)
    assert answer.status_code == 200
    found = answer.content.decode()
    assert found.count("é") >= 100_000
    if streams:
        assert "\u2028" not in found
        events = [one for one in found.split("\n\n") if one and "[DONE]" not in one]
        assert all(json.loads(one.partition("data: ")[2]) for one in events)
    else:
        assert text in json.dumps(answer.json(), ensure_ascii=False)
