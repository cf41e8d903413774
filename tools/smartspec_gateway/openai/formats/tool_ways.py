"""How a chat template is told of tools, of earlier calls and of their results.

Templates differ in what they read, and leave out the rest without a word: that of Phi-4-mini takes
tools from the system message, those of DeepSeek-R1 show a call only beside an empty content, and
many know no tools. So each template is tried once with a probe, and the first way is used whose
names and values are in the prompt. A way that also shows the text beside a call goes first: those
of Llama 3 show only the call of such a message.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import count, product
from typing import Any, NamedTuple

from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats import harmony, histories, python_calls
from smartspec_gateway.openai.formats.tools import (
    BEGIN,
    CALL_ID,
    END,
    FUNCTIONS,
    KIMI_ARGS,
    MISTRAL,
)

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Tools], str]
"""Makes a prompt. Raises ApiError if the template refuses the messages."""

TOOLS_TEXT = f"""You can call these functions:

{{tools}}

To call one, answer with its name and its arguments:
{BEGIN}
{{{{"name": "name of the function", "arguments": {{{{...}}}}}}}}
{END}"""
"""What a model is told whose chat template has no place for tools."""

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "probe"}},
            "required": ["probe_key"],
        },
    },
}
PROBE_CALL = {"name": "probe_call", "arguments": {"probe_key": "probe_value"}}
PROBE_TEXT = "probe_text"
USER = {"role": "user", "content": "probe"}
CALLING = {
    "role": "assistant",
    "tool_calls": [{"id": "probe0000", "type": "function", "function": PROBE_CALL}],
}
RESULT = {
    "role": "tool",
    "tool_call_id": "probe0000",
    "name": "probe_call",
    "content": "probe_result",
}
ANSWER = {"role": "assistant", "content": "probe"}
"""After it, templates whose roles must alternate refuse a message of its own for the text."""

DEVELOPER = {"role": "developer", "content": PROBE_TEXT}
SHOWN = ("probe_call", "probe_value", "probe_result")

BESIDE = "\ufdd1"
"""Around a text that belongs to the calls of the next message. Unicode reserves this character for
use inside programs."""

MARK_AND_TEXT = re.compile(rf"({re.escape(MISTRAL)}){BESIDE}([^{BESIDE}]*){BESIDE}")
TWO_MESSAGES = re.compile(
    rf"(?:(?<=<tool_response\|>)<\|turn>model\n)?{BESIDE}([^{BESIDE}]*){BESIDE}"
    rf"<turn\|>\n(?:<\|turn>model\n)?(<\|channel>thought\n[^{BESIDE}]*?<channel\|>)?"
)

MARKED = tuple(f"\ufdd2{secrets.token_hex(8)}{end}" for end in "be")
"""Stand for the marks of LFM2's calls up to `joined`: in a message, they would be cut. No client
can know them."""

OF_HARMONY = re.compile(rf"<\|start\|>(assistant to=)?functions\.{BESIDE}([^{BESIDE}]*){BESIDE}")
"""The begin of a call of gpt-oss or of its result, up to the function's own name."""


class Ways(NamedTuple):
    """How one template is told."""

    of_tools: Callable[[Messages, Tools], tuple[Messages, Tools]]
    of_calls: Callable[[Messages], Messages]
    has_developer: bool
    """Whether it knows the role developer, the newer name of system."""

    def told(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        """What to render. Arguments of calls are objects, and each message has a content."""
        if not self.has_developer:
            messages = list(map(_by_system, messages))
        messages = self.of_calls(messages)
        return self.of_tools(messages, tools) if tools else (messages, tools)


def ways_of(template: str, render: Render, tokens: Container[str] = ()) -> Ways:
    """The ways for the template, which `render` renders. tokens: that the tokenizer adds."""
    is_harmony = harmony.THOUGHT in template
    of_tools = next(
        (
            way
            for way in (described if is_harmony else as_given, in_system_message)
            if "probe_tool" in _tried(render, *way([USER], [PROBE_TOOL]))
        ),
        in_text,
    )

    def shows_calls(way: Callable[[Messages], Messages], text: str) -> bool:
        messages: Messages = [USER, {**CALLING, "content": text}, RESULT, ANSWER]
        found = _tried(render, *of_tools(way(messages), [PROBE_TOOL]))
        is_before = found.find(text) < found.find(SHOWN[0])
        return is_before and all(word in found for word in (*SHOWN, text))

    own_ways = [results_in_calls] if "tool_responses" in template else []
    own_ways += [messages_of_harmony] if is_harmony else []
    own_ways += [ids_of_kimi] if KIMI_ARGS in template else []
    more_ways = [text_in_name] if CALL_ID in template else []
    more_ways += [calls_in_python] if python_calls.BEGIN in tokens else []
    tried = product((PROBE_TEXT, ""), (*own_ways, *CALL_WAYS, *more_ways))
    of_calls = next((way for text, way in tried if shows_calls(way, text)), calls_in_text)
    # Many write any role as it is, and the model does not know it.
    shows_developer = PROBE_TEXT in _tried(render, [DEVELOPER, USER], ())
    return Ways(of_tools, of_calls, "developer" in template and shows_developer)


def _tried(render: Render, messages: Messages, tools: Tools) -> str:
    try:
        return render(messages, tools)
    except ApiError:
        return ""


def _by_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def as_given(messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
    return messages, tools


def described(messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
    """As gpt-oss's template wants them: each has a description, and a default beside the values
    that a parameter may have is a text."""
    found = []
    for tool in tools:
        function = {"description": "", **tool["function"]}
        parameters = function.get("parameters") or {}
        if isinstance(properties := parameters.get("properties"), dict):
            shown = {name: _with_text_default(one) for name, one in properties.items()}
            function["parameters"] = {**parameters, "properties": shown}
        found.append({**tool, "function": function})
    return messages, found


def _with_text_default(schema: Any) -> Any:
    is_listed = isinstance(schema, dict) and ("enum" in schema or "oneOf" in schema)
    if not is_listed or isinstance(schema.get("default", ""), str):
        return schema
    return {**schema, "default": _json(schema["default"])}


def in_system_message(messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
    """As Phi-4-mini's template wants them."""
    text = _json([tool["function"] for tool in tools])
    first, *others = messages
    if first["role"] != "system":
        first, others = {"role": "system", "content": ""}, list(messages)
    return [{**first, "tools": text}, *others], ()


def in_text(messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
    """Before the content of the first message: some templates have no system message."""
    text = TOOLS_TEXT.format(tools="\n".join(_json(tool["function"]) for tool in tools))
    first, *others = messages
    return [{**first, "content": f"{text}\n\n{first.get('content') or ''}"}, *others], ()


def calls_as_given(messages: Messages) -> Messages:
    return messages


def calls_without_content(messages: Messages) -> Messages:
    """A message of its own for each text beside calls."""
    found: list[Mapping[str, Any]] = []
    for message in messages:
        if not message.get("tool_calls"):
            found.append(message)
            continue
        if message["content"]:
            found.append({"role": "assistant", "content": message["content"]})
        found.append({**message, "content": None})
    return found


def text_in_name(messages: Messages) -> Messages:
    """For Mistral Small 3.2's template, which leaves out a text beside calls, and refuses a message
    of its own for it: the text begins the name of the first call, up to `joined`."""
    found: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("tool_calls") and (text := message["content"]):
            first, *others = message["tool_calls"]
            function = first["function"]
            named = {**function, "name": f"{BESIDE}{text}{BESIDE}{function['name']}"}
            message = {**message, "tool_calls": [{**first, "function": named}, *others]}
        found.append(message)
    return found


def messages_of_harmony(messages: Messages) -> Messages:
    """As gpt-oss's template wants them, which shows only a system message that is the first, and
    only the first call of a message, with a thought, but no text beside it: the text begins the
    function's name, up to `joined`."""
    messages = histories.with_one_call_each(histories.with_one_system_message(messages))
    return [
        {**message, "content": ""} if message.get("tool_calls") else message
        for message in text_in_name(histories.with_thinking(messages))
    ]


def results_in_calls(messages: Messages) -> Messages:
    """As Gemma 4's templates want them: a message of calls has their results, too, and the answer
    that follows. They write the text of such a message behind the results, so a text that the
    model wrote before its calls gets a message of its own, up to `joined`."""
    found: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        before = found[-1] if found else {}
        calls, results = before.get("tool_calls", ()), before.get("tool_responses", [])
        is_last = place == len(messages) - 1
        if message["role"] == "tool" and calls:
            results = [*results, _result(message, calls, len(results))]
            before["tool_responses"] = sorted(results, key=lambda result: result["call"])
        elif message.get("tool_calls"):
            if text := message["content"]:
                found.append({"role": "assistant", "content": f"{BESIDE}{text}{BESIDE}"})
            found.append({**message, "content": ""})
        elif message["role"] == "assistant" and results and not (before["content"] or is_last):
            before["content"] = message["content"]
        else:
            found.append({**message})
    return found


def _result(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], place: int
) -> dict[str, Any]:
    """The result of a call, which it names by its id, or else has the same place as."""
    ids = [call.get("id") for call in calls]
    wanted = message.get("tool_call_id")
    is_named = wanted is not None and wanted in ids
    place = ids.index(wanted) if is_named else min(place, len(calls) - 1)
    name = calls[place]["function"]["name"]
    return {"call": place, "name": name, "response": message["content"]}


def joined(prompt: str) -> str:
    """The prompt, where a text of `results_in_calls` is in one message with its calls, and behind
    their thought, and one of `text_in_name` before its calls, for gpt-oss as a message. Calls of
    `calls_in_python` have their marks."""
    for stand_in, mark in zip(MARKED, (python_calls.BEGIN, python_calls.END), strict=True):
        prompt = prompt.replace(stand_in, mark)
    if BESIDE not in prompt:
        return prompt
    prompt = MARK_AND_TEXT.sub(r"\2\1", prompt)
    prompt = OF_HARMONY.sub(_before_call, prompt)
    return TWO_MESSAGES.sub(r"\2\1", prompt).replace(BESIDE, "")


def _before_call(found: re.Match[str]) -> str:
    begin = f"{harmony.START}{found[1] or ''}functions."
    return f"{harmony.TURN}{harmony.TEXT}{found[2]}{harmony.END}{begin}" if found[1] else begin


def arguments_as_text(messages: Messages) -> Messages:
    return [
        {**message, "tool_calls": list(map(_with_text, message["tool_calls"]))}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _json(function["arguments"])}}


def ids_of_kimi(messages: Messages) -> Messages:
    """Calls of Kimi are numbered, and templates show their ids as they are."""
    found, ids, nums = list[Mapping[str, Any]](), dict[Any, str](), count()
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            ids[call.get("id")] = new = f"{FUNCTIONS}{call['function']['name']}:{next(nums)}"
            calls.append({**call, "id": new})
        changed = {**message, "tool_calls": calls} if calls else {**message}
        if message["role"] == "tool" and message.get("tool_call_id") in ids:
            changed["tool_call_id"] = ids[message["tool_call_id"]]
        found.append(changed)
    return found


def calls_in_python(messages: Messages) -> Messages:
    """For templates of LFM2 that show texts only: the calls end the text of their message, up to
    `joined`."""
    found = []
    for message in messages:
        changed = {**message}
        if calls := changed.pop("tool_calls", None):
            texts = (python_calls.written(**_function(call)) for call in calls)
            written = f"[{', '.join(texts)}]".join(MARKED)
            changed["content"] = f"{message['content'] or ''}{written}"
        found.append(changed)
    return found


def calls_in_text(messages: Messages) -> Messages:
    """As TOOLS_TEXT asks for them. Results are messages of the user, those that follow each other
    one message."""
    found: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        changed = {**message}
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            changed = {"role": "user", "content": text}
        elif calls := changed.pop("tool_calls", None):
            texts = [f"{BEGIN}\n{_json(_function(call))}\n{END}" for call in calls]
            changed["content"] = "\n".join(filter(None, [message["content"], *texts]))
        if is_result and was_result:
            found[-1]["content"] += f"\n{changed['content']}"
        else:
            found.append(changed)
        was_result = is_result
    return found


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _function(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: call["function"][name] for name in ("name", "arguments")}


CALL_WAYS: tuple[Callable[[Messages], Messages], ...] = (
    calls_as_given,
    calls_without_content,
    arguments_as_text,
    lambda messages: arguments_as_text(calls_without_content(messages)),
)
