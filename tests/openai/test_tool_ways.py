"""Tools, calls and results in templates that read them in their own ways, with the structure of
well-known models' templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from standins import TINY

from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.call_grammar import CallFormat
from smartspec_gateway.openai.formats.prompts import Prompts

PHI = """{% for m in messages %}
{%- if m.role == 'system' and 'tools' in m and m['tools'] is not none %}
{{- '<|system|>' + m.content + '<|tool|>' + m['tools'] + '<|/tool|><|end|>' }}
{%- else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""As Phi-4-mini's: tools are a text of the system message, and calls are not read."""

R1 = """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m['content'] is none %}<A>
{%- for c in m['tool_calls'] %}<call>{{ c.function.name }}
{{ c.function.arguments + '</call>' }}{% endfor %}
{%- else %}<{{ m.role }}>{{ m['content'] }}{% endif %}{% endfor %}<A>"""
"""As DeepSeek-R1's: calls only without a content, and their arguments as text."""

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
"""As SmolLM's: only roles and contents."""

GEMMA = """{% if messages[0].role == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}
{%- endfor %}[model]"""

ONE_CALL = """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set f = m.tool_calls[0].function %}(assistant)
{{- '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}}
{%- else %}({{ m.role }}){{ m.content }}{% endif %}{% endfor %}(assistant)"""
"""As Llama 3.1's."""

MISTRAL = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][
{%- for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Where is it warm?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def called(*cities: str, text: str | None = None) -> list[dict[str, Any]]:
    """A message with a call for each city, and their results."""
    calls = [
        {
            "id": f"call_{city}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city})},
        }
        for city in cities
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call_{city}", "content": f"sun in {city}"}
        for city in cities
    ]
    return [{"role": "assistant", "content": text, "tool_calls": calls}, *results]


def prompts_of(folder: Path, template: str) -> Prompts:
    path = folder / "chat.jinja"
    path.write_text(template)
    return Prompts(TINY, path)


@pytest.mark.parametrize("template", [PHI, R1, PLAIN, GEMMA, ONE_CALL, MISTRAL])
@pytest.mark.parametrize("text", [None, "I look."])
@pytest.mark.parametrize("head", [[USER], [SYSTEM, USER]])
def test_each_template_shows_tools_calls_and_results_in_order(
    tmp_path: Path, template: str, text: str | None, head: list[Any]
) -> None:
    prompts = prompts_of(tmp_path, template)
    messages = [*head, *called("Rome", "Oslo", text=text), *called("Bern")]
    prompt = prompts.of_chat(messages, {}, tools=[TOOL])
    assert '"parameters"' in prompt, "the tool"
    wanted = ["Where is it", *([text] if text else [])]
    cities = ["Rome", "Oslo"]
    results = [f"sun in {city}" for city in cities]
    both = [cities[0], results[0], cities[1], results[1]]
    wanted += both if template == ONE_CALL else cities + results
    at = 0
    for part in [*wanted, "Bern", "sun in Bern"]:
        at = prompt.find(part, at) + 1
        assert at, (part, prompt)
    if head[0] is SYSTEM:
        assert "Be brief." in prompt


def test_a_text_that_a_template_shows_behind_calls_is_before_them(tmp_path: Path) -> None:
    """As that of DeepSeek-R1-Distill-Qwen shows it."""
    template = """{% for m in messages %}{% if m.tool_calls %}[call]
{%- for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}[end]{% endif %}
{%- if m.content is not none %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""
    prompt = prompts_of(tmp_path, template).of_chat([USER, *called("Rome", text="I look.")], {})
    assert "[assistant]I look.[call]" in prompt
    assert prompt.endswith("}[end][tool]sun in Rome")


def test_a_chat_without_calls_is_as_it_was(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, PLAIN)
    found = prompts.of_chat([SYSTEM, USER], {})
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere is it warm?"
    assert found == f"{begin}<|im_end|>\n<|im_start|>assistant"


def test_what_is_told_where_a_template_knows_no_tools(tmp_path: Path) -> None:
    prompt = prompts_of(tmp_path, GEMMA).of_chat([USER, *called("Rome", "Oslo")], {})
    calls = "\n".join(
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("Rome", "Oslo")
    )
    results = "\n".join(
        f"<tool_response>\nsun in {city}\n</tool_response>" for city in ("Rome", "Oslo")
    )
    assert prompt == f"[user]Where is it warm?[assistant]{calls}[user]{results}[model]"


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "system"),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{# developer #}{% endfor %}",
            "developer",
        ),
        (
            "{% for m in messages if m.role != 'developer' %}[{{ m.role }}]{{ m.content }}"
            "{% endfor %}",
            "system",
        ),
    ],
)
def test_the_role_developer_where_a_template_knows_it(
    tmp_path: Path, template: str, role: str
) -> None:
    """Some name it, and leave out its messages."""
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    prompt = prompts_of(tmp_path, template).of_chat(messages, {})
    assert prompt == f"[{role}]Be brief.[user]Where is it warm?"


def test_calls_are_shown_where_no_way_shows_the_text_beside_them(tmp_path: Path) -> None:
    """As Mistral Nemo's, whose roles must alternate without calls and results."""
    check = (
        "{% set n = namespace(n=0) %}{% for m in messages if m.role != 'tool' %}"
        "{% if not m.tool_calls %}{% if (m.role == 'user') != (n.n % 2 == 0) %}"
        "{{- raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% set n.n = n.n + 1 %}{% endif %}{% endfor %}"
    )
    answer = {"role": "assistant", "content": "In Rome."}
    messages = [USER, *called("Rome", text="I look."), answer]
    prompt = prompts_of(tmp_path, check + MISTRAL).of_chat(messages, {})
    assert '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]' in prompt
    assert "I look." not in prompt


def test_results_follow_their_calls_whatever_their_order(tmp_path: Path) -> None:
    call, first, second = called("Rome", "Oslo")
    prompt = prompts_of(tmp_path, ONE_CALL).of_chat([USER, call, second, first, USER], {})
    assert prompt.index("sun in Rome") < prompt.index('"Oslo"') < prompt.index("sun in Oslo")
    assert prompt.endswith("(user)Where is it warm?(assistant)")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PHI, CallFormat.LIST),
        (MISTRAL, CallFormat.LIST),
        (PLAIN, CallFormat.HERMES),
        (ONE_CALL, CallFormat.LLAMA),
        ("{% if tools %}<tool_call>{{ tools }}{% endif %}", CallFormat.HERMES),
        ("{{ tools }}<tool_call><function=x>", CallFormat.QWEN_XML),
    ],
)
def test_the_format_of_forced_calls(tmp_path: Path, template: str, expected: CallFormat) -> None:
    assert prompts_of(tmp_path, template).call_format is expected


def test_a_template_that_takes_nothing_still_refuses(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, "{{ raise_exception('never') }}")
    with pytest.raises(ApiError, match="the chat template refuses them: never"):
        prompts.of_chat([USER, *called("Rome")], {}, tools=[TOOL])
