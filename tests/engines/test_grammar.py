"""States of grammars: long forced texts cost no more than short ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from smartspec_py.core.types import GuideType
from smartspec_py.engines.structured.grammar import FORCED_BYTES, GrammarState
from smartspec_py.engines.structured.guides import compiled, grammar_text
from smartspec_py.engines.structured.token_names import AddedTokens
from smartspec_py.engines.structured.trial import new_tokenizer

FILE = Path(__file__).parents[2] / "engines_build/tiny/target/tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(FILE))
END = 0
ADDED = AddedTokens(TOKENIZER.to_str())
LIBRARY = new_tokenizer(ADDED, TOKENIZER.get_vocab_size(), [END])
LONG = "The price of 1,234 green apples is, as in 1999, 55.70 euros.  " * 20
"""Without characters that JSON may escape, which would not be forced."""

GREETING = "Grüße an alle!\n" * 60
PARTS = {f"name{n}": LONG[n : n + 300] for n in range(5)}
SCHEMA = {
    "type": "object",
    "properties": {name: {"const": text} for name, text in PARTS.items()},
    "required": list(PARTS),
    "additionalProperties": False,
}
TEXTS = [f"{name}: {LONG}" for name in ("yes", "no")]
GUIDES: list[tuple[GuideType, str, Callable[[str], bool]]] = [
    (GuideType.CHOICE, json.dumps([GREETING]), lambda text: text == GREETING),
    (GuideType.CHOICE, json.dumps(TEXTS), lambda text: text in TEXTS),
    (GuideType.JSON_SCHEMA, json.dumps({"const": LONG}), lambda text: json.loads(text) == LONG),
    (GuideType.JSON_SCHEMA, json.dumps(SCHEMA), lambda text: json.loads(text) == PARTS),
    (GuideType.REGEX, "[xy]" + "abc" * 500, lambda text: text[1:] == "abc" * 500),
    (GuideType.CHOICE, json.dumps([" " * 900]), lambda text: text == " " * 900),
]


class Spy:
    """A matcher, or a tokenizer, that notes how many bytes are tokenized or parsed again."""

    def __init__(self, wrapped: LLMatcher | LLTokenizer, sizes: list[int]) -> None:
        self._wrapped, self._sizes = wrapped, sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def tokenize_partial(self, text: bytes, last: list[int]) -> Any:
        self._sizes.append(len(text))
        return self._wrapped.tokenize_partial(text, last)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self._sizes.append(len(self._wrapped.compute_ff_bytes()))  # lost in the rollback
        return self._wrapped.try_consume_tokens(tokens)

    def compute_bitmask(self) -> bytes:
        self._sizes.append(len(self._wrapped.compute_ff_bytes()))
        return self._wrapped.compute_bitmask()

    def compute_ff_tokens(self) -> list[int]:
        self._sizes.append(len(self._wrapped.compute_ff_bytes()))
        return self._wrapped.compute_ff_tokens()


@pytest.mark.parametrize(("kind", "guide", "is_right"), GUIDES)
def test_long_forced_texts_are_tokenized_in_parts(
    kind: GuideType, guide: str, is_right: Callable[[str], bool]
) -> None:
    """A text is followed to its end. All masks and looks at forced tokens, also behind drafts,
    tokenize a small part, and the forced token is the only one that is allowed."""
    matcher = compiled(LIBRARY, grammar_text(kind, guide, ADDED))
    sizes: list[int] = []
    spies = Spy(matcher, sizes), Spy(LIBRARY, sizes)
    state = GrammarState(*spies, [END], 0)  # type: ignore[arg-type]
    tokens: list[int] = []
    num_forced = 0
    for _ in range(2000):
        forced = state.forced(tokens)
        mask = state.forbidden(tokens, (), [END])
        assert mask is not None, state.error
        allowed = (~mask).nonzero()[0].tolist()
        if allowed == [END]:
            break
        if forced:
            assert allowed == [forced[0]]
            num_forced += 1
            drafts = forced[:3]
            assert state.num_allowed(tokens, drafts) == len(drafts)
            behind = [state.forbidden(tokens, drafts[:n], [END]) for n in (1, 2)]
        tokens.append(next(token for token in allowed if token != END))
        if forced:
            assert np.array_equal(behind[0], state.forbidden(tokens, (), [END]))
            if len(forced) > 1:
                assert np.array_equal(behind[1], state.forbidden(tokens, forced[1:2], [END]))
    assert allowed == [END]
    assert max(sizes) <= 2 * FORCED_BYTES
    assert num_forced > 50
    assert is_right(LIBRARY.decode_bytes(tokens).decode())


def test_a_model_with_two_end_tokens() -> None:
    """Both are allowed where the text may end, and nowhere else."""
    ends = (END, 1)
    library = new_tokenizer(ADDED, TOKENIZER.get_vocab_size(), ends)
    matcher = compiled(library, grammar_text(GuideType.CHOICE, '["ab"]', ADDED))
    state, tokens = GrammarState(matcher, library, ends, 1), [7]
    first = state.forbidden(tokens, (), ends)
    assert first is not None, state.error
    assert first[list(ends)].all()
    tokens += TOKENIZER.encode("ab", add_special_tokens=False).ids
    last = state.forbidden(tokens, (), ends)
    assert last is not None
    assert (~last).nonzero()[0].tolist() == list(ends)
