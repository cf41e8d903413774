"""Halves of surrogate pairs, which JSON can escape and UTF-8 cannot hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from endpoint_client import JSON, http
from httpx2 import Client
from standins import TINY, text_with

from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_gateway.openai.surrogates import without_escaped_surrogates

LONE = '{"a": "\\ud83d"}'
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"role": "user", "content": "Hello!"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": LONE}}
TEMPLATE = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}
{{- c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ tools }}"""
REFUSING = (
    TEMPLATE + "{% if messages[0].tool_calls %}"
    "{{ raise_exception(messages[0].tool_calls[0].function.arguments.a) }}{% endif %}"
)


def client(tmp_path: Path, template: str, *answer: str) -> tuple[Client, Any]:
    (tmp_path / "chat.jinja").write_text(template)
    model, prompts = text_with(*answer), Prompts(TINY, tmp_path / "chat.jinja")
    return http(model, prompts), model


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}, HELLO]}),
        (
            RESPONSES,
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": LONE},
                    HELLO,
                ]
            },
        ),
        ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": [CALL]}, HELLO]}),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_arguments_of_an_earlier_call(
    path: str, body: dict[str, Any], streams: bool, tmp_path: Path
) -> None:
    asked, model = client(tmp_path, TEMPLATE, "Yes.")
    more = {} if path == "/tokenize" else {"stream": streams}
    answer = asked.post(path, json=body | more)
    assert answer.status_code == 200, answer.text
    found = answer.json()["tokens"] if path == "/tokenize" else model.asked[0]["input_ids"]
    assert '{"a": "\ufffd"}Hello!' in Prompts(TINY).decode(found)
    refusing, _ = client(tmp_path, REFUSING)
    error = refusing.post(path, json=body | more)
    assert error.status_code == 400
    assert error.json()["error"]["message"].endswith("\ufffd")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [HELLO | {"content": "a\ud83d"}]}),
        (CHAT, {"messages": [HELLO | {"content": [{"type": "text", "text": "a\udc00"}]}]}),
        (RESPONSES, {"input": "a\ud83d"}),
        (MESSAGES, {"messages": [HELLO | {"content": "a\ud83d"}], "max_tokens": 9}),
        ("/tokenize", {"prompt": "a\ud83d"}),
        ("/v1/completions", {"prompt": "a\ud83d", "stop": "\ud83d"}),
    ],
)
def test_texts_of_a_request(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    asked, model = client(tmp_path, "{{ messages[0].content }}", "Yes.")
    answer = asked.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 200, answer.text
    found = answer.json()["tokens"] if path == "/tokenize" else model.asked[0]["input_ids"]
    assert Prompts(TINY).decode(found).endswith("a\ufffd")


def test_a_body_with_another_fault_is_refused() -> None:
    for end in (b'"', b'\xff"}', b'\\x"}'):
        body = b'{"prompt": "\\ud83d' + end
        answer = http().post("/v1/completions", content=body, headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("the body is not valid JSON: ")


@pytest.mark.parametrize("depth", [150, 500, 900, 5000])
def test_arguments_of_any_depth(depth: int, tmp_path: Path) -> None:
    """Beyond 200 levels they are passed as their text."""
    arguments = '{"a":' + "[" * depth + "]" * depth + "}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked, _ = client(tmp_path, TEMPLATE)
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}, HELLO]}
    answer = asked.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    assert "[" * depth in Prompts(TINY).decode(answer.json()["tokens"])


WRITTEN = f'<tool_call>{{"name": "f", "arguments": {LONE}}}</tool_call>'
FORCED = f'<tool_call>\n{{"name": "f", "arguments": {LONE}}}\n</tool_call>'
FLAT: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOLS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    CHAT: ({"messages": [HELLO]}, [{"type": "function", "function": {"name": "f"}}]),
    RESPONSES: ({"input": "Hello"}, [FLAT]),
    MESSAGES: (
        {"messages": [HELLO], "max_tokens": 9},
        [{"name": "f", "input_schema": {"type": "object"}}],
    ),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("path", TOOLS)
def test_arguments_that_the_model_writes(
    path: str, is_forced: bool, streams: bool, tmp_path: Path
) -> None:
    """The whole answer is there, and no client gets half a pair that is not escaped."""
    asked, _ = client(tmp_path, TEMPLATE, FORCED if is_forced else WRITTEN)
    body, tools = TOOLS[path]
    body = body | {"tools": tools, "stream": streams}
    if is_forced:
        body["tool_choice"] = {"type": "any"} if path == MESSAGES else "required"
    answer = asked.post(path, json=body)
    assert answer.status_code == 200, answer.text
    text = answer.content.decode()
    assert '"tool_use"' in text or '"tool_calls"' in text or '"function_call"' in text
    assert "error" not in text or '"error":null' in text or '"error": null' in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'"\ud83d"', r'"\ufffd"'),
        (r'"\ud83d\ude00"', r'"\ud83d\ude00"'),
        (r'"\\ud83d"', r'"\\ud83d"'),
        (r'"\\\ud83d\n\uDC00"', r'"\\\ufffd\n\ufffd"'),
        (r'"\ud83d\ud83d\ude00', r'"\ufffd\ud83d\ude00'),
        (r'"\ud83d\ud', r'"\ufffd\ud'),
        ('"\\', '"\\'),
    ],
)
def test_escapes(text: str, expected: str) -> None:
    assert without_escaped_surrogates(text) == expected
    if expected.endswith('"'):
        json.loads(expected).encode()
