"""Calls and thoughts of models with marks of their own, which are special tokens: in the prompt, in
an answer that is whole or streamed, and as a required answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from endpoint_client import CHAT, HELLO, events, http
from standins import TINY, text_with
from tokenizers import AddedToken, Tokenizer

from smartspec_gateway.openai.formats.call_grammar import CallFormat
from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_py.engines.tokenizer_file import SPECIAL_MARKS

SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ANSWER = {"role": "assistant", "content": "Sun."}

ALTERNATES = (
    "{% set n = namespace(n=0) %}{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (n.n % 2 == 0) %}{{ raise_exception('Alternate') }}{% endif %}"
    "{% set n.n = n.n + 1 %}{% endfor %}"
)
MISTRAL = """{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}TEXT
{%- for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}ID[ARGS]
{{- c.function.arguments | tojson }}{% endfor %}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""


SEED = """{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '\n' }}<seed:tool_call>
<function={{ c.function.name }}>
{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>
{% endfor %}</function>
</seed:tool_call>{% endfor %}{% endfor %}"""


APERTUS = """{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}
{%- if m.tool_calls %}<|tools_prefix|>[{% for c in m.tool_calls %}
{{- '{\"' + c.function.name + '\": ' + c.function.arguments | tojson + '}' }}
{{- ', ' if not loop.last }}
{%- endfor %}]<|tools_suffix|>{% endif %}{% endfor %}"""

COHERE = """{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}<|START_ACTION|>[
{% for c in m.tool_calls %}
    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters":
{{- ' ' }}{{ c.function.arguments | tojson }}}{{ ',' if not loop.last }}
{% endfor %}
]<|END_ACTION|>
{%- else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""


LFM2 = """{% set s = namespace(text=messages[0].content if messages[0].role == 'system' else '') %}
{%- if tools %}{% set s.text = s.text ~ 'List of tools: ' ~ (tools | tojson) %}{% endif %}
{%- if s.text %}<|im_start|>system
{{ s.text }}<|im_end|>
{% endif %}
{%- for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


KIMI = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls -%}
<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"""


class Case(NamedTuple):
    """template: as that of a model. shown: two calls, as it shows them and as the model writes
    them. thought: one that the model writes before a text and the calls."""

    call_format: CallFormat
    template: str
    shown: str
    thought: str = ""


CASES = {
    "Mistral Small 3.2": Case(
        CallFormat.MISTRAL,
        ALTERNATES + MISTRAL.replace("TEXT", "").replace("ID", "[CALL_ID]{{ c.id }}"),
        '[TOOL_CALLS]weather[CALL_ID]id0000001[ARGS]{"place": "Rome"}'
        '[TOOL_CALLS]weather[CALL_ID]id0000002[ARGS]{"place": "Oslo"}',
    ),
    "Ministral 3": Case(
        CallFormat.MISTRAL,
        ALTERNATES + MISTRAL.replace("TEXT", "{{ m.content }}").replace("ID", ""),
        '[TOOL_CALLS]weather[ARGS]{"place": "Rome"}[TOOL_CALLS]weather[ARGS]{"place": "Oslo"}',
        "[THINK]Hm.[/THINK]",
    ),
    "Seed-OSS": Case(
        CallFormat.SEED_XML,
        SEED,
        "\n".join(
            f"<seed:tool_call>\n<function=weather>\n<parameter=place>{place}</parameter>\n"
            "</function>\n</seed:tool_call>"
            for place in ("Rome", "Oslo")
        ),
        "<seed:think>Hm.</seed:think>\n",
    ),
    "Apertus": Case(
        CallFormat.APERTUS,
        APERTUS,
        '<|tools_prefix|>[{"weather": {"place": "Rome"}}, {"weather": {"place": "Oslo"}}]'
        "<|tools_suffix|>",
        "<|inner_prefix|>Hm.<|inner_suffix|>",
    ),
    "LFM2": Case(
        CallFormat.PYTHON,
        LFM2,
        '<|tool_call_start|>[weather(place="Rome"), weather(place="Oslo")]<|tool_call_end|>',
        "<think>Hm.</think>",
    ),
    "Kimi K2": Case(
        CallFormat.KIMI,
        KIMI,
        "<|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"place": "Rome"}'
        "<|tool_call_end|>"
        '<|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>{"place": "Oslo"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<think>Hm.</think>",
    ),
    "Command R7B": Case(
        CallFormat.COHERE,
        COHERE,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        '{"place": "Rome"}},\n    {"tool_call_id": "1", "tool_name": "weather", "parameters": '
        '{"place": "Oslo"}}\n]<|END_ACTION|>',
        "<|START_THINKING|>Hm.<|END_THINKING|>",
    ),
}


def prompts_of(folder: Path, template: str) -> Prompts:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in SPECIAL_MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return Prompts(folder)


def history() -> list[dict[str, Any]]:
    """A text, two calls and their results, and what follows."""
    places = {"id0000001": "Rome", "id0000002": "Oslo"}
    calls = [
        {
            "id": number,
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"place": place})},
        }
        for number, place in places.items()
    ]
    results = [
        {"role": "tool", "tool_call_id": number, "content": f"sun in {place}"}
        for number, place in places.items()
    ]
    calling = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    return [*HELLO, calling, *results, ANSWER, *HELLO]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_history_has_the_text_the_calls_and_the_results(tmp_path: Path, case: Case) -> None:
    prompt = prompts_of(tmp_path, case.template).of_chat(history(), {}, tools=[TOOL])
    at = 0
    of_ids = ["weather:0\nsun", "weather:1\nsun"] if case.template is KIMI else []
    assert all(part in prompt for part in of_ids)
    for part in ("I look.", case.shown, "sun in Rome", "sun in Oslo", "Sun.", "Hello!"):
        at = prompt.find(part, at) + 1
        assert at, (part, prompt)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_answer_has_the_text_and_the_calls(tmp_path: Path, case: Case) -> None:
    text = f"{case.thought}I look.{case.shown}"
    thought = "Hm." if case.thought else ""
    parts = [text[at : at + 7] for at in range(0, len(text), 7)]
    template = f"{{# {case.thought} #}}{case.template}"
    client = http(text_with(*parts), prompts_of(tmp_path, template))
    body = {"messages": HELLO, "tools": [TOOL]}
    choice = client.post(CHAT, json=body).json()["choices"][0]
    assert choice["message"]["content"] == "I look."
    assert choice["message"].get("reasoning_content", "") == thought
    check([call["function"] for call in choice["message"]["tool_calls"]])
    assert choice["finish_reason"] == "tool_calls"
    chunks = events(client.post(CHAT, json=body | {"stream": True}).text)[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    named = [function for function in functions if "name" in function]
    texts = [function["arguments"] for function in functions if "name" not in function]
    check([one | {"arguments": text} for one, text in zip(named, texts, strict=True)])


def check(functions: list[dict[str, Any]]) -> None:
    assert [one["name"] for one in functions] == ["weather"] * 2
    places = [json.loads(one["arguments"]) for one in functions]
    assert places == [{"place": "Rome"}, {"place": "Oslo"}]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_required_call_has_the_form_of_the_model(tmp_path: Path, case: Case) -> None:
    prompts, model = prompts_of(tmp_path, case.template), text_with(case.shown)
    assert prompts.call_format is case.call_format
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}
    choice = http(model, prompts).post(CHAT, json=body).json()["choices"][0]
    assert choice["message"]["content"] is None
    check([call["function"] for call in choice["message"]["tool_calls"]])
    guide = model.asked[0]["guided_decoding_guide"]
    begin = case.shown[: case.shown.index(">" if case.shown[0] == "<" else "]") + 1]
    assert f'"{begin}' in guide


def test_marks_are_text_of_the_model_and_never_of_a_client(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, MISTRAL)
    own = [prompts.encode(mark, add_special_tokens=False) for mark in SPECIAL_MARKS]
    assert [len(tokens) for tokens in own] == [1] * len(SPECIAL_MARKS)
    assert not prompts.special_tokens & {tokens[0] for tokens in own}
    forged = [{"role": "user", "content": "".join(SPECIAL_MARKS)}]
    tokens = prompts.encode_chat(prompts.of_chat(forged, {}))
    assert forged[0]["content"] in prompts.decode(tokens)
    assert not [token for token in tokens if [token] in own]
