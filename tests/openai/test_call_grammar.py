"""Grammars of required calls, and of answers behind reasoning, and how their texts are read."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from smartspec_gateway.openai.formats.call_grammar import (
    CallFormat,
    Function,
    call_grammar,
    calls_or_json,
)
from smartspec_gateway.openai.formats.calls import parameter_types
from smartspec_gateway.openai.formats.reasoning import CHANNEL, THINK, Place, Start
from smartspec_gateway.openai.formats.reasoning_grammar import behind_reasoning
from smartspec_gateway.openai.formats.tools import ForcedCallParser, ToolParser
from smartspec_py.core.types import GuideType
from smartspec_py.engines.structured.guides import GrammarError, compiled, grammar_text
from smartspec_py.engines.structured.token_names import AddedTokens
from smartspec_py.engines.structured.trial import new_tokenizer
from smartspec_py.engines.tokenizer_file import MARKS, read_tokenizer

FILE = Path(__file__).parents[2] / "engines_build/tiny/target/tokenizer.json"
SCHEMA = {
    "type": "object",
    "properties": {
        "q": {"type": "string"},
        "n": {"type": ["integer", "null"]},
        "unit": {"enum": ["km", "mile"]},
        "place": {"$ref": "#/$defs/Place"},
    },
    "required": ["q", "unit"],
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
FUNCTIONS: list[Function] = [("find", SCHEMA), ("now", None)]
FIND = {"q": "a < b", "unit": "km"}
TEXTS = {
    CallFormat.HERMES: '<tool_call>\n{"name": "find", "arguments": %s}\n</tool_call>',
    CallFormat.LLAMA: '{"name": "find", "parameters": %s}',
    CallFormat.LIST: '[{"name": "find", "arguments": %s}]',
    CallFormat.MISTRAL: "[TOOL_CALLS]find[ARGS]%s",
    CallFormat.APERTUS: '<|tools_prefix|>[{"find": %s}]<|tools_suffix|>',
    CallFormat.KIMI: "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
    "<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_calls_section_end|>",
    CallFormat.COHERE: '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "find", '
    '"parameters": %s}\n]<|END_ACTION|>',
}
SEPARATORS = {CallFormat.LLAMA: "; ", CallFormat.HERMES: "\n", CallFormat.LIST: ", "}
BETWEEN = {
    "], [": ", ",
    "]<|tools_suffix|><|tools_prefix|>[": ", ",
    "\n]<|END_ACTION|><|START_ACTION|>[": ",",
    "<|tool_calls_section_end|><|tool_calls_section_begin|>": "",
}
"""What is between calls in one list, where two lists meet."""

XML = (
    "<tool_call>\n<function=find>\n<parameter=q>\na < b\n</parameter>\n<parameter=unit>\nkm\n"
    '</parameter>\n<parameter=place>\n{"x": 3}\n</parameter>\n</function>\n</tool_call>'
)


def with_marks(is_special: bool) -> Tokenizer:
    found = Tokenizer.from_file(str(FILE))
    marks = [AddedToken(mark, special=is_special, normalized=False) for mark in MARKS]
    if is_special:
        found.add_special_tokens(marks)
    else:
        found.add_tokens(marks)
    with TemporaryDirectory() as folder:
        found.save(f"{folder}/tokenizer.json")
        return read_tokenizer(Path(folder))


TOKENIZERS = {
    "pieces": Tokenizer.from_file(str(FILE)),
    "tokens": with_marks(is_special=False),
    "special": with_marks(is_special=True),
}


@cache
def library_of(kind: str) -> tuple[LLTokenizer, AddedTokens]:
    tokenizer = TOKENIZERS[kind]
    added = AddedTokens(tokenizer.to_str())
    return new_tokenizer(added, tokenizer.get_vocab_size(), [0]), added


def matcher(kind: str, lark: str) -> LLMatcher:
    library, added = library_of(kind)
    return compiled(library, grammar_text(GuideType.EBNF_GRAMMAR, lark, added))


def follows(kind: str, lark: str, text: str) -> bool:
    """Whether the whole text, as the tokenizer writes it, follows the grammar."""
    found = matcher(kind, lark)
    tokens = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    return found.consume_tokens(tokens) and found.is_accepting()


def calls_of(parser: ToolParser | ForcedCallParser, text: str) -> list[tuple[str, Any]]:
    calls: list[tuple[str, str]] = []
    for call in parser.feed(text) + parser.finish():
        assert isinstance(call, dict)
        if "id" in call:
            calls.append((call["function"]["name"], ""))
        name, arguments = calls.pop()
        calls.append((name, arguments + call["function"]["arguments"]))
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("call_format", TEXTS)
def test_required_calls_in_json(kind: str, call_format: CallFormat) -> None:
    grammar = call_grammar(FUNCTIONS, call_format, may_repeat=True)
    text = TEXTS[call_format] % json.dumps(FIND)
    twice = text + SEPARATORS.get(call_format, "") + text
    for mark, between in BETWEEN.items():
        twice = twice.replace(mark, between)
    assert follows(kind, grammar, text)
    assert follows(kind, grammar, twice)
    assert not follows(kind, grammar, text.replace("find", "other"))
    assert not follows(kind, grammar, text.replace('"km"', '"cm"'))
    types = {name: parameter_types(schema) for name, schema in FUNCTIONS}
    assert calls_of(ToolParser(types), twice) == [("find", FIND)] * 2
    if call_format in (CallFormat.HERMES, CallFormat.LLAMA):
        assert calls_of(ForcedCallParser(), twice) == [("find", FIND)] * 2


PYTHON = '<|tool_call_start|>[find(q="a\'b", unit="km", place={"x": 3})]<|tool_call_end|>'
MANY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": ["boolean", "null"]},
        "c": {"enum": ["x", 1]},
        "d": {},
    },
    "required": ["b"],
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_required_calls_in_python(kind: str) -> None:
    grammar = call_grammar(FUNCTIONS, CallFormat.PYTHON, may_repeat=True)
    call = PYTHON[PYTHON.index("find") : PYTHON.index("]")]
    twice = PYTHON.replace(call, f"{call}, {call}")
    for text in (PYTHON, twice):
        assert follows(kind, grammar, text)
    assert not follows(kind, grammar, PYTHON.replace("find", "other"))
    assert not follows(kind, grammar, PYTHON.replace('"km"', '"cm"'))
    types = {name: parameter_types(schema) for name, schema in FUNCTIONS}
    found = {"q": "a'b", "unit": "km", "place": {"x": 3}}
    assert calls_of(ToolParser(types), twice) == [("find", found)] * 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("b=True", True),
        ("b=None, d=[1]", True),
        ('a=3, b=False, c="x"', True),
        ("b=True, c=1, d={}", True),
        ("a=3", False),
        ("b=true", False),
        ("b=True, a=3", False),
        ("b=True,c=1", False),
        ('b=True, c="y"', False),
    ],
)
def test_arguments_in_python(arguments: str, expected: bool) -> None:
    grammar = call_grammar([("f", MANY), ("g", None)], CallFormat.PYTHON, may_repeat=False)
    text = f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>"
    assert follows("tokens", grammar, text) == expected
    assert follows("tokens", grammar, "<|tool_call_start|>[g()]<|tool_call_end|>")
    if expected:
        assert calls_of(ToolParser({"f": {}}), text)


def test_names_of_arguments_that_python_has_not() -> None:
    schema = {"properties": {key: {} for key in ("class", "a-b", "first name", "$x")}}
    grammar = call_grammar([("f", schema)], CallFormat.PYTHON, may_repeat=False)
    text = '<|tool_call_start|>[f(class=1, a-b="x", first name=[], $x={})]<|tool_call_end|>'
    assert follows("tokens", grammar, text)
    expected = {"class": 1, "a-b": "x", "first name": [], "$x": {}}
    assert calls_of(ToolParser({"f": parameter_types(schema)}), text) == [("f", expected)]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_required_calls_may_have_identifiers(kind: str) -> None:
    grammar = call_grammar(FUNCTIONS, CallFormat.MISTRAL, may_repeat=True)
    text = f"[TOOL_CALLS]find[CALL_ID]aB3456789[ARGS]{json.dumps(FIND)}"
    assert follows(kind, grammar, 2 * text)
    assert not follows(kind, grammar, text.replace("aB3", ""))
    types = {name: parameter_types(schema) for name, schema in FUNCTIONS}
    assert calls_of(ToolParser(types), 2 * text) == [("find", FIND)] * 2


@pytest.mark.parametrize("call_format", TEXTS)
def test_function_without_parameters(call_format: CallFormat) -> None:
    """OpenAI: omitting `parameters` defines a function with an empty parameter list."""
    grammar = call_grammar([("now", None), ("here", {})], call_format, may_repeat=False)
    for name in ("now", "here"):
        text = TEXTS[call_format].replace("find", name)
        assert follows("pieces", grammar, text % "{}")
        assert not follows("pieces", grammar, text % '{"city": "Paris"}')


NAMED = {"properties": {"x": {"type": "integer"}}}
INVENTED = {"x": 3, "y": 4}


@pytest.mark.parametrize(
    ("schema", "arguments", "may_follow"),
    [
        (NAMED, INVENTED, False),
        ({"properties": {"at": NAMED}}, {"at": INVENTED}, False),
        ({"properties": {"at": {"items": NAMED}}}, {"at": [INVENTED]}, False),
        ({"properties": {"at": {"anyOf": [NAMED, {"type": "null"}]}}}, {"at": INVENTED}, False),
        (
            {"properties": {"at": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": NAMED}},
            {"at": INVENTED},
            False,
        ),
        ({"properties": {"properties": NAMED}}, {"properties": {"x": 3}}, True),
        ({"properties": {"properties": NAMED}}, {"properties": INVENTED}, False),
        (NAMED | {"additionalProperties": True}, INVENTED, True),
        (NAMED | {"patternProperties": {"^z": {"type": "integer"}}}, INVENTED, True),
        (
            NAMED | {"patternProperties": {"^(?!z)": {}}, "additionalProperties": False},
            INVENTED,
            True,
        ),
        (NAMED | {"patternProperties": {"(?=z)": {}, "^y": {"type": "null"}}}, INVENTED, False),
        (NAMED | {"additionalProperties": {"type": "integer"}}, INVENTED, True),
        (NAMED | {"required": ["y"]}, INVENTED, True),
        ({"type": "object"}, INVENTED, True),
        (NAMED | {"anyOf": [{"properties": {"y": {"type": "integer"}}}]}, INVENTED, True),
        ({"allOf": [NAMED, {"properties": {"y": {"type": "integer"}}}]}, INVENTED, True),
    ],
)
def test_keys_that_a_schema_does_not_name(
    schema: dict[str, Any], arguments: Any, may_follow: bool
) -> None:
    grammar = call_grammar([("find", schema)], CallFormat.HERMES, may_repeat=False)
    text = TEXTS[CallFormat.HERMES] % json.dumps(arguments)
    assert follows("pieces", grammar, text) is may_follow


@pytest.mark.parametrize("call_format", [CallFormat.HERMES, CallFormat.QWEN_XML])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "array", "items": {"type": "integer"}, "not": {"maxItems": 0}},
        {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"pattern": "^(?!a).*$"}]}},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "integer"},
                    {"type": "object", "patternProperties": {"^(?!a)": {}, "b": {}}},
                ]
            },
        },
        {"oneOf": [{"type": "array", "items": {"type": kind}} for kind in ("integer", "number")]},
    ],
)
def test_schemas_that_a_grammar_cannot_express(
    schema: dict[str, Any], call_format: CallFormat
) -> None:
    """As a response format, they are refused."""
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    grammar = call_grammar([("find", parameters)], call_format, may_repeat=False)
    if call_format is CallFormat.HERMES:
        text = TEXTS[call_format] % '{"x": [1, 2]}'
    else:
        text = XML[: XML.index("<parameter=")] + "<parameter=x>\n[1, 2]\n</parameter>\n"
        text += "</function>\n</tool_call>"
    assert follows("pieces", grammar, text)
    assert not follows("pieces", grammar, text.replace("[1, 2]", '"a"'))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("call_format", "xml"),
    [
        (CallFormat.QWEN_XML, XML),
        (
            CallFormat.SEED_XML,
            re.sub(r"(<parameter=\w+>)\n(.*)\n", r"\1\2", XML).replace("tool_", "seed:tool_"),
        ),
    ],
)
def test_required_calls_in_xml(kind: str, call_format: CallFormat, xml: str) -> None:
    grammar = call_grammar(FUNCTIONS, call_format, may_repeat=True)
    plain = re.sub("find.*\n</function", "now>\n</function", xml, flags=re.DOTALL)
    assert follows(kind, grammar, f"{xml}\n{plain}")
    assert not follows(kind, grammar, xml.replace("km", "cm"))
    assert not follows(kind, grammar, xml.replace('{"x": 3}', "3"))
    types = {name: parameter_types(schema) for name, schema in FUNCTIONS}
    found = calls_of(ToolParser(types), f"{xml}\n{plain}")
    assert found == [("find", {**FIND, "place": {"x": 3}}), ("now", {})]


GLM = "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"
MINIMAX = '<parameter name="%s">%s</parameter>\n'
IN_TAGS = {
    CallFormat.GLM_LINES: ("<tool_call>%s\n%s</tool_call>", GLM, "\n"),
    CallFormat.GLM: ("<tool_call>%s%s</tool_call>", GLM.replace("\n", ""), ""),
    CallFormat.MINIMAX: ('<invoke name="%s">\n%s</invoke>', MINIMAX, "\n"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("call_format", IN_TAGS)
def test_required_calls_in_tags(kind: str, call_format: CallFormat) -> None:
    call, parameter, between = IN_TAGS[call_format]
    values = {"q": "a < b\n</x>", "unit": "km", "place": '{"x": 3}'}
    find = call % ("find", "".join(parameter % pair for pair in values.items()))
    text = between.join([find, call % ("now", ""), find])
    if call_format is CallFormat.MINIMAX:
        text = f"<minimax:tool_call>\n{text}\n</minimax:tool_call>"
    grammar = call_grammar(FUNCTIONS, call_format, may_repeat=True)
    assert follows(kind, grammar, text)
    assert not follows(kind, grammar, text.replace("km", "cm"))
    assert not follows(kind, grammar, text.replace('{"x": 3}', "3"))
    types = {name: parameter_types(schema) for name, schema in FUNCTIONS}
    expected = ("find", {**values, "place": {"x": 3}})
    assert calls_of(ToolParser(types), text) == [expected, ("now", {}), expected]
    one = text.replace(between.join(["", call % ("now", ""), find]), "", 1)
    assert calls_of(ToolParser(types), one) == [expected]
    whole, parser = f"I look.\n{text}", ToolParser(types)
    found = [one for letter in whole for one in parser.feed(letter)] + parser.finish()
    assert "".join(one for one in found if isinstance(one, str)) == "I look.\n"
    assert sum(isinstance(one, dict) for one in found) == 3
    for cut in (find[:-3], find.replace("find", "other")):
        parser = ToolParser(types)
        assert "".join(map(str, parser.feed(cut) + parser.finish())) == cut


def gemma(arguments: str, name: str = "find") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_required_calls_of_gemma(kind: str) -> None:
    grammar = call_grammar(FUNCTIONS, CallFormat.GEMMA, may_repeat=True)
    text = gemma('n:null,place:{x:3},q:<|"|>a "b"\n<| {é<|"|>,unit:<|"|>km<|"|>')
    plain = gemma("", "now")
    assert follows(kind, grammar, text + plain)
    assert not follows(kind, grammar, text.replace("km", "cm"))
    assert not follows(kind, grammar, text.replace("x:3", "x:3.5"))
    assert not follows(kind, grammar, text.replace("x:3", "y:3"))
    assert not follows(kind, grammar, text.replace(',unit:<|"|>km<|"|>', ""))
    assert not follows(kind, grammar, gemma("n:1", "now"))
    types = {name: parameter_types(schema) for name, schema in FUNCTIONS}
    arguments = {"n": None, "place": {"x": 3}, "q": 'a "b"\n<| {é', "unit": "km"}
    found = calls_of(ToolParser(types), text + plain)
    assert found == [("find", arguments), ("now", {})]
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    either = calls_or_json(grammar, json.dumps(schema))
    assert follows(kind, either, text)
    assert follows(kind, either, '{"age": 3}')
    assert not follows(kind, either, "I look.")


TREE = {"properties": {"left": {"$ref": "#/$defs/T"}, "v": {"type": "integer"}}, "required": ["v"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 20}, "x:20", "x:21"),
        ({"type": ["number", "null"]}, "x:-1.5", "x:true"),
        ({"type": "boolean"}, "x:true", "x:True"),
        ({"const": {"a": ["é", 1.5, None]}}, 'x:{<|"|>a<|"|>:[<|"|>é<|"|>,1.5,null]}', "x:1"),
        ({"enum": ["🌍", 2]}, 'x:<|"|>🌍<|"|>', "x:3"),
        ({"type": "array", "items": {"type": "string"}}, 'x:[<|"|>a<|"|>,<|"|><|"|>]', "x:[1]"),
        ({"type": "array", "items": {"type": "string"}}, "x:[]", 'x:["a"]'),
        ({"type": "array", "minItems": 1, "maxItems": 2}, "x:[1,{a:[]}]", "x:[1,2,3]"),
        ({"type": "array", "minItems": 1, "items": {"type": "null"}}, "x:[null]", "x:[]"),
        ({"type": "array", "maxItems": 0}, "x:[]", "x:[1]"),
        (
            {"type": "array", "prefixItems": [{"type": "null"}, {}], "maxItems": 2},
            "x:[null,1]",
            "x:[1,1]",
        ),
        ({"type": "array", "prefixItems": [{}, {}], "items": False}, "x:[1,1]", "x:[1,1,1]"),
        ({"anyOf": [{"type": "integer"}, NAMED]}, "x:{x:1}", "x:{y:1}"),
        ({"type": "integer", "oneOf": [{"maximum": 3}, {"minimum": 20}]}, "x:22", "x:12"),
        (
            {"allOf": [NAMED, {"properties": {"y": {"type": "null"}}}]},
            "x:{x:1,y:null}",
            "x:{x:null}",
        ),
        ({"allOf": [{"$ref": "#/$defs/T"}], "title": "T"}, "x:{v:1}", "x:{v:null}"),
        ({"$ref": "#/$defs/T"}, "x:{left:{left:{v:1},v:2},v:3}", "x:{left:{},v:3}"),
        ({"$ref": "#/$defs/absent"}, "x:[{a:1}]", "x:a"),
        ({"type": "object"}, "x:{any key:1}", "x:{:1}"),
        (
            {"type": "object", "additionalProperties": {"type": "null"}},
            "x:{a:null,b:null}",
            "x:{a:1}",
        ),
        (NAMED | {"additionalProperties": True}, "x:{x:1,y:[]}", "x:{x:null}"),
        (NAMED | {"patternProperties": {"^y": {}}}, "x:{y:1}", "x:{x:null}"),
        ({"properties": {"a:b": {}}, "required": ["a:b"]}, 'x:{<|"|>a:b<|"|>:1}', "x:{a:b:1}"),
        ({"properties": {"a": {}, "B": {}, "c": {}}}, "x:{a:1,B:1,c:1}", "x:{B:1,a:1}"),
        ({"properties": {"a": {}, "B": {}, "c": {}}}, "x:{c:1}", "x:{,c:1}"),
        ({"properties": {"a": {}, "B": {}}, "required": ["B"]}, "x:{B:1}", "x:{a:1}"),
        ({"required": ["y"]}, "x:{y:1,z:[]}", "x:a"),
        ({"properties": [], "type": 5, "enum": 5, "required": "x"}, "x:{}", "x:a"),
        (True, 'x:{a:[<|"|>b<|"|>]}', "x:a"),
    ],
)
def test_schemas_in_the_form_of_gemma(schema: Any, right: str, wrong: str) -> None:
    parameters = {"properties": {"x": schema}, "required": ["x"], "$defs": {"T": TREE}}
    grammar = call_grammar([("find", parameters)], CallFormat.GEMMA, may_repeat=False)
    assert follows("tokens", grammar, gemma(right))
    assert not follows("tokens", grammar, gemma(wrong))
    assert calls_of(ToolParser({"find": {}}), gemma(right))


def test_a_deep_schema_in_the_form_of_gemma() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(190):
        schema = {"type": ["array", "null"], "items": schema}
    parameters = {"properties": {"x": schema}}
    grammar = call_grammar([("find", parameters)], CallFormat.GEMMA, may_repeat=False)
    assert follows("tokens", grammar, gemma("x:[[[null]]]"))
    assert not follows("tokens", grammar, gemma("x:[[[1]]]"))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("call_format", TEXTS)
def test_calls_or_json(kind: str, call_format: CallFormat) -> None:
    """As with a response format and tools that need not be called."""
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    calls = call_grammar(FUNCTIONS, call_format, may_repeat=True)
    grammar = calls_or_json(calls, json.dumps(schema))
    text = TEXTS[call_format] % json.dumps(FIND)
    assert follows(kind, grammar, text)
    assert follows(kind, grammar, '{"age": 3}')
    assert not follows(kind, grammar, '{"age": "x"}')
    assert not follows(kind, grammar, "I look.")
    assert not follows(kind, grammar, text.replace("find", "other"))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize(
    ("guide_kind", "guide", "right", "wrong"),
    [
        ("json_schema", '{"type": "integer"}', "12", "x"),
        ("choice", '["yes", "no"]', "yes", "nope"),
        ("regex", "[a-c]/[d-f]", "a/d", "a/a"),
        ("tools", call_grammar(FUNCTIONS, CallFormat.LLAMA, False), "", ""),
    ],
)
def test_a_thought_ends(
    kind: str, is_inside: bool, guide_kind: str, guide: str, right: str, wrong: str
) -> None:
    """By its token, or written in pieces. What follows is guided."""
    is_tools = guide_kind == "tools"
    if is_tools:
        right, wrong = (TEXTS[CallFormat.LLAMA] % json.dumps(FIND), "no call")
    end_is_token = kind != "pieces"
    lark_kind, lark = behind_reasoning(
        "ebnf_grammar" if is_tools else guide_kind,
        guide,
        "tools" if is_tools else "response_format",
        Start(THINK, "inside" if is_inside else "before"),
        end_is_token,
    )
    assert lark_kind == "ebnf_grammar"
    begin = "" if is_inside else "<think>"
    assert follows(kind, lark, f"{begin}if a < b </think>\n\n{right}")
    assert not follows(kind, lark, f"{begin}if a < b </think>\n\n{wrong}")
    if not is_inside:
        assert follows(kind, lark, right)
    found = matcher(kind, lark)
    encode = TOKENIZERS[kind].encode
    parts = [*([begin] if begin else []), "hm ", "</", "think", ">", right]
    tokens = [token for part in parts for token in encode(part, add_special_tokens=False).ids]
    assert found.consume_tokens(tokens)
    assert found.is_accepting()


def test_a_thought_of_gemma_ends() -> None:
    calls = call_grammar(FUNCTIONS, CallFormat.GEMMA, may_repeat=False)
    call = gemma("", "now")
    for place, begin in (("before", "<|channel>thought"), ("inside", "")):
        start = Start(CHANNEL, cast(Place, place))
        for kind in TOKENIZERS:
            _, lark = behind_reasoning("ebnf_grammar", calls, "tools", start, kind != "pieces")
            assert follows(kind, lark, f"{begin}\nI call it.\n<channel|>{call}")
            assert follows(kind, lark, call) is (place == "before")
            assert not follows(kind, lark, f"{begin}\nI call it.\n<channel|>no")


@pytest.mark.parametrize("pattern", ["a(?=b)", r"/\d(?!/)", "(?<=a)b", "(?<!a)b"])
def test_look_around_behind_a_thought_is_named(pattern: str) -> None:
    """As in a grammar that begins the answer."""
    _, lark = behind_reasoning("regex", pattern, "structured_outputs", Start(THINK, "before"), True)
    for kind, guide in ((GuideType.REGEX, pattern), (GuideType.EBNF_GRAMMAR, lark)):
        with pytest.raises(GrammarError) as raised:
            grammar_text(kind, guide, AddedTokens(TOKENIZERS["tokens"].to_str()))
        assert (
            str(raised.value) == f"got {pattern!r}, must have no look-around: it is not supported"
        )
