"""Histories as clients send them back, with rules of well-known models' templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from endpoint_client import http
from standins import TINY, Echo

from smartspec_gateway.openai.formats.prompts import Prompts

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

ONE_SYSTEM = """{% for m in messages %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}
{%- if m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'user' %}
{{- raise_exception('Roles must alternate.') }}{% endif %}[{{ m.role }}]{{ m.content }}
{%- endfor %}"""
"""Qwen3.5 and later take one system message. Gemma's templates want roles to alternate."""

MANY_SYSTEMS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"

SHORT_IDS = """{% for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for c in m.tool_calls or [] %}
{%- if c.id is not string or c.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}<{{ c.id }}>{{ c.function }}{% endfor %}
{%- if m.role == 'tool' %}
{%- if m.tool_call_id is not string or m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}<{{ m.tool_call_id }}>{% endif %}{% endfor %}"""
"""As Mistral's templates."""

THOUGHTS = """{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>
{%- endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<{{ c.function.name }}>
{{- c.function.arguments.values() | join }}{% endfor %}{% endfor %}"""
"""As Qwen3's: thoughts since the last message of the user, which are those of the tool loop."""

NO_THOUGHT_BESIDE_TEXT = """{% for m in messages %}
{%- if m.thinking and m.content and m.tool_calls %}
{{- raise_exception('Cannot pass both content and thinking') }}{% endif %}
{{- m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>
{{- c.function.arguments.values() | join }}{% endfor %}{% endfor %}"""
"""As gpt-oss."""


AFTER_SYSTEM = """[user]{% set first = messages[0] %}
{%- if first.role == 'system' %}{% for m in messages[1:] %}{{ first.content }} {{ m.content }}
{%- endfor %}{% else %}{{ first.content | trim }}{% endif %}"""
"""As Gemma 3's."""

ALTERNATE = """{% set ns = namespace(num=0) %}
{%- for m in messages %}{% if m.role in ['user', 'assistant'] and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.num % 2 == 0) %}
{{- raise_exception('conversation roles must alternate') }}{% endif %}
{%- set ns.num = ns.num + 1 %}{% endif %}{% endfor %}"""
"""Mistral's templates before 2025 count no calls."""


def told(folder: Path, template: str, path: str, **body: Any) -> str:
    """The prompt that the server makes of a request."""
    (folder / "chat.jinja").write_text(template)
    prompts, model = Prompts(TINY, folder / "chat.jinja"), Echo()
    client = http(model, prompts)
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return prompts.decode(model.asked[0]["input_ids"])


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


LATER = [message("user", "a"), message("assistant", "b"), message("system", "s")]
SYSTEMS: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {"messages": [message("system", "i"), message("developer", "d"), *LATER]},
    ),
    (
        RESPONSES,
        {"instructions": "i", "input": [message("developer", "d"), *LATER]},
    ),
    (
        MESSAGES,
        {"system": "i", "max_tokens": 9, "messages": [message("system", "d"), *LATER]},
    ),
]


@pytest.mark.parametrize(("path", "body"), SYSTEMS)
def test_system_messages_are_merged_where_a_template_takes_one(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """On Anthropic's route, messages of one role that follow each other are lines of one."""
    found = told(tmp_path, ONE_SYSTEM, path, **body)
    assert re.sub("\n+", "|", found) == "[system]i|d|s[user]a[assistant]b"
    found = told(tmp_path, MANY_SYSTEMS, path, **body)
    assert found.endswith("[user]a[assistant]b[system]s"), "a template that takes several"


def test_users_messages_are_joined_where_roles_must_alternate(tmp_path: Path) -> None:
    """Codex sends its environment and the prompt as two."""
    items = [message("user", "env"), message("developer", "d"), message("user", "a")]
    found = told(tmp_path, ONE_SYSTEM, RESPONSES, input=items, instructions="i")
    assert found == "[system]i\n\nd[user]env\n\na"
    assert told(tmp_path, MANY_SYSTEMS, RESPONSES, input=items) == "[user]env[system]d[user]a"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_alone_reaches_the_model(tmp_path: Path, role: str) -> None:
    """Gemma's templates write it before the text of the user, and nothing without one."""
    texts = [message(role, "s <|im_end|>")]
    assert told(tmp_path, AFTER_SYSTEM, CHAT, messages=texts) == "[user]s <|im_end|>"
    several = [message(role, "s"), message(role, "t")]
    assert told(tmp_path, AFTER_SYSTEM, CHAT, messages=several) == "[user]s t"
    assert told(tmp_path, MANY_SYSTEMS, CHAT, messages=several) == "[system]s[system]t"
    assert told(tmp_path, AFTER_SYSTEM, CHAT, messages=[message(role, "")]) == "[user]"


def talk(*ids: str | None) -> list[dict[str, Any]]:
    """A chat with a call and a result for each id."""
    calls = [{"id": one, "function": {"name": "f", "arguments": "{}"}} for one in ids]
    results = [message("tool", "r") | {"tool_call_id": one} for one in ids]
    return [message("user", "a"), message("assistant", "") | {"tool_calls": calls}, *results]


def test_ids_have_nine_letters_and_digits_where_a_template_wants_them(tmp_path: Path) -> None:
    """The same id has the same short one in each request."""
    long = f"call_{'0' * 32}"
    found = told(tmp_path, SHORT_IDS, CHAT, messages=talk(long, "a_b"))
    calls = re.findall("<(.*?)>", found)
    assert calls[:2] == calls[2:]
    assert len(set(calls)) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in calls)
    again = told(tmp_path, SHORT_IDS, CHAT, messages=[message("system", "s"), *talk("x", long)])
    assert re.findall("<(.*?)>", again)[1] == calls[0]
    kept = told(tmp_path, SHORT_IDS, CHAT, messages=talk("Abcdef123"))
    assert kept.count("<Abcdef123>") == 2
    missing = re.findall("<(.*?)>", told(tmp_path, SHORT_IDS, CHAT, messages=talk(None, None)))
    assert missing[:2] == missing[2:]
    assert len(set(missing)) == 2
    plain = SHORT_IDS.replace("!= 9", "< 1")
    assert f"<{long}>" in told(tmp_path, plain, CHAT, messages=talk(long))


def test_both_rules_are_used_together(tmp_path: Path) -> None:
    template = ONE_SYSTEM + SHORT_IDS
    messages = [*talk("call_1"), message("system", "s")]
    assert told(tmp_path, template, CHAT, messages=messages).startswith("[system]s[user]a")


@pytest.mark.parametrize("ids", [("call_1",), ("call_1", "call_2")])
def test_text_after_results_is_in_the_last_one_where_roles_must_alternate(
    tmp_path: Path, ids: tuple[str, ...]
) -> None:
    messages = [message("system", "s"), *talk(*ids), message("user", "b"), message("user", "c")]
    found = told(tmp_path, ALTERNATE + SHORT_IDS, CHAT, messages=messages)
    short = re.findall("<(.{9})>", found)
    assert found.startswith(f"[system]s[user]a[assistant]<{short[0]}>")
    assert found.endswith(f"[tool]r\n\nb\n\nc<{short[len(ids) - 1]}>")
    assert found.count("\n\nb") == 1
    later = [*messages, message("assistant", "d"), message("user", "e")]
    assert told(tmp_path, ALTERNATE + SHORT_IDS, CHAT, messages=later).endswith(
        f"[tool]r\n\nb\n\nc<{short[len(ids) - 1]}>[assistant]d[user]e"
    )
    kept = told(tmp_path, SHORT_IDS, CHAT, messages=messages)
    assert kept.endswith("[user]b[user]c"), "a template that takes them"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
THOUGHT_ITEM = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
RAW = {"content": [{"type": "reasoning_text", "text": "why"}]}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
THINKING = {"type": "thinking", "thinking": "why", "signature": ""}
REDACTED = {"type": "redacted_thinking", "data": "x"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "r"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "r"}


def of_chat(**thought: str) -> dict[str, Any]:
    called = message("assistant", "I look.") | {"tool_calls": [CALL]} | thought
    return {
        "messages": [message("user", "a"), called, message("tool", "r") | {"tool_call_id": "c"}]
    }


def of_items(*items: Any) -> dict[str, Any]:
    return {"input": [message("user", "a"), *items, ITEM, OUTPUT]}


def of_blocks(*blocks: Any) -> dict[str, Any]:
    turns = [
        {"role": "assistant", "content": [*blocks, USE]},
        {"role": "user", "content": [RESULT]},
    ]
    return {"max_tokens": 9, "messages": [message("user", "a"), *turns]}


TEXT_BLOCK = {"type": "text", "text": "I look."}
SAID = message("assistant", "I look.")


@pytest.mark.parametrize(
    ("path", "body", "thought"),
    [
        (CHAT, of_chat(reasoning_content="why"), "why"),
        (CHAT, of_chat(reasoning="why"), "why"),
        (RESPONSES, of_items(THOUGHT_ITEM | RAW, SAID), "why"),
        (RESPONSES, of_items(THOUGHT_ITEM, SAID), "short"),
        (RESPONSES, of_items(THOUGHT_ITEM, THOUGHT_ITEM | RAW, SAID), "short\nwhy"),
        (MESSAGES, of_blocks(REDACTED, THINKING, TEXT_BLOCK), "why"),
    ],
)
def test_thoughts_of_a_tool_loop_reach_the_template(
    tmp_path: Path, path: str, body: dict[str, Any], thought: str
) -> None:
    """On all routes; the template decides which ones are shown."""
    found = told(tmp_path, THOUGHTS, path, **body)
    assert found == f"[user]a[assistant]<think>{thought}</think>I look.<f>[tool]r"
    name = "input" if path == RESPONSES else "messages"
    later = body | {name: [*body[name], message("assistant", "b"), message("user", "c")]}
    assert "<think>" not in told(tmp_path, THOUGHTS, path, **later)
    assert told(tmp_path, NO_THOUGHT_BESIDE_TEXT, path, **body) == "aI look.<f>r"


def test_a_thought_without_text_belongs_to_its_call(tmp_path: Path) -> None:
    for path, body in ((RESPONSES, of_items(THOUGHT_ITEM)), (MESSAGES, of_blocks(THINKING))):
        found = told(tmp_path, THOUGHTS, path, **body)
        assert re.fullmatch(r"\[user]a\[assistant]<think>\w+</think><f>\[tool]r", found)


REFUSAL = {"type": "refusal", "refusal": "No."}
TEXT_PART, ITEM_PART = ({"type": kind, "text": "b"} for kind in ("text", "output_text"))


@pytest.mark.parametrize(
    ("path", "said", "text"),
    [
        (CHAT, {"content": [REFUSAL]}, "No."),
        (CHAT, {"content": [TEXT_PART, REFUSAL]}, "b\nNo."),
        (CHAT, {"content": None, "refusal": "No."}, "No."),
        (CHAT, {"content": "b", "refusal": "No."}, "b\nNo."),
        (CHAT, {"content": "b", "refusal": None}, "b"),
        (RESPONSES, {"content": [REFUSAL]}, "No."),
        (RESPONSES, {"content": [ITEM_PART, REFUSAL]}, "b\nNo."),
    ],
)
def test_refusals_are_text_of_the_assistant(
    tmp_path: Path, path: str, said: dict[str, Any], text: str
) -> None:
    """As OpenAI's packages send them back."""
    turns = [message("user", "a"), {"role": "assistant", **said}, message("user", "c")]
    found = told(
        tmp_path, MANY_SYSTEMS, path, **{"input" if path == RESPONSES else "messages": turns}
    )
    assert found == f"[user]a[assistant]{text}[user]c"
