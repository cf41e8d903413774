"""Texts with a grammar: valid at every end, and the same with every policy and proposer."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.core.types import FinishReason, GuideType, Verification
from smartspec_py.engines.structured.guides import _check_multiples
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.request import ErrorCode, RequestError
from smartspec_py.serving.server import Server
from smartspec_testing.local import LocalSink, generate, serving

pytestmark = pytest.mark.slow  # so that they run beside the others

PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "number": {"type": "integer", "minimum": 0, "maximum": 9999},
        "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["customer_name", "number", "colours"],
    "additionalProperties": False,
}
GUIDES = [
    (GuideType.JSON_SCHEMA, json.dumps(SCHEMA)),
    (GuideType.REGEX, "(yes|no), because [a-z ]{3,20}\\."),
    (GuideType.CHOICE, '["the first", "the second one", "grün \\u007f"]'),
    (GuideType.EBNF_GRAMMAR, 'root ::= "sum " [0-9]+ (" + " [0-9]+){1,2}'),
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    {"min_tokens": 60, "bad_words": ("red", "the"), "temperature": 1.2, "top_k": 50},
]
REQUESTS = [
    {"text": f"Question {n}: what is it?", "seed": n + 1, "guide_type": kind, "guide": guide, **one}
    for n, one in enumerate(SAMPLINGS)
    for kind, guide in GUIDES
]


def config_of(engine: dict[str, Any] | None = None, **limits: Any) -> ServerConfig:
    drafts = engine or {"draft": str(PAIR / "draft")}
    engine = {"kind": "local", "model": str(PAIR / "target"), **drafts}
    few = {"max_sequences": 4, "max_draft_len": 6, "max_context_len": 256, "profile_s": 0.0}
    document = {"engine": {**engine, "num_threads": 1, "device": "cpu"}, "limits": few | limits}
    return ServerConfig.model_validate(document)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = config_of()
    with serving(build_engine(config, PAIR), config) as found:
        yield found


def answers(server: Server, max_tokens: int = 80, **fields: Any) -> list[LocalSink]:
    found = generate(
        server, [GenerateParams(**one, max_tokens=max_tokens, **fields) for one in REQUESTS]
    )
    assert [(sink.error, sink.num_acceptances) for sink in found] == [(None, 1)] * len(found)
    return found


@pytest.fixture(scope="module")
def expected(server: Server) -> list[LocalSink]:
    """The texts without speculation."""
    return answers(server, policy="none")


def is_valid(guide: tuple[GuideType, str], text: str) -> bool:
    """By means that do not use the library."""
    if guide == GUIDES[0]:
        value = json.loads(text)
        assert list(value) == SCHEMA["required"]
        assert text == json.dumps(value, ensure_ascii=False) or "\\" in text
        return (
            len(value["customer_name"]) <= 12
            and 0 <= value["number"] <= 9999
            and set(value["colours"]) <= {"red", "blue"}
            and len(value["colours"]) <= 2
        )
    if guide == GUIDES[2]:
        return text in json.loads(guide[1])
    pattern = guide[1] if guide == GUIDES[1] else "sum [0-9]+( \\+ [0-9]+){1,2}"
    return re.fullmatch(pattern, text) is not None


def check_valid(sinks: list[LocalSink]) -> None:
    for sink, request in zip(sinks, REQUESTS, strict=True):
        if sink.finish_reason is FinishReason.STOP:
            guide = request["guide_type"], request["guide"]
            assert is_valid(guide, sink.text), (request, sink.text)
    ends = [sink.finish_reason for sink in sinks]
    assert ends.count(FinishReason.STOP) > len(ends) // 2


def test_texts_are_valid_and_the_same_with_every_policy(
    server: Server, expected: list[LocalSink]
) -> None:
    check_valid(expected)
    ways = [
        *(("fixed:6", "draft_model"), ("fixed:6", "grammar"), ("goodput", None)),
    ]
    for policy, proposer in ways:
        found = answers(server, policy=policy, proposer=proposer)
        assert [sink.tokens for sink in found] == [sink.tokens for sink in expected]
        assert [sink.text for sink in found] == [sink.text for sink in expected]
    num_accepted = sum(sink.progress.num_accepted for sink in found)
    assert num_accepted, "no draft was accepted"


def test_texts_by_rejection_are_valid(server: Server) -> None:
    for proposer in ("draft_model", "grammar"):
        check_valid(
            answers(
                server, policy="fixed:4", proposer=proposer, verification=Verification.REJECTION
            )
        )


def test_forced_tokens_are_drafted_without_a_pass(server: Server) -> None:
    """The names of a schema are known."""
    request = REQUESTS[0]
    (alone,) = generate(server, [GenerateParams(**request, max_tokens=120, policy="none")])
    params = GenerateParams(**request, max_tokens=120, policy="fixed:6", proposer="grammar")
    (forced,) = generate(server, [params])
    assert forced.tokens == alone.tokens
    assert forced.progress.num_accepted > 10
    assert forced.progress.num_steps + forced.progress.num_accepted >= len(alone.tokens)


def test_drafts_of_heads_do_not_leave_the_grammar() -> None:
    heads = {"heads": str(PAIR / "heads"), "runtime": "torch", "dtype": "float32"}
    config = config_of(heads)
    with serving(build_engine(config, PAIR), config) as server:
        expected = answers(server, policy="none")
        found = answers(server, policy="fixed:7", proposer="heads")
    check_valid(expected)
    assert [sink.tokens for sink in found] == [sink.tokens for sink in expected]
    assert sum(sink.progress.num_accepted for sink in found)


def test_a_preempted_text_continues_its_grammar(expected: list[LocalSink]) -> None:
    config = config_of(max_context_len=128, max_cache_tokens=128)
    tight = Server(build_engine(config, PAIR), config)
    tight.start()
    found = answers(tight, policy="goodput")
    num_preemptions = tight.loop.lifecycle.num_preemptions
    tight.stop()
    assert num_preemptions
    assert [sink.tokens for sink in found] == [sink.tokens for sink in expected]


def test_a_text_that_is_cut_says_so(server: Server) -> None:
    (cut,) = generate(server, [GenerateParams(**REQUESTS[0], max_tokens=2, policy="fixed:3")])
    assert cut.finish_reason is FinishReason.LENGTH
    assert cut.num_tokens == 2


LOOP = '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'
HUGE_MULTIPLE = r"""start: A %json {"allOf": [{"multiple\u004ff": 99.73}, {"multipleOf": 9967e3}]}
A: "%json" """
LENIENT = '{"format": "x", "x-guidance": {"lenient": true}, "type": "string"}'


@pytest.mark.parametrize(
    ("changed", "field", "part"),
    [
        ({"guide": '{"type": "strin"}'}, "guided_decoding_guide", "Invalid type: strin"),
        ({"guide": "{"}, "guided_decoding_guide", "a grammar that works"),
        ({"guide": ""}, "guided_decoding_guide", "given if"),
        ({"guide_type": None}, "guided_decoding_guide", "left out without"),
        ({"guide_type": GuideType.JSON}, "guided_decoding_guide", "left out if"),
        ({"guide_type": GuideType.REGEX, "guide": "(a"}, "guided_decoding_guide", "unclosed group"),
        ({"guide_type": GuideType.CHOICE, "guide": "[]"}, "guided_decoding_guide", "list of texts"),
        ({"guide": json.dumps({"$ref": "http://x.org/"})}, "guided_decoding_guide", "not fetch"),
        ({"guide": '{"$ref": "#"}'}, "guided_decoding_guide", "a grammar that works"),
        (
            {"guide": LOOP},
            "guided_decoding_guide",
            "the grammar cannot be followed (NoExtensionBias)",
        ),
        ({"guide": LENIENT}, "guided_decoding_guide", "Unknown format: x"),
        ({"guide_type": GuideType.REGEX, "guide": "[^\\s\\S]"}, "guided_decoding_guide", "works"),
        (
            {"guide_type": GuideType.REGEX, "guide": "(" + "a" * 20_000},
            "guided_decoding_guide",
            "..",
        ),
        (
            {"guide_type": GuideType.EBNF_GRAMMAR, "guide": 'start: a\na[stop="x"]: /[^x]*/'},
            "guided_decoding_guide",
            "rules with stop are not supported",
        ),
        (
            {
                "guide": json.dumps(
                    {"properties": {"a": {"items": [{"pattern": r"\(?=[(?!](?!x)"}]}}}
                )
            },
            "guided_decoding_guide",
            r"properties.a.items.0.pattern: got '\\(?=[(?!](?!x)', must have no look-around: it is",
        ),
        (
            {"guide": json.dumps({"patternProperties": {"^(?<=a)b": {}}})},
            "guided_decoding_guide",
            "patternProperties: got '^(?<=a)b', must have no look-around",
        ),
        (
            {
                "guide_type": GuideType.EBNF_GRAMMAR,
                "guide": 'start: "a" %json {"pattern": "(?=a)b"}',
            },
            "guided_decoding_guide",
            "works: pattern: got '(?=a)b', must have no look-around: it is not supported",
        ),
        (
            {"guide_type": GuideType.REGEX, "guide": "a(?=b)"},
            "guided_decoding_guide",
            "works: got 'a(?=b)', must have no look-around: it is not supported",
        ),
        (
            # "(?=" in a text and in JSON is no look-around.
            {
                "guide_type": GuideType.EBNF_GRAMMAR,
                "guide": 'start: "/(?=/" %json {"const": "/(?=/"} A\n// /(?=/\nA: /a\\/(?!b)\\d/i',
            },
            "guided_decoding_guide",
            r"works: got 'a/(?!b)\\d', must have no look-around: it is not supported",
        ),
        ({"guide": '{"multipleOf": 123456789}'}, "guided_decoding_guide", "multipleOf"),
        (
            {"guide_type": GuideType.EBNF_GRAMMAR, "guide": HUGE_MULTIPLE},
            "guided_decoding_guide",
            "must be at most 10000",
        ),
        ({"ignore_eos": True}, "ignore_eos", "left out with"),
        ({"end_id": -1}, "end_id", "left out with"),
        ({"guide_type": None, "guide": "", "proposer": "grammar"}, "proposer", "draft_model or"),
    ],
)
def test_a_wrong_grammar_is_refused(
    server: Server, changed: dict[str, Any], field: str, part: str
) -> None:
    given = {"text": "x", "max_tokens": 9, "guide_type": GuideType.JSON_SCHEMA, "guide": "{}"}
    message = refusal(server, GenerateParams(**given | changed))
    assert message.startswith(f"{field}: ")
    assert part in message
    assert len(message) < 1000
    assert refusal(server, GenerateParams(**given | changed)) == message


def refusal(server: Server, params: GenerateParams) -> str:
    """Why this request is refused, before it is accepted or after its grammar was compiled."""
    try:
        (sink,) = generate(server, [params])
    except RequestError as error:
        code, message = error.code, str(error)
    else:
        assert sink.error is not None
        assert not sink.num_acceptances, "the client would have the headers of a stream"
        code, message = sink.error
    assert code is ErrorCode.INVALID_ARGUMENT
    return message


HOSTILE = [
    (GuideType.REGEX, "(a{1,500}b{1,500}){1,500}"),
    (GuideType.REGEX, "(a|b|ab)*c" * 200),
    (GuideType.JSON_SCHEMA, json.dumps({"enum": [f"{n}" * 20 for n in range(2000)]})),
    (GuideType.JSON_SCHEMA, json.dumps({"type": "array", "minItems": 100_000})),
    (GuideType.JSON_SCHEMA, '{"items": ' * 500 + "{}" + "}" * 500),
    (GuideType.EBNF_GRAMMAR, "start: a a a a a\na: b b b b b b\nb: a | b |"),
    (GuideType.EBNF_GRAMMAR, "root ::= root"),
    (GuideType.EBNF_GRAMMAR, "\n" * 60_000 + 'root ::= "a"'),
    (GuideType.EBNF_GRAMMAR, " \n" * 30_000 + "a" + " " * 5_000),
    (GuideType.JSON_SCHEMA, json.dumps({"pattern": "(?=a)b", "type": "string"})),
]


@pytest.mark.parametrize(
    "multiple", ["0.01", "1e-9", "1000", "0.125", "9999", "1e300", "3" + "0" * 399, "true", '"7"']
)
def test_ordinary_multiples_are_accepted(multiple: str) -> None:
    _check_multiples(f'{{"type": "number", "multipleOf": {multiple}}}', 0)


def test_hostile_grammars_harm_nobody(server: Server) -> None:
    """Each is refused or served. Errors go to their sinks, because grammars compile in another
    thread."""
    other = GenerateParams("Hello", 100, ignore_eos=True, seed=3)
    (expected,) = generate(server, [other])
    hostile = [
        GenerateParams("x", 20, guide_type=kind, guide=guide, temperature=1.0)
        for kind, guide in HOSTILE
    ]
    start = time.monotonic()
    *found, same = generate(server, [*hostile, other])
    assert time.monotonic() - start < 60.0
    assert same.tokens == expected.tokens
    for sink in found:
        assert sink.finish_reason or "guided_decoding_guide: " in str(sink.error), sink.error


@pytest.mark.parametrize("policy", ["none", "fixed:4"])
def test_a_grammar_that_leaves_no_token_fails_its_request_alone(
    server: Server, policy: str
) -> None:
    """The grammar needs a token that ends the text. So the text could only be cut or invalid, and
    its end would look like a good one."""
    encode = server.intake._engine.tokenizer.encode
    (letter,), (quote,) = (encode(text, add_special_tokens=False).ids for text in ("a", '"'))
    schema = '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}'
    hopeless = [
        {"guide_type": GuideType.REGEX, "guide": "a{9}", "stop_token_ids": (letter,)},
        {"guide_type": GuideType.JSON_SCHEMA, "guide": schema, "stop_token_ids": (quote,)},
    ]
    params = [GenerateParams("x", 20, policy=policy, **one) for one in [*hopeless, {}]]
    *failed, other = generate(server, params)
    assert other.error is None
    for sink in failed:
        assert sink.error is not None, sink.text
        code, message = sink.error
        assert code is ErrorCode.INVALID_ARGUMENT
        assert message.startswith("guided_decoding_guide: allows no token at this place")
