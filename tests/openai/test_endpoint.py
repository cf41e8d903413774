"""The endpoint's routes with a model that answers from memory. See tests/live/test_openai.py."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi.testclient import TestClient
from openai.types.chat.completion_create_params import CompletionCreateParams as ChatParams
from openai.types.completion_create_params import CompletionCreateParams as TextParams
from pydantic import ValidationError
from standins import TINY, Echo, scored, text_with
from starlette.routing import Route

from smartspec_gateway.limits import Limits
from smartspec_gateway.openai.apis.chat_schema import ChatRequest
from smartspec_gateway.openai.apis.requests import Settings
from smartspec_gateway.openai.apis.responses_schema import ResponsesRequest
from smartspec_gateway.openai.apis.schema import REFUSED, CompletionRequest
from smartspec_gateway.openai.app import create_app
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.prompts import PromptError, Prompts
from smartspec_gateway.openai.model import Piece
from smartspec_gateway.openai.pieces import pieces_of

PROMPTS = Prompts(TINY)
CHAT = "/v1/chat/completions"
TEXTS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CUSTOM = {"type": "custom", "custom": {"name": "patch"}}
PART = {"type": "text", "text": "x"}
TEXT, PART_X = "messages.0.content.0.text", "messages.0.content.0.x"
HELLO = [{"role": "user", "content": "Hello!"}]


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    """A `tool_choice`."""
    found = list(tools or [{"type": "function", "function": {"name": "weather"}}])
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": found}}


def client(model: Echo | None = None, **settings: Any) -> TestClient:
    given = Settings("smartspec", Limits(512), **settings)
    return TestClient(create_app(model or Echo(), PROMPTS, given))


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_chat_becomes_the_models_prompt() -> None:
    model = Echo()
    body = {
        "messages": [*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO],
        "stop": "x",
        "seed": -1,
        "n": 2,
        "max_completion_tokens": 9,
        "logit_bias": {"300": 5},
        "tpot_slo_ms": 30,
        "stop_token_ids": [5, 6],
        "speculation_policy": "fixed:2",
    }
    answer = client(model).post(CHAT, json=body).json()
    prompt = "Task: chat\nUser: Hello!\nAssistant: Hi.\nUser: Hello!\nAnswer:"
    first, second = model.asked
    assert first["input_ids"] == second["input_ids"] == PROMPTS.encode(prompt)
    assert (first["seed"], second["seed"]) == (2**64 - 1, 0)
    assert (first["max_tokens"], first["stop_words"]) == (9, ["x"])
    assert first["stop_token_ids"] == [5, 6]
    assert PROMPTS.encode(first["embedding_bias_words"][0]) == [300]
    assert first["embedding_bias_weights"] == [5.0]
    assert (first["tpot_slo_ms"], first["speculation_policy"]) == (30.0, "fixed:2")
    assert answer["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["one two"] * 2
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 2
    assert answer["usage"] == {
        "prompt_tokens": 22,
        "completion_tokens": 6,
        "total_tokens": 28,
        "prompt_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert answer["metrics"] == {"speculative_decoding": {}}


def test_streams_have_usage_as_asked_and_end_with_done() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "stream": True, "stream_options": options}
    role, one, two, end, usage, done = events(client().post(CHAT, json=body).text)
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert one["choices"][0]["delta"] == {"content": "one"}
    assert two["choices"][0]["delta"] == {"content": " two"}
    assert end["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
    assert usage["metrics"] == {"speculative_decoding": {}}
    assert [found["usage"]["completion_tokens"] for found in (one, two)] == [1, 3]
    assert done == "[DONE]"


def test_several_prompts_and_echo() -> None:
    body = {"prompt": ["a", "b"], "echo": True, "n": 2}
    model = Echo()
    answer = client(model).post(TEXTS, json=body).json()
    assert model.asked[0]["max_tokens"] == 511, "the rest of the context"
    assert [c["text"] for c in answer["choices"]] == ["aone two"] * 2 + ["bone two"] * 2
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 10, "5 of each"
    stream = client().post(TEXTS, json={"prompt": "a", "echo": True, "stream": True})
    assert [one["choices"][0]["text"] for one in events(stream.text)[:-1][:2]] == ["aone", " two"]


@pytest.mark.parametrize(
    ("changed", "param", "part"),
    [
        ({"temperature": 3}, "temperature", "got 3"),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"max_tokens": 2**40}, "max_tokens", "got 1099511627776"),
        ({"top_k": 2**40}, "top_k", "got"),
        ({"max_token": 3}, "max_token", "did you mean max_tokens"),
        ({"functions": []}, "functions", "not supported"),
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
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
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
            {"tools": [TOOL], "tool_choice": allowed("required", CUSTOM)},
            "tool_choice",
            "got 'required' without a function of tools",
        ),
        (
            {"tools": [TOOL], "tool_choice": allowed("required", {"type": "function"})},
            "tool_choice.allowed_tools.tools.0.function",
            "must be given",
        ),
        ({"n": 129}, "n", "n: got 129, must be less than or equal to 128"),
        ({"stop": 5}, "stop", "stop: got 5, must be text or a list"),
        ({"stop": ["a"] * 17}, "stop", "a list of length 16 or less"),
        ({"echo": True}, "echo", "echo: only for /v1/completions"),
        ({"policy": "none"}, "policy", "did you mean speculation_policy?"),
        ({"service_tier": "priority"}, "service_tier", "'auto' or 'default'"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "True"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, TEXT, "must be given"),
        ({"messages": [{"role": "user", "content": [PART | {"text": 1}]}]}, TEXT, "got 1"),
        ({"messages": [{"role": "user", "content": [PART | {"x": 1}]}]}, PART_X, "not supported"),
        ({"messages": [5]}, "messages.0", "messages.0: got 5, must be an object"),
        ({"temperature": float("inf")}, "temperature", "got inf"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "robot"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages", "only the roles"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens", "only one"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "got token '9999'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "9, must be in 0..2047"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "hex escape"),
    ],
)
def test_wrong_fields_are_named(changed: dict[str, Any], param: str | None, part: str) -> None:
    model = Echo()
    body = json.dumps({"messages": HELLO, **changed}).encode()
    answer = client(model).post(CHAT, content=body, headers=JSON)
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
    "skip_special_tokens": True,
}
OF_CHATS = {"verbosity": "low", "modalities": ["text"]}


def test_null_and_fields_without_effect_change_nothing() -> None:
    model = Echo()
    nulls: dict[str, Any] = dict.fromkeys(NULLS)
    chat_nulls = nulls | dict.fromkeys(["parallel_tool_calls", "tools", "top_logprobs"])
    for more in ({}, chat_nulls, IGNORED | OF_CHATS):
        answer = client(model).post(CHAT, json={"messages": HELLO, **more})
        assert answer.status_code == 200, answer.text
    for more in ({}, nulls | {"echo": None, "best_of": None}, IGNORED):
        answer = client(model).post(TEXTS, json={"prompt": "Hello", **more})
        assert answer.status_code == 200, answer.text
    assert model.asked[0] == model.asked[1] == model.asked[2]
    assert model.asked[3] == model.asked[4] == model.asked[5]


def test_each_field_of_the_openai_package_has_its_place() -> None:
    """The page of the fields names all that are refused."""
    for schema, theirs in ((ChatRequest, ChatParams), (CompletionRequest, TextParams)):
        names = {name for one in get_args(theirs) for name in one.__annotations__}
        assert len(names) > 15
        assert names - schema.model_fields.keys() <= set(REFUSED)


def test_the_page_of_the_routes_has_each_route() -> None:
    page = (Path(__file__).parents[2] / "docs/operate/openai.md").read_text(encoding="utf-8")
    found = re.findall(r"`(GET|POST) (/[^`]*)`", page.partition("\n## ")[0])
    app = create_app(Echo(), PROMPTS, Settings("smartspec", Limits(512)))
    routes = {
        (method, route.path.replace("{name:path}", "NAME"))
        for route in app.routes
        if isinstance(route, Route) and "redirect" not in route.path
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert sorted(found) == sorted(routes)


def test_what_is_not_json_for_this_server() -> None:
    for headers, status in (
        ({"Content-Type": "text/plain"}, 400),
        ({"Content-Type": "application/vnd.api+json; charset=utf-8"}, 200),
    ):
        answer = client().post(TEXTS, content=b'{"prompt":"x"}', headers=headers)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["message"].startswith("Content-")


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
    error = client().post(path, json=body).json()["error"]
    assert (error["param"], error["code"]) == (param or "messages", "context_length_exceeded")


def test_many_prompts_run_some_at_once() -> None:
    class Counting(Echo):
        num_running = most = 0

        async def generate(self, tensors: Any) -> AsyncIterator[Piece]:
            self.num_running += 1
            self.most = max(self.most, self.num_running)
            async for piece in super().generate(tensors):
                await asyncio.sleep(0)
                yield piece
            self.num_running -= 1

    model = Counting()
    answer = client(model).post(TEXTS, json={"prompt": ["x"] * 64, "n": 2})
    assert [one["index"] for one in answer.json()["choices"]] == list(range(128))
    assert model.most == 16
    refused = client(model).post(TEXTS, json={"prompt": ["x"] * 65, "n": 2})
    assert refused.json()["error"]["param"] == "n"


def test_a_prompt_alone_can_be_scored() -> None:
    prompt = PROMPTS.encode("Hello there")
    logs = {"prompt": scored(*prompt[1:]), "output": scored(300)}
    model = Echo(pieces=[Piece("x", 1, "stop", len(prompt), log_probs=logs)])
    body = {"prompt": "Hello there", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = client(model).post(TEXTS, json=body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello there", "length")
    assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert answer["usage"]["completion_tokens"] == 0
    assert model.asked[0]["max_tokens"] == 1
    for path, more in ((TEXTS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        refused = client().post(path, json={"max_tokens": 0, **more}).json()["error"]
        assert refused["param"] == "max_tokens"


def test_log_probs_of_parts_of_a_character() -> None:
    """ "🙂" is several tokens: one character, and names that differ."""
    prompt = PROMPTS.encode("🙂 hello")
    model = Echo(pieces=[Piece("", 1, "stop", 9, log_probs={"prompt": scored(*prompt[1:])})])
    body = {"prompt": "🙂 hello", "echo": True, "logprobs": 2}
    found = client(model).post(TEXTS, json=body).json()["choices"][0]["logprobs"]
    parts = [token for token in found["tokens"] if token.startswith("bytes:\\x")]
    assert "".join(parts).replace("bytes:", "") == "".join(f"\\x{b:02x}" for b in "🙂".encode())
    assert len(parts) > 1
    assert found["text_offset"][: len(parts) + 1] == [0] * len(parts) + [1]
    assert parts[1] in found["top_logprobs"][1]


def test_events_keep_their_lines_and_their_log_probs() -> None:
    text = "a\u2028b\u2029c\x85d"
    answer = client(text_with(text)).post(CHAT, json={"messages": HELLO, "stream": True}).text
    assert not {"\u2028", "\u2029", "\x85"} & set(answer)
    assert events(answer)[1]["choices"][0]["delta"]["content"] == text
    pieces = [Piece(part, 1, log_probs={"output": scored(300 + i)}) for i, part in enumerate(CALLS)]
    model = Echo(pieces=[*pieces, Piece("", 0, "stop", 5)])
    found = events(tool_client(model).post(CHAT, json=WITH_TOOLS | {"logprobs": True}).text)
    logs = [one["choices"][0]["logprobs"] for one in found[:-1]]
    assert sum(len(one["content"]) for one in logs if one) == len(CALLS)


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
    names += ["best_of", "__class__", "", "a" * 300]
    bodies = [json.dumps(body | {name: value}).encode() for name in names for value in WRONG]
    asked = client()
    statuses = {}
    for sent in (*RAW, *bodies):
        answer = asked.post(path, content=sent, headers=JSON)
        statuses[sent] = answer.status_code
        assert answer.status_code == 200 or answer.json()["error"]["message"], sent[:500]
    assert set(statuses.values()) <= {200, 400, 404}, "404: the name of another model"
    assert {statuses[sent] for sent in RAW} == {400}


def test_errors_of_the_model() -> None:
    refused = ApiError(400, "prompt: got 9 tokens, must be at most 8 tokens", "prompt")
    for stream in (False, True):
        body = {"messages": HELLO, "stream": stream}
        answer = client(Echo(refused)).post(CHAT, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
        assert answer.json()["error"]["message"].startswith("prompt: got 9 tokens")
    full = ApiError(503, "the queue is full", retry_after_s=1)
    answer = client(Echo(full)).post(TEXTS, json={"prompt": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    late = client(Echo(full, num_before=1))
    found = events(late.post(TEXTS, json={"prompt": "x", "stream": True}).text)
    assert found[0]["choices"][0]["text"] == "one"
    assert found[1] == full.body, "no [DONE] after an error"


def test_chunks_have_counts_if_asked() -> None:
    body = {"messages": HELLO, "stream": True, "return_spec_metrics": "detailed"}
    found = events(client().post(CHAT, json=body).text)[1]["choices"][0]["speculation"]
    names = {"num_tokens", "num_steps", "num_drafted", "num_accepted", "proposer", "tokens"}
    assert (found.keys(), found["num_tokens"]) == (names, 1)


WITH_TOOLS = {"messages": HELLO, "tools": [TOOL], "stream": True}
CALLS = ("I look.<tool", '_call>{"name": "weather", "argu', 'ments": {"a": 1}}</tool_call>')


def tool_client(model: Echo) -> TestClient:
    prompts = Prompts(TINY, Path(__file__).with_name("tools.jinja"))
    return TestClient(create_app(model, prompts, Settings("smartspec", Limits(512))))


def test_tool_calls_are_parsed() -> None:
    """Streamed or not; a text that was cut keeps its finish_reason."""
    found = events(tool_client(text_with(*CALLS)).post(CHAT, json=WITH_TOOLS).text)
    deltas = [one["choices"][0]["delta"] for one in found[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    call, rest = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert (call["index"], call["type"], call["function"]["name"]) == (0, "function", "weather")
    assert rest == {"index": 0, "function": {"arguments": '{"a": 1}'}}
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"

    body = WITH_TOOLS | {"stream": False}
    model = text_with(*CALLS, "\n<tool_call>" + CALLS[1].removeprefix("_call>") + CALLS[2])
    whole = tool_client(model).post(CHAT, json=body).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("I look.", "tool_calls")
    assert len(whole["message"]["tool_calls"]) == 2
    one = tool_client(model).post(CHAT, json=body | {"parallel_tool_calls": False})
    assert len(one.json()["choices"][0]["message"]["tool_calls"]) == 1

    cut = tool_client(text_with(*CALLS[:2], reason="length"))
    choice = cut.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "".join(CALLS[:2])


FIRST = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}'
TWO = f"I look.\n{FIRST}\n</tool_call>\n{FIRST}\n</tool_call>"


@pytest.mark.parametrize("num", range(1, len(TWO)))
def test_a_call_that_is_cut_at_any_place(num: int) -> None:
    """It is a call as soon as its JSON is complete, and text before that. Whole and streamed."""
    ends = [found.end() for found in re.finditer(re.escape(FIRST), TWO)]
    num_calls = sum(end <= num for end in ends)
    rest = TWO[ends[0] + len("\n</tool_call>\n") : num] if num_calls == 1 else ""
    content = "I look.\n" + rest if num_calls else TWO[:num]
    asked = tool_client(text_with(*TWO[:num], reason="length"))
    (whole,) = asked.post(CHAT, json=WITH_TOOLS | {"stream": False}).json()["choices"]
    assert len(whole["message"].get("tool_calls", [])) == num_calls
    assert (whole["message"]["content"], whole["finish_reason"]) == (content, "length")
    found = events(asked.post(CHAT, json=WITH_TOOLS).text)
    deltas = [one["choices"][0]["delta"] for one in found[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert sum("id" in call for call in calls) == num_calls


def test_custom_tools_are_skipped() -> None:
    model = text_with(*CALLS)
    body = WITH_TOOLS | {"stream": False, "tools": [CUSTOM, TOOL]}
    (choice,) = tool_client(model).post(CHAT, json=body).json()["choices"]
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["weather"]
    told = PROMPTS.decode(model.asked[0]["input_ids"])
    assert ("weather" in told, "patch" in told) == (True, False)


def test_a_response_format_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    cases: list[tuple[str, Any, str, Any]] = [
        ("response_format", named, "json_schema", schema),
        ("response_format", {"type": "json_object"}, "json_schema", {"type": "object"}),
        ("guided_json", schema, "json_schema", schema),
        ("guided_json", json.dumps(schema), "json_schema", schema),
        ("guided_choice", ["a", "b"], "choice", ["a", "b"]),
        ("guided_regex", '"a"', "regex", "a"),
        ("guided_grammar", '"a"', "ebnf_grammar", "a"),
        ("structured_outputs", {"json": schema, "regex": None}, "json_schema", schema),
        ("structured_outputs", {"json": json.dumps(schema)}, "json_schema", schema),
        ("structured_outputs", {"json_object": True}, "json_schema", {"type": "object"}),
        ("structured_outputs", {"choice": ["a", "b"]}, "choice", ["a", "b"]),
        ("structured_outputs", {"regex": '"a"'}, "regex", "a"),
        ("structured_outputs", {"grammar": '"a"'}, "ebnf_grammar", "a"),
        (
            "structured_outputs",
            {"json": schema, "disable_any_whitespace": True, "whitespace_pattern": None},
            "json_schema",
            schema,
        ),
    ]
    for field, given, kind, guide in cases:
        model = Echo()
        answer = client(model).post(CHAT, json={"messages": HELLO, field: given})
        assert answer.status_code == 200, answer.text
        (asked,) = model.asked
        assert asked["guided_decoding_guide_type"] == kind
        assert json.loads(asked["guided_decoding_guide"]) == guide
    model = Echo()
    client(model).post(CHAT, json={"messages": HELLO, "response_format": {"type": "text"}})
    assert "guided_decoding_guide" not in model.asked[0]


def test_an_error_of_a_grammar_names_the_clients_field() -> None:
    message = "guided_decoding_guide: must be a grammar that works: no such rule"
    error = ApiError(400, message, "guided_decoding_guide")
    for body, field in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "x"}, "guided_regex"),
        ({"structured_outputs": {"regex": "x"}}, "structured_outputs.regex"),
        (WITH_TOOLS | {"tool_choice": "required"}, "tools"),
    ):
        answer = tool_client(Echo(error)).post(CHAT, json={"messages": HELLO, **body})
        found = answer.json()["error"]
        assert (found["param"], found["message"]) == (
            field,
            f"{field}: must be a grammar that works: no such rule",
        )


FORCED = ('<tool_call>\n{"name": "wea', 'ther", "arguments": {"a', '": "}"}}\n</tool_call>')


def test_required_calls_are_streamed_as_they_arrive() -> None:
    body = WITH_TOOLS | {"tool_choice": "required"}
    model = text_with(*FORCED)
    found = events(tool_client(model).post(CHAT, json=body).text)
    (asked,) = model.asked
    assert asked["guided_decoding_guide_type"] == "ebnf_grammar"
    assert '\\"name\\": \\"weather\\"' in asked["guided_decoding_guide"]
    calls = [
        call for one in found[:-1] for call in one["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert {call["index"] for call in calls} == {0}
    assert ["id" in call for call in calls] == [True, False, False]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": "}"}'
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("num", range(1, len("".join(FORCED))))
def test_a_required_call_that_is_cut_is_never_text(num: int) -> None:
    body = WITH_TOOLS | {"stream": False, "tool_choice": "required"}
    cut = text_with("".join(FORCED)[:num], reason="length")
    (choice,) = tool_client(cut).post(CHAT, json=body).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    calls = choice["message"].get("tool_calls", [])
    assert all('{"a": "}"}'.startswith(one["function"]["arguments"]) for one in calls)


def test_a_required_call_that_a_stop_word_cuts_is_not_complete() -> None:
    body = WITH_TOOLS | {"stream": False, "tool_choice": "required", "stop": "}"}
    cut = text_with(*FORCED[:2], "")
    (choice,) = tool_client(cut).post(CHAT, json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a'


def test_an_answer_with_a_schema_is_never_a_call() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    body = WITH_TOOLS | {"stream": False, "response_format": schema}
    text = '{"name": "weather", "arguments": {}}'
    (choice,) = tool_client(text_with(text)).post(CHAT, json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_a_named_function_is_the_only_one() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "other"}}
    model = text_with(FORCED[0].replace("wea", "other"), '", "arguments": {}}\n</tool_call>')
    body = {**WITH_TOOLS, "stream": False, "tools": [TOOL, other], "tool_choice": named}
    (choice,) = tool_client(model).post(CHAT, json=body).json()["choices"]
    assert "weather" not in model.asked[0]["guided_decoding_guide"]
    assert "{0,15}" not in model.asked[0]["guided_decoding_guide"]
    assert choice["finish_reason"] == "tool_calls"


def test_allowed_tools_that_are_required() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    body = {**WITH_TOOLS, "stream": False, "tools": [TOOL, other]}
    model = text_with(*FORCED)
    body["tool_choice"] = allowed("required")
    (choice,) = tool_client(model).post(CHAT, json=body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert "other" not in model.asked[0]["guided_decoding_guide"]
    assert "{0,15}" in model.asked[0]["guided_decoding_guide"], "several calls"


def test_tool_choice_none_leaves_text_as_it_is() -> None:
    body = WITH_TOOLS | {"stream": False, "tool_choice": "none"}
    model = text_with(*CALLS)
    choice = tool_client(model).post(CHAT, json=body).json()["choices"][0]
    message = {"role": "assistant", "content": "".join(CALLS), "refusal": None}
    assert choice["message"] == message
    assert "weather" not in PROMPTS.decode(model.asked[0]["input_ids"])


def test_log_probs_of_a_chat() -> None:
    tokens = PROMPTS.encode("yes é", add_special_tokens=False)
    model = Echo(pieces=[Piece("yes é", 2, "stop", 5, log_probs={"output": scored(*tokens)})])
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    choice = client(model).post(CHAT, json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "yes é"
    assert [one["logprob"] for one in content] == [-0.5] * len(tokens)
    assert [len(one["top_logprobs"]) for one in content] == [2] * len(tokens)
    assert model.asked[0]["return_token_log_probs"] == 2
    off = client(Echo()).post(CHAT, json=body | {"logprobs": False})
    assert off.status_code == 400


def test_log_probs_with_echo() -> None:
    """Those of the prompt come first; its first token has none."""
    prompt = PROMPTS.encode("Hello there")
    logs = {"prompt": scored(*prompt[1:]), "output": scored(300)}
    model = Echo(pieces=[Piece("x", 1, log_probs=logs), Piece("", 0, "stop", len(prompt))])
    for given in ("Hello there", prompt, [prompt]):
        body = {"prompt": given, "echo": True, "logprobs": 1, "stream": True}
        found = events(client(model).post(TEXTS, json=body).text)
        first = found[0]["choices"][0]
        assert first["text"] == "Hello therex"
        logs = first["logprobs"]
        assert logs["token_logprobs"] == [None, *[-0.5] * len(prompt)]
        assert "".join(logs["tokens"][: len(prompt)]) == "Hello there"
        assert logs["text_offset"][len(prompt)] == len("Hello there")
        assert model.asked[-1]["return_prompt_log_probs"]
        assert (model.asked[-1]["input_ids"], model.asked[-1]["text_input"]) == (prompt, "")


def test_wrong_prompts() -> None:
    for prompt in ([], "", [""], [[]], [1, "a"], [1.5], [-1], [True], None, {}):
        answer = client().post(TEXTS, json={"prompt": prompt})
        assert answer.status_code == 400, prompt
        assert answer.json()["error"]["param"].startswith("prompt"), prompt


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_pages_need_nothing_from_elsewhere(path: str) -> None:
    found = client(api_keys=("key",)).get(path)
    assert found.status_code == 200
    assert "https:" not in found.text
    assert "http:" not in found.text
    assert "default-src 'self'" in found.headers["content-security-policy"]


def test_the_page_of_the_api_has_the_fields_of_each_route() -> None:
    text = client().get("/docs").text
    assert "<h2><code>POST /v1/chat/completions</code></h2>" in text
    assert "<td><code><b>messages</b></code></td><td>array</td>" in text
    assert "<td><code>temperature</code></td><td>number 0..2</td><td>1.0</td>" in text
    assert "/v1/models/{name}" in text


def test_api_keys() -> None:
    asked = client(api_keys=("first", "second"))
    assert asked.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics"):
        assert asked.get(path).status_code == 401
    for key, status in (("second", 200), ("third", 401), ("sécond", 401)):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert asked.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("header", ["Authorization: Bearer ", "x-api-key: "])
def test_each_api_key_is_a_tenant(header: str) -> None:
    """The model gets a hash of the key. A client cannot name another tenant."""
    model, (name, before) = Echo(), header.split(": ")
    asked = client(model, api_keys=("first", "second"))
    body = {"model": "smartspec", "messages": HELLO, "n": 2, "seed": 1}
    for key in ("first", "second", "first"):
        assert asked.post(CHAT, json=body, headers={name: before + key}).status_code == 200
    tenants = [fields["tenant"] for fields in model.asked]
    assert tenants[:2] == tenants[4:]
    assert len(set(tenants)) == 2
    assert not {"first", "second"} & set(tenants)
    refused = asked.post(CHAT, json={**body, "tenant": "x"}, headers={name: before + "first"})
    assert refused.status_code == 400
    assert client(model).post(CHAT, json=body).status_code == 200
    assert "tenant" not in model.asked[-1]


ADAPTER_BODIES = {
    CHAT: {"messages": HELLO},
    TEXTS: {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
}


@pytest.mark.parametrize("path", ADAPTER_BODIES)
def test_adapters_are_chosen_as_models(path: str) -> None:
    model, body = Echo(), ADAPTER_BODIES[path]
    asked = client(model, adapters=("sql", "chat"))
    for name in ("sql", "smartspec"):
        assert asked.post(path, json={**body, "model": name}).json()["model"] == name
    assert asked.post(path, json=body).json()["model"] == "smartspec"
    assert [fields.get("lora_name") for fields in model.asked] == ["sql", None, None]
    missing = asked.post(path, json={**body, "model": "gpt"})
    assert missing.status_code == 404
    words = "model: got 'gpt', must be 'smartspec' or 'sql' or 'chat'"
    assert missing.json()["error"]["message"] == words


def test_adapters_are_listed_as_models() -> None:
    asked = client(adapters=("sql", "chat"))
    plain, sql, chat = asked.get("/v1/models").json()["data"]
    assert [one["id"] for one in (plain, sql, chat)] == ["smartspec", "sql", "chat"]
    assert (plain.get("parent"), sql["parent"]) == (None, "smartspec")
    assert asked.get("/v1/models/sql").json() == sql


def test_the_served_names() -> None:
    """Each is listed and accepted on every route, and so is `smartspec`; adapters have a parent."""
    model = Echo()
    given = Settings("Qwen/Q-1B:Q4_K_M", Limits(512), aliases=["q"], adapters=["sql"])
    asked = TestClient(create_app(model, PROMPTS, given))
    listed = asked.get("/v1/models").json()
    assert listed["models"] == []
    first, second, adapter = listed["data"]
    assert [one["id"] for one in (first, second)] == ["Qwen/Q-1B:Q4_K_M", "q"]
    assert [one.get("parent") for one in listed["data"]] == [None, None, "Qwen/Q-1B:Q4_K_M"]
    assert (first["max_model_len"], first["max_output_tokens"]) == (512, 511)
    assert asked.get("/v1/models/Qwen/Q-1B:Q4_K_M").json() == first
    assert asked.get("/v1/models/Qwen%2FQ-1B:Q4_K_M").json() == first
    assert asked.get("/v1/models/sql").json() == adapter
    assert asked.get("/v1/models/smartspec").json()["id"] == "smartspec"
    for path, body in ADAPTER_BODIES.items():
        assert asked.post(path, json=body).json()["model"] == "Qwen/Q-1B:Q4_K_M"
        for name in ("Qwen/Q-1B:Q4_K_M", "q", "smartspec"):
            assert asked.post(path, json=body | {"model": name}).json()["model"] == name
        missing = asked.post(path, json=body | {"model": "gpt"}).json()["error"]["message"]
        assert missing == "model: got 'gpt', must be 'Qwen/Q-1B:Q4_K_M' or 'q' or 'sql'"
    assert all("lora_name" not in fields for fields in model.asked)


def test_models_tokens_and_health() -> None:
    asked = client()
    (model,) = asked.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("smartspec", 512)
    assert asked.get("/v1/models/smartspec").json() == model
    assert asked.get("/v1/models/gpt").json()["error"]["param"] == "model"
    tokens = asked.post("/tokenize", json={"prompt": "Hello there"}).json()["tokens"]
    assert asked.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "Hello there"}
    wrong = asked.post("/detokenize", json={"tokens": [99_999]}).json()["error"]
    assert wrong["message"] == "tokens: got 99999, must be in 0..2047"
    assert client(Echo(ApiError(503, ""))).get("/health").status_code == 503
    missing = asked.post(TEXTS, json={"prompt": "x", "model": "gpt"})
    assert missing.status_code == 404
    assert "'smartspec'" in missing.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, "prompt", "must be given, or messages"),
        ({"prompt": "a", "messages": HELLO}, "prompt", "not together with messages"),
        ({"prompt": "a", "tools": [TOOL]}, "tools", "only with messages"),
        ({"messages": []}, "messages", "length 1 or more"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens", "must be false"),
        ({"messages": HELLO, "continue_final_message": True}, "add_generation_prompt", "must be"),
        ({"messages": HELLO, "chat_template": "x"}, "chat_template", "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_tokenized(body: dict[str, Any], param: str, part: str) -> None:
    answer = client().post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert part in answer.json()["error"]["message"]


def test_tokens_of_messages_are_those_of_the_chat() -> None:
    model = Echo()
    asked = client(model)
    asked.post(CHAT, json={"messages": HELLO})
    tokens = asked.post("/tokenize", json={"messages": HELLO, "model": "smartspec"}).json()[
        "tokens"
    ]
    assert tokens == model.asked[0]["input_ids"]
    bare = {"prompt": "Hello", "add_special_tokens": False, "return_token_strs": True}
    assert asked.post("/tokenize", json=bare).json()["token_strs"][0]


def test_closing_the_pieces_cancels_all_requests() -> None:
    model = Echo()
    model.is_slow = True

    async def run() -> None:
        pieces = pieces_of(model, [{}, {}, {}])
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert model.num_cancelled == 3


def folder(path: Path, template: str | list[Any] | None, bos: str | None = None) -> Path:
    """A model's directory with the shipped tokenizer, which begins texts with `bos` if given."""
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    if bos is not None:
        token = {"type_id": 0, "id": bos}
        single = [{"SpecialToken": token}, {"Sequence": {"id": "A", "type_id": 0}}]
        special = {bos: {"id": bos, "ids": [0], "tokens": [bos]}}
        kind = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [],
            "special_tokens": special,
        }
        tokenizer["post_processor"] = kind
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": bos, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_begin_token_is_not_doubled(tmp_path: Path) -> None:
    """Llama's templates begin with the token that its tokenizer also adds."""
    template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    prompts = Prompts(folder(tmp_path, template, "<|end|>"))
    assert prompts.of_chat(HELLO, {}) == "[Hello!]"
    assert prompts.encode(prompts.of_chat(HELLO, {})).count(0) == 1


def test_templates_of_a_model(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ x }}"}]
    assert Prompts(folder(tmp_path, named)).of_chat(HELLO, {"x": 5}) == "d5"
    none = Prompts(folder(tmp_path, None))
    with pytest.raises(ApiError, match="--chat-template"):
        none.of_chat(HELLO, {})
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert Prompts(tmp_path, own).of_chat(HELLO, {}) == "own"
    with pytest.raises(PromptError, match=r"gone\.jinja"):
        Prompts(tmp_path, tmp_path / "gone.jinja")
    own.write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(PromptError, match=r"own\.jinja, line 2: "):
        Prompts(tmp_path, own)
