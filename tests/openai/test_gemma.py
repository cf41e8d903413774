"""The chat template, calls and thoughts of Gemma 4, whose marks are special tokens, through the
endpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from endpoint_client import CHAT, HELLO, events, http
from standins import TINY, text_with
from tokenizers import AddedToken, Tokenizer

import openai
from smartspec_gateway.openai.formats.call_grammar import CallFormat
from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_py.engines.tokenizer_file import GEMMA_MARKS

TEMPLATE = Path(__file__).with_name("gemma.jinja").read_text()
ONE_TURN = "state.last in ('model', 'result')"
"""Whether a message of the model continues the turn before, in one of two known templates."""

ONE_ROUND = "(state.last == 'result' and m.tool_calls)"

OTHERS = ("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_response>", "<tool_response|>")
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "day": {"type": "integer"}},
    "required": ["place"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<|tool_call>call:weather{day:3,place:<|"|>Rome "}<|"|>}<tool_call|>'
OTHER = '<|tool_call>call:weather{place:<|"|>Oslo<|"|>}<tool_call|>'
TEXT = f"<|channel>thought\nI need it.<channel|>I look.{CALL}{OTHER}<|channel>thought\n<channel|>"
PARTS = [TEXT[at : at + 7] for at in range(0, len(TEXT), 7)]
ARGUMENTS = [{"day": 3, "place": 'Rome "}'}, {"place": "Oslo"}]
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}


def prompts_of(folder: Path, continued: str = ONE_TURN) -> Prompts:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    marks = [AddedToken(mark, normalized=False) for mark in (*GEMMA_MARKS, *OTHERS)]
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("CONTINUED", continued))
    return Prompts(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    return prompts_of(tmp_path)


def called(*places: str, **more: Any) -> dict[str, Any]:
    calls = [
        {
            "id": place,
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"place": place, "day": 3})},
        }
        for place in places
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(place: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": place, "content": f"sun in {place}"}


def shown(place: str) -> str:
    return f'<|tool_call>call:weather{{day:3,place:<|"|>{place}<|"|>}}<tool_call|>'


def told(place: str) -> str:
    return f'<|tool_response>response:weather{{value:<|"|>sun in {place}<|"|>}}<tool_response|>'


@pytest.mark.parametrize("continued", [ONE_TURN, ONE_ROUND])
def test_a_turn_has_texts_calls_and_results_in_their_order(tmp_path: Path, continued: str) -> None:
    """As the model wrote them, wherever the template has a place for them."""
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        called("Rome", "Oslo", content="I look.\n", reasoning_content="Hm."),
        result("Oslo"),
        result("Rome"),
        called("Bern", content="More:"),
        result("Bern"),
        {"role": "assistant", "content": "In Rome."},
        {"role": "user", "content": "And now?"},
        called("Rome"),
        result("Rome"),
    ]
    prompts = prompts_of(tmp_path, continued)
    assert prompts.call_format is CallFormat.GEMMA
    assert prompts.of_chat(messages, {}, tools=[TOOL]) == (
        "<|turn>system\nBe brief.<|tool>declaration:weather{day,place,}<tool|><turn|>\n"
        "<|turn>user\nHello!<turn|>\n"
        "<|turn>model\n<|channel>thought\nHm.\n<channel|>I look.\n"
        f"{shown('Rome')}{shown('Oslo')}{told('Rome')}{told('Oslo')}"
        f"More:{shown('Bern')}{told('Bern')}In Rome.<turn|>\n"
        "<|turn>user\nAnd now?<turn|>\n"
        f"<|turn>model\n{shown('Rome')}{told('Rome')}"
    )


def test_a_result_without_an_id_belongs_to_the_call_at_its_place(prompts: Prompts) -> None:
    results = [{"role": "tool", "content": f"sun in {place}"} for place in ("Rome", "Oslo")]
    prompt = prompts.of_chat([*HELLO, called("Rome", "Oslo"), *results], {}, tools=[TOOL])
    assert prompt.endswith(f"{shown('Rome')}{shown('Oslo')}{told('Rome')}{told('Oslo')}")


def test_an_answer_that_is_last_does_not_take_the_turn_of_the_next(prompts: Prompts) -> None:
    talk = [*HELLO, called("Rome"), result("Rome"), {"role": "assistant", "content": "Sun."}]
    assert prompts.of_chat(talk, {}).endswith(
        "Sun.<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    )


def test_marks_are_text_of_the_model_and_never_of_a_client(prompts: Prompts) -> None:
    plain = [prompts.encode(mark, add_special_tokens=False) for mark in GEMMA_MARKS]
    assert [len(tokens) for tokens in plain] == [1] * len(GEMMA_MARKS)
    assert not prompts.special_tokens & {tokens[0] for tokens in plain}
    forged = "".join(GEMMA_MARKS)
    tokens = prompts.encode_chat(prompts.of_chat([{"role": "user", "content": forged}], {}))
    assert forged in prompts.decode(tokens)
    own = [token for token in tokens if [token] in plain]
    assert prompts.decode(own) == "<|channel><channel|>", "those of the template"


@pytest.mark.parametrize("kwargs", [{}, THINKS, {"reasoning_effort": "none"}])
def test_a_chat(prompts: Prompts, kwargs: dict[str, Any]) -> None:
    """Thoughts are apart, whatever the template was told."""
    model = text_with(*PARTS)
    body = {"messages": HELLO, "tools": [TOOL], **kwargs}
    choice = http(model, prompts).post(CHAT, json=body).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("I need it.", "I look.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert [json.loads(one["arguments"]) for one in functions] == ARGUMENTS
    assert choice["finish_reason"] == "tool_calls"
    prompt = prompts.decode(model.asked[0]["input_ids"])
    assert prompt.endswith("<|turn>model\n" if kwargs is THINKS else "<channel|>")
    chunks = events(http(model, prompts).post(CHAT, json=body | {"stream": True}).text)[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I need it."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls if "id" in call] == ["weather"] * 2
    texts = [call["function"]["arguments"] for call in calls if "id" not in call]
    assert list(map(json.loads, texts)) == ARGUMENTS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", [CALL[:-20], CALL.replace("weather", "other")])
def test_what_is_no_call_is_text(prompts: Prompts, text: str) -> None:
    body = {"messages": HELLO, "tools": [TOOL]}
    choice = http(text_with(text), prompts).post(CHAT, json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_responses(prompts: Prompts) -> None:
    client = openai.OpenAI(
        base_url="http://testserver/v1",
        api_key="none",
        http_client=http(text_with(*PARTS), prompts),
    )
    asked: Any = {
        "model": "smartspec",
        "input": "Hello!",
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
    }
    streamed = list(client.responses.create(**asked, stream=True))[-1]
    assert streamed.type == "response.completed"
    for found in (client.responses.create(**asked), streamed.response):
        reasoning, message, *calls = found.output
        assert (reasoning.content[0].text, message.content[0].text) == ("I need it.", "I look.")
        assert [json.loads(call.arguments) for call in calls] == ARGUMENTS


@pytest.mark.parametrize("thinks", [True, False])
def test_messages(prompts: Prompts, thinks: bool) -> None:
    """The blocks can be sent back."""
    model = text_with(*PARTS)
    client = anthropic.Anthropic(
        base_url="http://testserver", api_key="none", http_client=http(model, prompts)
    )
    kind = {"type": "enabled", "budget_tokens": 1024} if thinks else {"type": "disabled"}
    asked: Any = {
        "model": "smartspec",
        "max_tokens": 50,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "thinking": kind,
    }
    with client.messages.stream(**asked, messages=HELLO) as stream:
        streamed = stream.get_final_message()
    prompt = prompts.decode(model.asked[0]["input_ids"])
    assert prompt.endswith("<|turn>model\n" if thinks else "<|channel>thought\n<channel|>")
    assert ("<|think|>" in prompt) is thinks
    for found in (client.messages.create(**asked, messages=HELLO), streamed):
        thought, text, *calls = found.content
        assert (thought.thinking, text.text) == ("I need it.", "I look.")
        assert [call.input for call in calls] == ARGUMENTS
        assert found.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"} for call in calls]
    talk: Any = [*HELLO, streamed.to_param(), {"role": "user", "content": results}]
    client.messages.create(**asked, messages=talk)
    prompt = prompts.decode(model.asked[-1]["input_ids"])
    response = '<|tool_response>response:weather{value:<|"|>sun<|"|>}<tool_response|>'
    assert prompt.endswith(
        "<|turn>model\n<|channel>thought\nI need it.\n<channel|>I look."
        f"{CALL}{OTHER}{response}{response}"
    )


@pytest.mark.parametrize("kwargs", [{}, THINKS])
def test_forced_calls(prompts: Prompts, kwargs: dict[str, Any]) -> None:
    """The grammar has Gemma's form, and begins behind a thought if the model may think."""
    model = text_with(CALL, OTHER)
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", **kwargs}
    choice = http(model, prompts).post(CHAT, json=body).json()["choices"][0]
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [json.loads(one["arguments"]) for one in functions] == ARGUMENTS
    assert choice["message"]["content"] is None
    guide = model.asked[0]["guided_decoding_guide"]
    assert '"<|tool_call>call:weather"' in guide
    assert ('("<|channel>thought" reasoning)?' in guide) is bool(kwargs)
