"""`/v1/messages`, asked by the `anthropic` package, with a model that answers from memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import anthropic
import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParams
from endpoint_client import HELLO, PROMPTS, http
from pydantic import ValidationError
from standins import TINY, Echo, text_with

from smartspec_gateway.openai.apis.messages import StopFinder, chat_of
from smartspec_gateway.openai.apis.messages_schema import MessagesPrompt, MessagesRequest
from smartspec_gateway.openai.app import openai_error
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_gateway.openai.model import Piece

URL = "/v1/messages"
COUNT = f"{URL}/count_tokens"
CALL = '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>'
FORCED = ('<tool_call>\n{"name": "wea', 'ther", "arguments": {"a": [', "1]}", "}\n</tool_call>")
PARTS = ("<think>I need", " it.</think>\n", "I look.", CALL, CALL)
TOOL: Any = {"name": "weather", "input_schema": {"type": "object"}, "cache_control": {}}
ASKED: Any = {"model": "smartspec", "max_tokens": 9, "messages": HELLO}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    "{{ tools }}{{ enable_thinking }}"
    "{# </think> #}"
)


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return Prompts(TINY, tmp_path / "chat.jinja")


def sdk(
    model: Echo, prompts: Prompts = PROMPTS, key: str = "none", **settings: Any
) -> anthropic.Anthropic:
    client = http(model, prompts, **settings)
    url = "http://testserver"
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, http_client=client)


def kinds(blocks: Sequence[Any]) -> list[str]:
    return [block.type for block in blocks]


def messages_of(*messages: Any, **others: Any) -> list[dict[str, Any]]:
    """What the chat template is given."""
    chat = chat_of(MessagesPrompt.model_validate({"messages": messages, **others}))
    return [message.for_template() for message in chat.messages]


def test_a_text_becomes_a_message(prompts: Prompts) -> None:
    model = Echo()
    found = sdk(model, prompts).messages.create(
        **ASKED,
        system="Be brief.",
        metadata={"user_id": "x"},
        extra_headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"},
        extra_query={"beta": "true"},
        extra_body={
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "speculation_policy": "fixed:2",
            "return_spec_metrics": "summary",
        },
    )
    (asked,) = model.asked
    assert prompts.decode(asked["input_ids"]) == "[system]Be brief.[user]Hello!NoneFalse"
    assert (asked["max_tokens"], asked["temperature"]) == (9, 0.5)
    assert (asked["top_p"], asked["top_k"]) == (0.9, 5)
    assert asked["speculation_policy"] == "fixed:2"
    assert "return_output_ids" not in asked, "without stop_sequences"
    assert (found.type, found.role, found.model) == ("message", "assistant", "smartspec")
    assert [block.text for block in found.content] == ["one two"]
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    assert found.usage.to_dict() == {
        "input_tokens": len(asked["input_ids"]) - 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": 3,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert found.metrics == {"speculative_decoding": {}}


def test_events_of_a_text() -> None:
    model = Echo()
    events = list(sdk(model).messages.create(**ASKED, stream=True))
    assert kinds(events) == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    num_prompt = len(model.asked[0]["input_ids"])
    begin = events[0].message
    assert (begin.content, begin.stop_reason) == ([], None)
    assert (begin.usage.input_tokens, begin.usage.output_tokens) == (num_prompt, 0)
    assert [event.delta.text for event in events[2:4]] == ["one", " two"]
    assert events[5].delta.stop_reason == "end_turn"
    usage = events[5].usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (num_prompt - 5, 5)
    assert usage.output_tokens == 3


def test_tools_and_thinking(prompts: Prompts) -> None:
    """Streamed or not; the blocks can be sent back."""
    client = sdk(text_with(*PARTS), prompts)
    asked = ASKED | {"tools": [TOOL]}
    whole = client.messages.create(**asked)
    assert kinds(whole.content) == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, call, other = whole.content
    assert (thinking.thinking, text.text) == ("I need it.", "I look.")
    assert (call.name, call.input) == ("weather", {"a": 1})
    assert call.id != other.id
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        events = list(stream)
    last = stream.get_final_message()
    assert [block.to_dict() | {"id": ""} for block in last.content] == [
        block.to_dict() | {"id": ""} for block in whole.content
    ]
    assert last.stop_reason == "tool_use"
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == [0, 1, 2, 3]
    assert starts[2].content_block.id in {block.id for block in last.content[2:]}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    back = [*HELLO, last.to_param(), {"role": "user", "content": [result]}]
    assert client.messages.create(**asked | {"messages": back}).stop_reason == "tool_use"
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one = client.messages.create(**asked, tool_choice=choice)
    assert kinds(one.content) == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize(
    "parts", [(f"I look.{CALL}Then{CALL}Done.",), ("I", f" look.{CALL}T", "hen", CALL, "Done.")]
)
def test_text_after_a_call_stays_behind_it(parts: Sequence[str]) -> None:
    """Also if both come in one piece, as they do in an answer that is not streamed."""
    client, asked = sdk(text_with(*parts)), ASKED | {"tools": [TOOL]}
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for found in (client.messages.create(**asked), streamed):
        assert kinds(found.content) == ["text", "tool_use", "text", "tool_use", "text"]
        assert [block.text for block in found.content[::2]] == ["I look.", "Then", "Done."]
        assert found.stop_reason == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
@pytest.mark.parametrize(
    ("num_parts", "reason", "stop_reason", "arguments"),
    [
        (4, "stop", "tool_use", {"a": [1]}),
        (4, "length", "max_tokens", {"a": [1]}),
        (2, "length", "max_tokens", {"a": []}),
    ],
)
def test_forced_calls_are_streamed(
    prompts: Prompts, choice: Any, num_parts: int, reason: str, stop_reason: str, arguments: Any
) -> None:
    """A call that is cut has the arguments up to there."""
    model = text_with(*FORCED[:num_parts], reason=reason)
    client = sdk(model, prompts)
    asked = ASKED | {"tools": [TOOL], "tool_choice": choice}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        deltas = [e.delta.partial_json for e in stream if e.type == "content_block_delta"]
    assert deltas == ["", '{"a": [', "1]}"][:num_parts]
    for found in (whole, stream.get_final_message()):
        (call,) = found.content
        assert (call.name, call.input) == ("weather", arguments)
        assert found.stop_reason == stop_reason
    assert model.asked[0]["guided_decoding_guide_type"] == "ebnf_grammar"


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "custom"}])
def test_types_of_tools_that_the_client_runs(kind: dict[str, Any], prompts: Prompts) -> None:
    model = Echo()
    sdk(model, prompts).messages.create(**ASKED, tools=[TOOL | kind])
    assert "weather" in prompts.decode(model.asked[0]["input_ids"])


def test_without_tools_the_model_is_not_told_of_them(prompts: Prompts) -> None:
    model = Echo()
    sdk(model, prompts).messages.create(**ASKED, tools=[TOOL], tool_choice={"type": "none"})
    assert "weather" not in prompts.decode(model.asked[0]["input_ids"])


def test_a_text_follows_a_schema() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}}}
    model = Echo()
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    sdk(model).messages.create(**ASKED, output_config=config)
    assert json.loads(model.asked[0]["guided_decoding_guide"]) == schema
    error = ApiError(400, "guided_decoding_guide: got 'x', must be y", "guided_decoding_guide")
    answer = http(Echo(error)).post(URL, json=ASKED | {"output_config": config})
    assert answer.json()["error"]["message"] == "output_config.format: got 'x', must be y"


def test_stop_sequences() -> None:
    """The tokens have the sequence, and the text ends before it."""
    prompts = Prompts(TINY)
    for text, shown, words, found in (
        ("one two three", "one ", ["three", "two"], "three"),
        ("one t", "one", ["x", " two", " t"], " t"),
        ("one two", "one two", ["three", "one"], None),
        ("one two", "one two", ["three"], None),
    ):
        tokens = prompts.encode(text, add_special_tokens=False)
        pieces = [
            Piece(shown[:2], 1, output_ids=tokens[:1]),
            Piece(shown[2:], 1, "stop", output_ids=tokens[1:]),
        ]
        model = Echo(pieces=pieces)
        client = sdk(model, prompts)
        whole = client.messages.create(**ASKED, stop_sequences=words)
        with client.messages.stream(**ASKED, stop_sequences=words) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            reason = "end_turn" if found is None else "stop_sequence"
            assert (message.stop_reason, message.stop_sequence) == (reason, found)
            assert message.content[0].text == shown
        assert model.asked[0]["stop_words"] == words
        assert model.asked[0]["return_output_ids"] is True


def test_a_stop_sequence_within_min_tokens_ends_nothing() -> None:
    """The end token, which is not among the tokens, follows them."""
    prompts = Prompts(TINY)
    tokens = prompts.encode("one two", add_special_tokens=False)
    pieces = [Piece("one two", len(tokens), "stop", output_ids=tokens)]
    for min_tokens, found in ((len(tokens), None), (len(tokens) - 1, " two")):
        client = sdk(Echo(pieces=pieces), prompts)
        message = client.messages.create(
            **ASKED,
            stop_sequences=[" two"],
            extra_body={"min_tokens": min_tokens},
        )
        assert message.stop_sequence == found


def test_the_last_token_completes_the_stop_word() -> None:
    """Worked by hand: token i is the i-th of these. The text is cut at the first word."""
    tokens = ["a", "b", "c", "bcd"]
    for words, ids, found in (
        (["ab"], [0, 1], "ab"),
        (["ab"], [0, 1, 2], None),  # it was before the last token
        (["cd", "bc"], [0, 3], "bc"),
        (["abcd"], [0, 1, 1, 0, 3], "abcd"),
        (["ab"], [], None),
    ):
        finder = StopFinder(words, lambda token: tokens[token].encode())
        for token in ids:
            finder.add(Piece(output_ids=[token]))
        assert finder.find() == found


def test_the_last_message_of_the_assistant_is_continued(prompts: Prompts) -> None:
    model = Echo()
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]
    found = sdk(model, prompts).messages.create(**ASKED | {"messages": begun})
    told = prompts.decode(model.asked[0]["input_ids"])
    assert told == "[user]Hello![assistant]It is"
    assert found.content[0].text == "one two"


def test_blocks_become_messages() -> None:
    """Results of tools have messages of their own. Thinking is a field of its message. Messages of
    one role that follow each other become one."""
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": {"a": 1}}
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "x": 1}
    result = {"type": "tool_result", "tool_use_id": "c"}
    found = messages_of(
        {"role": "user", "content": [text, text | {"text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, text, use]},
        {"role": "assistant", "content": [use | {"id": "d"}]},
        {
            "role": "user",
            "content": [
                result | {"content": [text, text]},
                result | {"tool_use_id": "d", "content": "gone", "is_error": True},
                text,
            ],
        },
        {"role": "system", "content": "s"},
        {"role": "user", "content": [result]},
        system=[text, text | {"text": "b"}],
    )
    assert [(message["role"], message["content"]) for message in found] == [
        ("system", "a\nb"),
        ("user", "a\nb\nc"),
        ("assistant", "a"),
        ("tool", "a\na"),
        ("tool", "Error: gone"),
        ("user", "a"),
        ("system", "s"),
        ("tool", ""),
    ]
    assert found[2]["reasoning_content"] == "x"
    assert [call["id"] for call in found[2]["tool_calls"]] == ["c", "d"]
    assert found[2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert [message["tool_call_id"] for message in found[3:5]] == ["c", "d"]
    assert messages_of({"role": "assistant", "content": [{"type": "thinking"}]}) == [
        {"role": "assistant", "content": ""}
    ]


def test_what_is_no_text_in_a_result_is_a_marker() -> None:
    """An agent sends it again in each later request."""
    source = {"type": "base64", "media_type": "image/png", "data": "x"}
    content = [
        {"type": "tool_reference", "tool_name": "grep"},
        {"type": "image", "source": source},
        {"type": "document", "source": source, "title": "a" * 100},
        {"type": "document", "source": source},
        {"type": "browser_state", "x": 1},
        {"type": "text", "text": "end"},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    (found,) = messages_of({"role": "user", "content": [result]})
    assert found["content"].splitlines() == [
        *("[tool: grep]", "[image]", f"[document: {'a' * 80}]", "[document]", "[browser_state]"),
        "end",
    ]


def test_messages_of_one_role_may_have_many_parts_together() -> None:
    """One message may have 1,024 parts, and 4,096 messages of a role become one."""
    many = [{"role": "user", "content": "a"}] * 1100
    chat = chat_of(MessagesPrompt.model_validate({"messages": many}))
    assert [message.text for message in chat.messages] == ["\n".join("a" * 1100)]


def test_the_request_of_an_agent(prompts: Prompts) -> None:
    """Claude Code sends such fields. The first line of its system prompt is not passed on, because
    it differs in each request."""
    model = text_with(CALL)
    line = "x-anthropic-billing-header: cc_version=2; cch=00000;"
    cache: Any = {"type": "ephemeral"}
    body = ASKED | {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Rome?"}]}],
        "system": [
            {"type": "text", "text": line},
            {"type": "text", "text": "You help.", "cache_control": cache},
        ],
        "tools": [TOOL | {"eager_input_streaming": True, "strict": True}],
        "metadata": {"user_id": "x"},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
        "cache_control": cache,
        "stream": True,
    }
    answer = http(model, prompts).post(f"{URL}?beta=true", json=body)
    assert "input_json_delta" in answer.text
    told = prompts.decode(model.asked[0]["input_ids"])
    assert told.startswith("[system]You help.[user]Rome?[{")
    assert told.endswith("}]False"), "enable_thinking"
    for name in ("cache", "strict", "eager"):
        assert name not in told
    assert messages_of(*HELLO, system=f"{line}\nYou help.")[0]["content"] == "You help."
    assert messages_of(*HELLO, system=line)[0]["role"] == "user"


def test_tokens_are_counted_as_they_are_used(prompts: Prompts) -> None:
    model = Echo()
    client = sdk(model, prompts)
    asked = {"system": "Be brief.", "tools": [TOOL], "thinking": {"type": "disabled"}}
    client.messages.create(**ASKED | asked)
    counted = client.messages.count_tokens(model="smartspec", messages=HELLO, **asked)
    assert counted.input_tokens == len(model.asked[0]["input_ids"])
    assert len(model.asked) == 1


def test_keys(prompts: Prompts) -> None:
    """In either header."""
    settings = {"api_keys": ("a", "b")}
    found = sdk(Echo(), key="b", **settings).messages.create(**ASKED)
    assert found.content[0].text == "one two"
    with pytest.raises(anthropic.AuthenticationError, match="Authorization: must be Bearer"):
        sdk(Echo(), key="c", **settings).messages.create(**ASKED)
    client = http(Echo(), **settings)
    for headers, status in (
        ({"x-api-key": "a"}, 200),
        ({"x-api-key": "c"}, 401),
        ({"x-api-key": "a", "Authorization": "Bearer c"}, 200),
        ({"Authorization": "Basic a"}, 401),
        ({}, 401),
    ):
        answer = client.post(URL, json=ASKED, headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["error"]["type"] == "authentication_error"


def test_errors_of_the_model() -> None:
    full = Echo(ApiError(503, "the queue is full", retry_after_s=1))
    with pytest.raises(anthropic.APIStatusError, match="the queue is full") as raised:
        sdk(full).messages.create(**ASKED)
    assert raised.value.status_code == 503
    assert raised.value.body == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the queue is full"},
    }
    late = Echo(ApiError(503, "the queue is full"), num_before=1)
    with pytest.raises(anthropic.APIStatusError, match="the queue is full"):
        list(sdk(late).messages.create(**ASKED, stream=True))
    *_, last = http(late).post(URL, json=ASKED | {"stream": True}).text.strip().split("\n\n")
    name, data = last.splitlines()
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == raised.value.body
    stop = ApiError(400, "stop: got 'x', must be y", "stop")
    answer = http(Echo(stop)).post(URL, json=ASKED)
    assert answer.json()["error"]["message"] == "stop_sequences: got 'x', must be y"


IN_TEXT = "messages.0.content.0"


USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
IN_ANSWER = {"type": "text", "text": "I look."}
USES = [{"role": "assistant", "content": [USE] * number} for number in (64, 65)]


def asked_with(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


SENTENCES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: must be given"),
    ({"max_tokens": 0}, "max_tokens: got 0, must be greater than or equal to 1"),
    ({"output_format": {}}, "output_format: unknown; did you mean output_config.format?"),
    ({"stop": "x"}, "stop: unknown; did you mean stop_sequences?"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences: got"),
    ({"model": "x"}, "model: got 'x', must be 'smartspec'"),
    ({"messages": [{"role": "user", "content": "a " * 600}]}, "prompt is too long: 610 tokens"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role: got 'robot', must be"),
    (asked_with({"type": "image"}), f"{IN_TEXT}.type: got 'image', must be 'text' or"),
    (asked_with({"text": "a"}), f"{IN_TEXT}.type: must be given"),
    (asked_with(5), f"{IN_TEXT}: got 5, must be an object"),
    (
        asked_with({"type": "tool_use", "id": "a", "name": "b", "input": {}}),
        f"{IN_TEXT}.type: got 'tool_use', must be 'text' or 'tool_result' in a message of the user",
    ),
    (
        {"messages": [*HELLO, *USES]},
        "messages: got 129 blocks tool_use in one turn, must be at most 128",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": [IN_ANSWER, USE]}]},
        "messages: got tool calls in the last message, whose text is to be continued",
    ),
    (asked_with({"type": "tool_result"}), f"{IN_TEXT}.tool_use_id: must be given"),
    (
        asked_with({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text"}]}),
        f"{IN_TEXT}.content.0.text: must be given",
    ),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema: must be given"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools.0.type: got 'web_search_20250305', must be 'custom' or left out: the server runs no",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type: got 'any', must be 'auto' or 'none'"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice: got {'type': 'tool'}, must be an object"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: got 'x', must be a function of"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        "thinking.budget_tokens: got 0, must be greater than or equal to 1",
    ),
    (
        {"thinking": {"type": "on"}},
        "thinking.type: got 'on', must be 'enabled', 'adaptive', 'between_tools' or 'disabled'",
    ),
    ({"container": "x"}, "container: got 'x', must be left out: the server runs no tools"),
    ({"mcp_servers": [{}]}, "mcp_servers: got [{}], must be left out: the server runs no tools"),
    ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type: got 'x', must be"),
]


@pytest.mark.parametrize(("changed", "sentence"), SENTENCES)
def test_wrong_fields_are_named(changed: dict[str, Any], sentence: str) -> None:
    model = Echo()
    answer = http(model).post(URL, json=ASKED | changed)
    assert answer.status_code == (404 if "model" in changed else 400), answer.text
    found = answer.json()
    assert found.keys() == {"type", "error"}
    assert found["type"] == "error"
    kind = "not_found_error" if "model" in changed else "invalid_request_error"
    assert found["error"]["type"] == kind
    assert found["error"]["message"].startswith(sentence)
    assert not model.asked


def test_all_errors_of_the_routes_have_anthropics_format() -> None:
    client = http(Echo())
    for answer, kind in (
        (client.get(URL), "invalid_request_error"),
        (client.post(f"{URL}/batches", json={}), "not_found_error"),
        (client.post(COUNT, content=b"{"), "invalid_request_error"),
    ):
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == kind
    assert client.post("/v1/messages_of_others", json={}).json().keys() == {"error"}
    refused = json.loads(openai_error(503, "the server is shutting down", COUNT))
    assert refused["error"]["type"] == "overloaded_error"


MANY = 20_000
FLOODS: list[dict[str, Any]] = [
    {"messages": [5] * MANY},
    asked_with(*[5] * MANY),
    asked_with({"type": "tool_result", "tool_use_id": "a", "content": [5] * MANY}),
    {"system": [5] * MANY},
    {"tools": [5] * MANY},
    {"stop_sequences": [5] * MANY},
]


@pytest.mark.parametrize("changed", FLOODS, ids=lambda body: str(body)[:40])
def test_a_wrong_body_has_few_errors(changed: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        MessagesRequest.model_validate(ASKED | changed)
    assert raised.value.error_count() <= 4


def test_each_field_of_the_anthropic_package_has_its_place() -> None:
    """`workspace_id` is a header."""
    names = {name for one in get_args(MessageCreateParams) for name in one.__annotations__}
    assert len(names) > 15
    assert names - MessagesRequest.model_fields.keys() == {"workspace_id"}
    counted = MessageCountTokensParams.__annotations__.keys()
    assert counted - MessagesPrompt.model_fields.keys() == {"workspace_id"}
