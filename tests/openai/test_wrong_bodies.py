"""Bodies of requests: fields that are refused, with their names, and fields without effect."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from endpoint_client import CHAT, CUSTOM, HELLO, JSON, TEXTS, TOOL, allowed, http
from openai.types.chat.completion_create_params import CompletionCreateParams as ChatParams
from openai.types.completion_create_params import CompletionCreateParams as TextParams
from pydantic import ValidationError
from standins import Echo

from smartspec_gateway.openai.apis.chat_schema import ChatRequest
from smartspec_gateway.openai.apis.responses_schema import ResponsesRequest
from smartspec_gateway.openai.apis.schema import REFUSED, CompletionRequest

pytestmark = pytest.mark.slow  # so that they run beside the others

TEXT = "messages.0.content.0.text"


@pytest.mark.parametrize(
    ("changed", "param", "part"),
    [
        ({"temperature": 3}, "temperature", "got 3"),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"max_tokens": 2**40}, "max_tokens", "got 1099511627776"),
        ({"max_tokens": 1e300}, "max_tokens", "got 1e+300, must be an integer of 64 bits"),
        ({"guided_regex": ""}, "guided_regex", "got '', must be text of length 1 or more"),
        ({"max_token": 3}, "max_token", "did you mean max_tokens"),
        ({"functions": [{}]}, "functions", "must be empty: use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "must be 'auto' or 'none'"),
        ({"best_of": 2}, "best_of", "got 2, must be 1"),
        ({"bad_words": "a"}, "bad_words", "must be a list"),
        ({"priority": 1}, "priority", "got 1, must be 0"),
        ({"suffix": "a"}, "suffix", "got 'a', must be ''"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "got 'much', must be 'none', "),
        ({"top_logprobs": 2}, "top_logprobs", "only with logprobs"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "auto"),
        ({"tool_choice": "required"}, "tool_choice", "got 'required' without a function of tools"),
        (
            {"tools": [CUSTOM], "tool_choice": "required"},
            "tool_choice",
            "got 'required' without a function of tools",
        ),
        (
            {"tools": [CUSTOM], "tool_choice": CUSTOM},
            "tool_choice.type",
            "got 'custom', must be 'function' or 'allowed_tools'",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
            "got 'other', must be a function of tools",
        ),
        ({"tools": [CUSTOM, {"type": "retrieval"}]}, "tools.1.type", "function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "be given"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "with json_schema"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "response_format",
            "not together with guided_regex",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]},
            "structured_outputs.regex",
            "not together with guided_choice",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, json_object, reg"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length 1 or more"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "True"),
        (
            {"structured_outputs": {"json": {}, "structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "is not supported; leave it out",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "must be False",
        ),
        (
            {"continue_final_message": True},
            "add_generation_prompt",
            "got True, must be false with continue_final_message",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "with type and allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.mode",
            "is not supported; leave it out",
        ),
        ({"tool_choice": allowed("x")}, "tool_choice.allowed_tools.mode", "'auto' or 'required'"),
        ({"tool_choice": allowed("auto")}, "tool_choice", "got 'weather', must be a function of"),
        (
            {"tools": [TOOL], "tool_choice": allowed("required", {"type": "function"})},
            "tool_choice.allowed_tools.tools.0.function",
            "must be given",
        ),
        ({"n": 129}, "n", "n: got 129, must be less than or equal to 128"),
        ({"stop": 5}, "stop", "stop: got 5, must be text or a list"),
        (
            {"stop": ["a"] * 17},
            "stop",
            "got a list of length 17, must be text or a list of length 16 or less",
        ),
        ({"modalities": ["text", "audio"]}, "modalities.1", "got 'audio', must be 'text'"),
        ({"echo": True}, "echo", "must be false: only /v1/completions returns the prompt"),
        ({"policy": "none"}, "policy", "did you mean speculation_policy?"),
        ({"prediction": {}}, "prediction", "prediction: is not supported; leave it out"),
        ({"web_search_options": {}}, "web_search_options", "is not supported; leave it out"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "True"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, TEXT, "must be given"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages.0.function_call",
            "must be left out: use tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "audio": {"id": "a"}}]},
            "messages.0.audio",
            "must be left out: use content",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "prefix": True}]},
            "messages.0.prefix",
            "got True, must be false or left out: use continue_final_message",
        ),
        ({"messages": [5]}, "messages.0", "messages.0: got 5, must be an object"),
        ({"temperature": float("inf")}, "temperature", "got inf"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "robot"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages", "only the roles"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "only one"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "got token '9999'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "9.., must be in 0..2047"),
    ],
)
def test_wrong_fields_are_named(changed: dict[str, Any], param: str | None, part: str) -> None:
    model = Echo()
    body = json.dumps({"messages": HELLO, **changed}).encode()
    answer = http(model).post(CHAT, content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert part in error["message"]
    assert not model.asked


MANY = 20_000
FLOODS: list[dict[str, Any]] = [
    {"prompt": [{}] * MANY},
    {"prompt": [["a"] * MANY]},
    {"messages": [5] * MANY},
    {"messages": [{"role": "user", "content": [5] * MANY}]},
    {"messages": [{"role": "assistant", "tool_calls": [5] * MANY}]},
    {"messages": HELLO, "tools": [5] * MANY},
    {"messages": HELLO, "stop": [5] * MANY},
    {"messages": HELLO, "stop_token_ids": ["a"] * MANY},
    {"messages": HELLO, "modalities": [5] * MANY},
    {"messages": HELLO, "logit_bias": {str(i): "a" for i in range(MANY)}},
    {"messages": HELLO, **{f"x{i}": 1 for i in range(MANY)}},
    {"messages": [{"role": "user", "content": [{f"x{i}": 1 for i in range(MANY)}]}]},
    {"input": [5] * MANY},
    {"input": [{"role": "user", "content": [5] * MANY}]},
    {"input": "a", "include": [5] * MANY},
]


@pytest.mark.parametrize("body", FLOODS, ids=lambda body: str(body)[:40])
def test_a_wrong_body_has_few_errors(body: dict[str, Any]) -> None:
    """Each error takes a kilobyte."""
    schemas = {"messages": ChatRequest, "prompt": CompletionRequest, "input": ResponsesRequest}
    schema = next(schemas[name] for name in body if name in schemas)
    with pytest.raises(ValidationError) as raised:
        schema.model_validate(body)
    assert raised.value.error_count() <= 4


NULLS = {"temperature", "top_p", "n", "stream", "presence_penalty", "frequency_penalty", "stop"}
NULLS |= {"logprobs", "seed", "logit_bias", "max_tokens", "stream_options", "user", "functions"}
IGNORED = {
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "store": True,
    "user": "x",
    "request_id": "x",
    "skip_special_tokens": True,
    "best_of": 1,
    "suffix": "",
    "functions": [],
    "function_call": "auto",
    "use_beam_search": False,
    "include_stop_str_in_output": False,
    "priority": 0,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "cache_prompt": True,
    "logit_bias": {},
}
IN_MESSAGES = {"mcp_servers": [], "tools": [], "stop_sequences": [], "metadata": {}}
OF_CHATS = {"verbosity": "low", "modalities": ["text"], "echo": False, "tools": []}
OF_CHATS |= {"add_special_tokens": False, "include_reasoning": True}


def test_null_and_fields_without_effect_change_nothing() -> None:
    model = Echo()
    nulls: dict[str, Any] = dict.fromkeys(NULLS)
    chat_nulls = nulls | dict.fromkeys(["parallel_tool_calls", "tools", "top_logprobs"])
    for more in ({}, chat_nulls, IGNORED | OF_CHATS):
        answer = http(model).post(CHAT, json={"messages": HELLO, **more})
        assert answer.status_code == 200, answer.text
    for more in ({}, nulls | {"echo": None, "logprobs": False}, IGNORED):
        answer = http(model).post(TEXTS, json={"prompt": "Hello", **more})
        assert answer.status_code == 200, answer.text
    assert model.asked[0] == model.asked[1] == model.asked[2]
    assert model.asked[3] == model.asked[4] == model.asked[5]
    for more in ({}, IN_MESSAGES):
        body = {"messages": HELLO, "max_tokens": 9, **more}
        answer = http(model).post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
    assert model.asked[6] == model.asked[7]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"messages": HELLO}, "stop"),
        (TEXTS, {"prompt": "a"}, "stop"),
        ("/v1/responses", {"input": "a"}, "stop"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}, "stop_sequences"),
    ],
)
def test_empty_stop_words_are_left_out(path: str, body: dict[str, Any], name: str) -> None:
    model = Echo()
    for given in ([], [""], ["", ""], ["", "!"]):
        answer = http(model).post(path, json=body | {name: given})
        assert answer.status_code == 200, answer.text
    assert [one.get("stop_words") for one in model.asked] == [None, None, None, ["!"]]
    if name == "stop":
        http(model).post(path, json=body | {name: ""})
        assert "stop_words" not in model.asked[-1]


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXTS, {"prompt": "a"})])
def test_a_limit_has_two_names(path: str, body: dict[str, Any]) -> None:
    model, names = Echo(), ("max_tokens", "max_completion_tokens")
    for given in (names[:1], names[1:], names):
        answer = http(model).post(path, json=body | dict.fromkeys(given, 3))
        assert answer.status_code == 200, answer.text
    assert [one["max_tokens"] for one in model.asked] == [3, 3, 3]
    for older, newer in ((0, 1), (2, 1), (1, 2)):
        answer = http(model).post(path, json=body | {names[0]: older, names[1]: newer})
        assert answer.json()["error"]["param"] == names[1]


def test_each_field_of_the_openai_package_has_its_place() -> None:
    """The page of the fields names all that are refused."""
    for schema, theirs in ((ChatRequest, ChatParams), (CompletionRequest, TextParams)):
        names = {name for one in get_args(theirs) for name in one.__annotations__}
        assert len(names) > 15
        assert names - schema.model_fields.keys() <= set(REFUSED)


def test_what_is_not_json_for_this_server() -> None:
    for headers, status in (
        ({"Content-Type": "text/plain"}, 400),
        ({"Content-Type": "application/vnd.api+json; charset=utf-8"}, 200),
    ):
        answer = http().post(TEXTS, content=b'{"prompt":"x"}', headers=headers)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["message"].startswith(
            "Content-Type: got 'text/plain', must be"
        )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a " * 600}]}, 0),
        (TEXTS, {"prompt": "a " * 600}, "prompt"),
        (TEXTS, {"prompt": [300] * 512}, "prompt"),
        (TEXTS, {"prompt": "a" * 50_000}, "prompt"),
        ("/tokenize", {"prompt": "a" * 50_000}, "prompt"),
        (TEXTS, {"prompt": "a", "max_tokens": 512}, "max_tokens"),
    ],
)
def test_too_much_for_the_context_has_openais_code(path: str, body: Any, param: Any) -> None:
    error = http().post(path, json=body).json()["error"]
    assert (error["param"], error["code"]) == (param or "messages", "context_length_exceeded")


WRONG: list[Any] = [
    *(True, -1, 0, 3, 10**40, 1e300, 0.5, "", "text", "\ud800", "\x00", "x" * 20_000),
    *([], [[]], [None], [1, "a"], ["", ""], [99_999], {}, {"a": {"b": []}}),
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
]
RAW = [
    *(b"", b"{", b"[]", b"null", b"\xff", b"\xff\xfe{}", b'{"prompt":"a","max_tokens":NaN}'),
    b'{"prompt":' + b"[" * 50_000,
    b'{"messages":' + b'{"a":' * 50_000,
    b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
    b'{"prompt":"a","temperature":1e999,"max_tokens":1}',
]


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (CHAT, {"messages": HELLO}, list(ChatRequest.model_fields)),
        (TEXTS, {"prompt": "Hello!"}, list(CompletionRequest.model_fields)),
        ("/v1/responses", {"input": "Hello!"}, list(ResponsesRequest.model_fields)),
        ("/tokenize", {"prompt": "Hello!"}, ["prompt", "add_special_tokens"]),
        ("/detokenize", {"tokens": [300]}, ["tokens"]),
    ],
)
def test_no_body_is_a_fault(path: str, body: dict[str, Any], names: list[str]) -> None:
    """Wrong values in each field and in unknown ones: an answer, or a refusal with its reason."""
    names += ["prediction", "__class__", "", "a" * 300]
    bodies = [json.dumps(body | {name: value}).encode() for name in names for value in WRONG]
    statuses, asked = {}, http()
    for sent in (*RAW, *bodies):
        answer = asked.post(path, content=sent, headers=JSON)
        statuses[sent] = answer.status_code
        assert answer.status_code == 200 or answer.json()["error"]["message"], sent[:500]
    assert set(statuses.values()) <= {200, 400, 404}, "404: the name of another model"
    assert {statuses[sent] for sent in RAW} == {400}


def test_wrong_prompts() -> None:
    for prompt in ([], "", [""], [[]], [1, "a"], [1.5], [-1], [True], None, {}):
        answer = http().post(TEXTS, json={"prompt": prompt})
        assert answer.status_code == 400, prompt
        assert answer.json()["error"]["param"].startswith("prompt"), prompt
