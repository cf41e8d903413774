"""Marks such as `<tool_call>` that a tokenizer has as single tokens, in grammars of every form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
from tokenizers.models import BPE
from tokenizers.normalizers import Replace as Replaced

from smartspec_py.constants import JSON_STYLE
from smartspec_py.core.types import GuideType
from smartspec_py.engines.structured.guides import GrammarError, compiled, grammar_text
from smartspec_py.engines.structured.token_names import AddedTokens
from smartspec_py.engines.structured.trial import new_tokenizer

FILE = Path(__file__).parents[2] / "engines_build/tiny/target/tokenizer.json"
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[CALL]"]
END = "<|end|>"


def byte_level() -> Tokenizer:
    """As that of Qwen: the marks are added, and no special tokens."""
    found = Tokenizer.from_file(str(FILE))
    found.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    found.add_special_tokens([END])
    return found


def byte_fallback() -> Tokenizer:
    """As that of Llama 2: characters, bytes, and an unknown token; the marks are in its
    vocabulary, too."""
    letters = sorted(set('\n"{}[]:, abcdefghijklmnopqrstuvwxyz_1▁'))
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *MARKS]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    found = Tokenizer(model)
    found.normalizer = Replaced(" ", "▁")
    found.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse()])
    found.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    found.add_special_tokens(["<unk>", END])
    return found


KINDS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
CALL = '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
IN_JSON = f"%json {json.dumps({'type': 'object', 'x-guidance': JSON_STYLE})}"
THOUGHT = r"""
start: (<think> thought)? "yes"
thought: TEXT "</think>"
TEXT: /(?s:.*)/
"""

GRAMMARS: list[tuple[str, str, str]] = [
    # The grammar, a text that follows it, and one that does not.
    (rf'start: "<tool_call>\n" {IN_JSON} "\n</tool_call>"', CALL, CALL.replace("\n<", "<")),
    ('start: "say <tool_call>, " "or </think>"', "say <tool_call>, or </think>", "say </think>"),
    ('root ::= "<think>" [a-z]+ "</think>"', "<think>abc</think>", "<think></think>"),
    ('start: "[CALL]" "a"', "[CALL]a", "[CALL]b"),
    (THOUGHT, "<think>a thought </think>yes", "<think>a thought </think>no"),
    (THOUGHT, "yes", "no"),
    (r'start: "a" // "<think>' + "\n" + r'b: "<think>"', "a", "b"),
    ('start: "<tool"', "<tool", "<tools"),
    ('start: a\na[suffix="</think>"]: /[a-z]*/', "abc</think>", "abc</tool_call>"),
]


def follow(kind: str, guide_type: GuideType, guide: str, pieces: list[list[int]]) -> bool:
    """Whether the tokens are a whole text of the grammar. Each of them must be in its mask."""
    tokenizer = KINDS[kind]
    added, end = AddedTokens(tokenizer.to_str()), tokenizer.token_to_id(END)
    library = new_tokenizer(added, tokenizer.get_vocab_size(), [end])
    matcher = compiled(library, grammar_text(guide_type, guide, added))
    tokens = [token for piece in pieces for token in piece]
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    for token in tokens:
        forced = matcher.compute_ff_tokens()
        assert not forced or matcher.validate_tokens(forced) == len(forced)
        mask = matcher.compute_bitmask()
        is_in_mask = mask[token // 8] >> token % 8 & 1
        assert is_in_mask or forced, f"{tokenizer.id_to_token(token)} is valid and not in the mask"
        assert matcher.consume_tokens([token]), matcher.get_error()
    return matcher.is_accepting()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("guide", "right", "wrong"), GRAMMARS, ids=lambda text: text[:30])
def test_texts_as_models_write_them(kind: str, guide: str, right: str, wrong: str) -> None:
    """Each mark is one token of the text."""
    tokens = [KINDS[kind].encode(text, add_special_tokens=False).ids for text in (right, wrong)]
    if "suffix" in guide:  # attributes are about bytes
        name = KINDS[kind].encode("think>", add_special_tokens=False).ids
        slash = KINDS[kind].encode("</", add_special_tokens=False).ids
        word = KINDS[kind].encode("abc", add_special_tokens=False).ids
        assert follow(kind, GuideType.EBNF_GRAMMAR, guide, [word, slash, name])
        return
    assert follow(kind, GuideType.EBNF_GRAMMAR, guide, [tokens[0]])
    assert not follow(kind, GuideType.EBNF_GRAMMAR, guide, [tokens[1]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("guide_type", "guide", "text"),
    [
        (GuideType.JSON_SCHEMA, '{"const": "a <think> b"}', '"a <think> b"'),
        (GuideType.CHOICE, '["<tool_call>", "b"]', "<tool_call>"),
        (GuideType.REGEX, "<think>[a-z]", "<think>a"),
        (GuideType.JSON_SCHEMA, '{"const": "<|end|>"}', '"<|end|>"'),
    ],
)
def test_marks_in_other_guides_are_text(
    kind: str, guide_type: GuideType, guide: str, text: str
) -> None:
    """They are written in pieces. Forced tokens are valid: the text can always be finished."""
    letters = [KINDS[kind].encode(letter, add_special_tokens=False).ids for letter in text]
    if kind == "byte level":
        assert follow(kind, guide_type, guide, letters)
    assert not follow(kind, guide_type, guide, letters[:-1])


def test_a_mark_in_a_terminal_is_refused() -> None:
    added = AddedTokens(KINDS["byte level"].to_str())
    with pytest.raises(ValueError, match="'<think>' in the terminal TEXT is one token"):
        grammar_text(GuideType.EBNF_GRAMMAR, 'start: TEXT\nTEXT: "<think>" /a/', added)
    assert issubclass(GrammarError, ValueError)


def test_a_tokenizer_without_added_tokens() -> None:
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1}, []))
    added = AddedTokens(tokenizer.to_str())
    lark = 'start: "<think>" <b>'
    assert added.in_lark(lark) == lark
    assert json.loads(added.hidden_json) == json.loads(tokenizer.to_str())
