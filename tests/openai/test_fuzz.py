"""Random bodies: an answer or a refusal, never a fault."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from fastapi.testclient import TestClient
from standins import TINY, Echo

from smartspec_gateway.limits import Limits
from smartspec_gateway.openai.app import create_app
from smartspec_gateway.openai.endpoint import Settings
from smartspec_gateway.openai.prompts import Prompts

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello!", "max_tokens": 2},
    "/tokenize": {"prompt": "Hello!"},
    "/detokenize": {"tokens": [300, 301]},
}
SHARED: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 2],
    "n": [1, 3],
    "stop": ["x", ["a", "b"], None],
    "seed": [0, -1, 2**70],
    "logit_bias": [{"300": -100}, {}],
    "stream": [True, False],
    "num_draft_tokens": [0, 2],
    "return_spec_metrics": ["summary", "detailed"],
}
OWN: dict[str, dict[str, list[Any]]] = {
    "/v1/chat/completions": SHARED
    | {
        "logprobs": [True, False],
        "tools": [[TOOL], None],
        "tool_choice": ["auto", "none"],
        "response_format": [{"type": "text"}],
        "messages": [[{"role": "developer", "content": [{"type": "text", "text": "x"}]}]],
        "chat_template_kwargs": [{"x": 1}],
    },
    "/v1/completions": SHARED
    | {
        "echo": [True, False],
        "logprobs": [0, 5],
        "prompt": ["é", ["a", "b"], [300, 5], [[300], [301, 302]]],
    },
}
WRONG: list[Any] = [
    *(None, True, -1, 0, 3, 10**40, -(2**31) - 1, 1e300, 0.5, "", "text", "\ud800", "\x00"),
    *([], [[]], [None], [1, "a"], ["", ""], [99_999], {}, {"a": {"b": []}}, "x" * 20_000),
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
]
EXTRA = ("best_of", "functions", "__class__", "max_token", "", "a" * 300, "max_completion_tokens")
RAW = [
    *(b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"prompt":"a","max_tokens":NaN}'),
    b'{"prompt":' + b"[" * 50_000,
    b'{"messages":' + b'{"a":' * 50_000,
    b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
    b'{"prompt":"a","temperature":1e999,"max_tokens":1}',
]


def random_body(random: Random, path: str) -> bytes:
    body = dict(BASE[path])
    good = OWN.get(path, {})
    for name in random.sample(list(good), min(len(good), random.randrange(5))):
        body[name] = random.choice(good[name])
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        body[random.choice((*good, *body, *EXTRA))] = random.choice(WRONG)
    sent = json.dumps(body).encode()
    if random.random() < 0.1:
        at = random.randrange(len(sent))
        sent = sent[:at] + random.randbytes(1) + sent[at + 1 :]
    return sent


@pytest.mark.parametrize("path", BASE)
def test_no_body_is_a_fault(path: str) -> None:
    app = create_app(Echo(), Prompts(TINY), Settings("smartspec", Limits(512)))
    client = TestClient(app, raise_server_exceptions=False)
    num_good = 0
    for body in (*RAW, *(random_body(Random(f"2/{number}"), path) for number in range(80))):
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        num_good += answer.status_code == 200
        assert answer.status_code < 500, body[:500]
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"]
            assert {"type", "param", "code"} <= set(error)
    assert num_good > 20
