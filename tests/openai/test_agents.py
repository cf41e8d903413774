"""What agents send beside the conversation: newer fields, and limits of other models."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from endpoint_client import CHAT, HELLO, http
from standins import TINY, Echo

from smartspec_gateway.openai.apis.routes import error_document
from smartspec_gateway.openai.errors import PromptTooLong
from smartspec_gateway.openai.formats.prompts import Prompts

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    RESPONSES: {"input": HELLO},
    MESSAGES: {"messages": HELLO, "max_tokens": 5},
}
LIMITS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (RESPONSES, "max_output_tokens"),
    (MESSAGES, "max_tokens"),
]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ VARIABLE }}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_unknown_fields_are_named_in_a_header(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Echo()
    client = http(model)
    new = {"thread": {"id": "x"}, "betas": ["a"], "sch\u00f6n\n": 1, "temperatur": 9}
    plain = client.post(path, json=BODIES[path] | {"stream": stream})
    assert "x-ignored-fields" not in plain.headers
    with caplog.at_level(logging.WARNING, "smartspec_gateway.openai"):
        for _ in range(2):
            answer = client.post(path, json=BODIES[path] | new | {"stream": stream})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ignored-fields"] == "thread, betas, sch?n?, temperatur"
    assert len(caplog.messages) == 4, "once per field"
    assert caplog.messages[0] == f"{path}: the field thread is unknown and has no effect"
    assert model.asked[0] == model.asked[1]
    many = {f"x{number}{'y' * 100}": 1 for number in range(20_000)}
    shown = client.post(path, json=BODIES[path] | many).headers["x-ignored-fields"]
    assert shown.split(", ") == [f"x{number}{'y' * 100}"[:64] for number in range(16)]


def test_tokens_are_counted_with_unknown_fields() -> None:
    known, new = BODIES[MESSAGES], {"thread": 1, "temperature": 9}
    counts = [http(Echo()).post(COUNT, json=body).json() for body in (known, known | new)]
    assert counts[0] == counts[1]
    assert counts[0]["input_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "name", "sentence"),
    [
        (CHAT, "thread", "unknown; did you mean stream?"),
        (RESPONSES, "response_format", "unknown; did you mean text.format?"),
        (MESSAGES, "stop", "unknown; did you mean stop_sequences?"),
        (MESSAGES, "response_format", "unknown; did you mean output_config.format?"),
    ],
)
def test_fields_with_an_effect_are_not_ignored(path: str, name: str, sentence: str) -> None:
    answer = http(Echo()).post(path, json=BODIES[path] | {name: {}})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{name}: {sentence}"


@pytest.mark.parametrize(
    ("thinking", "variable"),
    [
        ({"type": "enabled", "budget_tokens": 31_999}, True),
        ({"type": "adaptive", "display": "omitted"}, True),
        ({"type": "between_tools"}, True),
        ({"type": "disabled"}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_thinking_is_a_variable_of_the_template(
    tmp_path: Path, name: str, thinking: Any, variable: bool
) -> None:
    """Under the name that the template has for it. As Anthropic's models, it thinks if asked."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE.replace("VARIABLE", name))
    prompts, model = Prompts(TINY, tmp_path / "chat.jinja"), Echo()
    body = BODIES[MESSAGES] | {"thinking": thinking, "output_config": {"task_budget": {}}}
    assert http(model, prompts).post(MESSAGES, json=body).status_code == 200
    assert prompts.decode(model.asked[0]["input_ids"]) == f"Hello!{variable}"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"enable_thinking": False}, "False"),
        ({"thinking": True}, "True"),
        ({"enable_thinking": True, "thinking": False}, "False"),
    ],
)
def test_a_setting_of_thinking_has_both_names(
    tmp_path: Path, path: str, given: dict[str, bool], shown: str
) -> None:
    """What a client has set for the template's own name stays."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE.replace("VARIABLE", "thinking"))
    prompts, model = Prompts(TINY, tmp_path / "chat.jinja"), Echo()
    body = {"messages": HELLO, "chat_template_kwargs": given}
    answer = http(model, prompts).post(path, json=body)
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["tokens"] if path == "/tokenize" else model.asked[0]["input_ids"]
    assert prompts.decode(tokens) == f"Hello!{shown}"


@pytest.mark.parametrize("effort", ["none", "low"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_no_effort_is_no_thinking(tmp_path: Path, path: str, effort: str) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE.replace("VARIABLE", "thinking"))
    prompts, model = Prompts(TINY, tmp_path / "chat.jinja"), Echo()
    named = {"reasoning_effort": effort} if path == CHAT else {"reasoning": {"effort": effort}}
    assert http(model, prompts).post(path, json=BODIES[path] | named).status_code == 200
    shown = "False" if effort == "none" else ""
    assert prompts.decode(model.asked[0]["input_ids"]) == f"Hello!{shown}"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"reasoning_effort": "none"}, "0"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "0"),
        ({"chat_template_kwargs": {"thinking": False, "thinking_budget": 5}}, "5"),
        ({"chat_template_kwargs": {"thinking": True}}, ""),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, ""),
    ],
)
def test_no_thinking_is_a_budget_of_none(
    tmp_path: Path, fields: dict[str, Any], shown: str
) -> None:
    """As Seed-OSS's template knows it."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE.replace("VARIABLE", "thinking_budget"))
    prompts, model = Prompts(TINY, tmp_path / "chat.jinja"), Echo()
    body = {"messages": HELLO, **fields}
    assert http(model, prompts).post(CHAT, json=body).status_code == 200
    assert prompts.decode(model.asked[0]["input_ids"]) == f"Hello!{shown}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "name"), LIMITS)
def test_a_limit_above_what_is_left_is_an_upper_bound(path: str, name: str, stream: bool) -> None:
    model = Echo()
    answer = http(model).post(path, json=BODIES[path] | {name: 32_000, "stream": stream})
    assert answer.status_code == 200, answer.text
    (asked,) = model.asked
    left = 512 - len(asked["input_ids"])
    assert asked["max_tokens"] == left
    assert answer.headers["x-max-tokens"] == str(left)
    exact = http(model).post(path, json=BODIES[path] | {name: left, "stream": stream})
    assert model.asked[1]["max_tokens"] == left
    assert "x-max-tokens" not in exact.headers


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a " * 600, "610 tokens > 511 maximum"), ("a" * 50_000, "781 tokens > 511 maximum")],
)
def test_a_prompt_that_is_too_long_has_each_apis_words(text: str, shown: str) -> None:
    """Claude Code makes the conversation shorter at these. Of a prompt of too many characters,
    64 are counted as one token."""
    long = [{"role": "user", "content": text}]
    answer = http(Echo()).post(MESSAGES, json=BODIES[MESSAGES] | {"messages": long})
    assert (answer.status_code, answer.json()) == (
        400,
        {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": f"prompt is too long: {shown}"},
        },
    )
    for path, name in ((CHAT, "messages"), (RESPONSES, "input")):
        error = http(Echo()).post(path, json=BODIES[path] | {name: long}).json()["error"]
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")


def test_the_error_passes_between_processes() -> None:
    error = PromptTooLong("messages", "9 tokens", "8 tokens", 9, 8)
    found = pickle.loads(pickle.dumps(error))
    assert error_document(found, MESSAGES) == error_document(error, MESSAGES)
    assert json.dumps(found.body) == json.dumps(error.body)
