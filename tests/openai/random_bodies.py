"""Random request bodies for the endpoint: valid ones, nearly valid ones, and bytes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, CHAT, TEXT, TEXT, "/tokenize", "/detokenize")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

BASE: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2},
    TEXT: {"prompt": "Hello!", "max_tokens": 2},
    "/tokenize": {"prompt": "Hello!"},
    "/detokenize": {"tokens": [300, 301]},
}
GOOD: Mapping[str, Sequence[Any]] = {
    "temperature": (0, 0.7, 2),
    "top_p": (0.1, 1),
    "n": (1, 2, 3),
    "stop": ("x", ["a", "b"], None),
    "seed": (0, -1, 2**70),
    "logit_bias": ({"300": -100}, {}),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, None),
    "logprobs": (True, False, 0, 5),
    "top_logprobs": (0, 20),
    "echo": (True, False),
    "prompt": ("é", ["a", "b"], [300, 5], [[300], [301, 302]]),
    "tools": ([TOOL], None),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "messages": (
        [{"role": "developer", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "tool", "content": "x", "tool_call_id": "y"}],
    ),
    "speculation_policy": ("none", "fixed:2", "goodput"),
    "num_draft_tokens": (0, 2),
    "return_spec_metrics": ("summary", "detailed"),
    "min_tokens": (1,),
    "chat_template_kwargs": ({"x": 1},),
    "user": ("someone",),
}
ONLY_ELSEWHERE: Mapping[str, Collection[str]] = {
    CHAT: ("prompt", "echo"),
    TEXT: (
        "messages",
        "tools",
        "tool_choice",
        "response_format",
        "chat_template_kwargs",
        "top_logprobs",
    ),
}
"""Fields of other paths. Paths that are not here take none."""

WRONG: Sequence[Any] = (
    None,
    True,
    -1,
    0,
    3,
    10**40,
    -(2**31) - 1,
    1e300,
    0.5,
    "",
    "text",
    "\ud800",
    "\x00",
    [],
    [[]],
    [None],
    [1, "a"],
    ["", ""],
    [99_999],
    {},
    {"a": {"b": []}},
    {"type": "json_object"},
    [{"role": "user"}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
    "x" * 20_000,
)
EXTRA = ("best_of", "suffix", "functions", "store", "__class__", "max_token", "", "a" * 300)
RAW = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe{}",
    b'{"prompt":' + b"[" * 50_000,
    b'{"messages":' + b'{"a":' * 50_000,
    b'{"prompt":"a","max_tokens":NaN}',
    b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
    b'{"prompt":"a","temperature":1e999,"max_tokens":1}',
    b'{"prompt":"a","prompt":"b","max_tokens":1}',
)


def random_body(random: Random) -> tuple[str, bytes]:
    """A path and a body."""
    path = random.choice(PATHS)
    if random.random() < 0.1:
        raw = random.choice((*RAW, random.randbytes(50)))
        return path, raw
    body = dict(BASE[path])
    fitting = [name for name in GOOD if name not in ONLY_ELSEWHERE.get(path, GOOD)]
    for _ in range(random.randrange(5) if fitting else 0):
        name = random.choice(fitting)
        body[name] = random.choice(GOOD[name])
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        name = random.choice((*GOOD, *BASE[path], *EXTRA, "max_tokens", "max_completion_tokens"))
        body[name] = random.choice(WRONG)
    if random.random() < 0.05:
        body.pop(random.choice(tuple(body)), None)
    sent = json.dumps(body).encode()
    if random.random() < 0.1:
        at = random.randrange(len(sent))
        sent = sent[:at] + random.randbytes(1) + sent[at + 1 :]
    return path, sent


def problem(status: int, body: bytes) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if status == 200:
        return ""
    try:
        error = json.loads(body)["error"]
        is_error = isinstance(error["message"], str) and {"type", "param", "code"} <= set(error)
    except (ValueError, LookupError, TypeError):
        is_error = False
    if status >= 500 or not is_error:
        return f"status {status}: {body[:200]!r}"
    return ""
