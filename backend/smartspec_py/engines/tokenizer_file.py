"""Reads the tokenizer of a model, for the server and for the gateway."""

from __future__ import annotations

import json
import math
from collections.abc import Container
from pathlib import Path

from tokenizers import Tokenizer

GEMMA_MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
SPECIAL_MARKS = (
    *GEMMA_MARKS,
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
    *("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
    *("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
)
"""What Gemma 4, Mistral, Seed-OSS, Apertus, LFM2, Kimi and the models of Cohere and DeepSeek write
calls and thoughts with. Their tokenizers say that most of these are special."""

MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<minimax:tool_call>", "</minimax:tool_call>"),
    *SPECIAL_MARKS,
)
"""Text for all readers of answers, also where a tokenizer says that they are special."""

HARMONY_MARKS = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    *("<|constrain|>", "<|return|>", "<|call|>"),
)
"""What gpt-oss writes messages with. Other models have some of these names for other things."""

OF_IMAGES = ("<image_soft_token>",)
"""Tokens that stand for a part of an image, which cannot be read."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model directory, changed where its file does not fit what is served:

    - There is no truncation or padding, which some files enable for training.
    - MARKS are not special, so that texts contain them, nor those of `harmony_marks`.
    - OF_IMAGES are left out, which of Gemma 3 only the larger models have, and so are added tokens
      that the model has no row for. A prompt with such a name is read letter by letter.

    Raises what the library raises, which has no type of its own.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    num_rows, added = _num_rows(folder), tokenizer.get_added_tokens_decoder()
    marks = {*MARKS, *harmony_marks({one.content for one in added.values()})}
    absent = {n for n, one in added.items() if n >= num_rows or one.content in OF_IMAGES}
    if not absent and not any(one.special and one.content in marks for one in added.values()):
        return tokenizer
    document = json.loads(tokenizer.to_str())
    kept = [one for one in document["added_tokens"] if one["id"] not in absent]
    for one in kept:
        one["special"] = one["special"] and one["content"] not in marks
    vocab = document["model"]["vocab"]
    if isinstance(vocab, dict):  # a list has no added tokens
        document["model"]["vocab"] = {s: n for s, n in vocab.items() if n not in absent}
    return Tokenizer.from_str(json.dumps(document | {"added_tokens": kept}))


def harmony_marks(added: Container[str]) -> tuple[str, ...]:
    """HARMONY_MARKS if these added tokens are those of gpt-oss, else none: texts of Phi end with
    `<|end|>`."""
    return HARMONY_MARKS if "<|channel|>" in added and "<|message|>" in added else ()


def num_token_ids(tokenizer: Tokenizer) -> int:
    """The highest id plus one. Ids may have gaps, so the number of entries may be lower."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _num_rows(folder: Path) -> float:
    """Of the model's embedding; infinite if its configuration does not tell."""
    try:
        document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size = document.get("vocab_size", document.get("text_config", {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError):
        return math.inf
    return size if isinstance(size, int) else math.inf
