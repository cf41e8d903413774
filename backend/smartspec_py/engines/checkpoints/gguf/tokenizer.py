"""The tokenizer of a GGUF file, as the tokenizer.json of its original has it.

Three kinds are read: byte-level BPE, named gpt2 in the file, BPE of SentencePiece, named llama, and
that of Gemma 4, whose merges are in the file.
Where the file says nothing, such as whether Llama 3 begins texts with a start token, the rules of
llama.cpp (src/llama-vocab.cpp) are followed.
"""

from __future__ import annotations

import math
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from smartspec_py.engines.checkpoints.gguf.fields import Fields
from smartspec_py.faults import ConfigError, cut, shown

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
"""Kinds of tokens. A tokenizer.json has no unused ones, which pad the vocabulary."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_MARKS = _QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(
        ("llama-bpe", "llama-v3", "llama3", "falcon3", "lfm2", "smaug-bpe", "dbrx"), (_LLAMA3,)
    ),
    "gpt-4o": (_GPT4O,),
    "tekken": (_GPT4O.replace(_ENDING, "").replace("{1,3}", ""),),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN,)),
    "qwen35": (_QWEN_MARKS,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        r"\p{N}",
    ),
}
"""How a text is split before tokens are merged, by `tokenizer.ggml.pre`: by one rule after the
other."""

WHOLE_WORDS = ("llama-bpe", "llama-v3", "llama3", "falcon3", "lfm2", "tekken")
"""A word that is a token is not merged from its parts. Texts begin with the start token."""

END_NAMES = {
    "llama": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "qwen2": ("<|endoftext|>",),
    "qwen3": ("<|endoftext|>",),
    "qwen3moe": ("<|endoftext|>",),
    "qwen35": ("<|endoftext|>",),
    "qwen35moe": ("<|endoftext|>",),
    "gemma2": ("<end_of_turn>",),
    "gemma3": ("<end_of_turn>",),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
    "gpt-oss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    **dict.fromkeys(("granite", "granitehybrid", "granitemoe"), ()),
    "lfm2": (),
    "lfm2moe": (),
    "mistral3": (),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "smollm3": ("<|end_of_text|>",),
}
"""A file names one end token, and the originals of these architectures have several."""

KEPT_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""With the tokenizer of Phi 3, all other special tokens take the space after them."""

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Tokens by their names in tokenizer_config.json and in the file."""


class Vocabulary:
    """The tokens and their kinds by id, and the ids of all tokens but unused ones. Raises
    ConfigError."""

    def __init__(self, fields: Fields) -> None:
        self.tokens = fields.texts("tokenizer.ggml.tokens")
        key = "tokenizer.ggml.token_type"
        self.kinds: list[int] = fields.numbers(key, len(self.tokens), UNDEFINED, BYTE)
        used = [n for n, kind in enumerate(self.kinds) if kind != UNUSED]
        self.ids = {self.tokens[number]: number for number in used}
        if len(self.ids) != len(used):
            twice = next(n for n in used if self.ids[self.tokens[n]] != n)
            raise ConfigError(
                f"{fields.file} has the token {shown(self.tokens[twice])} twice: convert the "
                "model again"
            )

    def special(self, fields: Fields, name: str, default: int | None = None) -> int | None:
        """The id of a special token; the default if the file does not state it."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in fields.values:
            return default
        return fields.integer(key, least=0, most=len(self.tokens) - 1)


def make_tokenizer(fields: Fields, vocabulary: Vocabulary) -> str:
    """The content of tokenizer.json. Raises ConfigError."""
    kind = fields.text("tokenizer.ggml.model")
    has_start = True
    if kind == "gpt2":
        tokenizer, has_start = _byte_level(fields, vocabulary)
    elif kind == "llama":
        tokenizer, has_start = (
            _sentence_piece(fields, vocabulary, _ranked(fields, vocabulary)),
            True,
        )
    elif kind == "gemma4":
        tokenizer, has_start = (
            _sentence_piece(fields, vocabulary, _merges(fields, vocabulary)),
            True,
        )
    else:
        raise ConfigError(
            f"{fields.file} has a tokenizer of the kind {cut(kind)}: only gpt2, llama and gemma4 "
            "are read"
        )
    tokens = vocabulary.tokens
    strips = kind == "llama" and fields.text("general.architecture") == "phi3"
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                special=kind != USER_DEFINED,
                rstrip=strips and token not in KEPT_SPACE,
            )
            for token, kind in zip(tokens, vocabulary.kinds, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    is_added = {
        "bos": fields.flag("tokenizer.ggml.add_bos_token", has_start),
        "eos": fields.flag("tokenizer.ggml.add_eos_token", False),
    }
    ids = {
        name: fields.integer(f"tokenizer.ggml.{name}_token_id", least=0, most=len(tokens) - 1)
        for name in is_added
        if is_added[name]
    }
    if ids:
        first, last = ([tokens[ids[name]]] if name in ids else [] for name in is_added)
        tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(tokens[number], number) for number in ids.values()],
        )
    text: str = tokenizer.to_str()
    return text


def _byte_level(fields: Fields, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether texts begin with a start token if the file does not say it."""
    name = fields.text("tokenizer.ggml.pre")
    if name not in SPLITS:
        raise ConfigError(
            f"{fields.file} has the pre-tokenizer {cut(name)}, which cannot be read: use one of "
            f"{', '.join(SPLITS)}"
        )
    merges = _merges(fields, vocabulary)
    model = BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=name in WHOLE_WORDS)
    tokenizer = Tokenizer(model)
    if name in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in SPLITS[name]]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in WHOLE_WORDS


def _merges(fields: Fields, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Those of the file, the first one first."""
    merges = []
    for merge in fields.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.ids.keys():
            raise ConfigError(
                f"{fields.file} has the merge {shown(merge)} of tokens that it has not: "
                "convert the model again"
            )
        merges.append((left, right))
    return merges


def _ranked(fields: Fields, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece merges the two neighbours whose union has the highest score."""
    tokens, ids, kinds = vocabulary.tokens, vocabulary.ids, vocabulary.kinds
    scores = fields.numbers("tokenizer.ggml.scores", len(tokens), -math.inf)
    # The order of equal scores is that of the originals, which Transformers made.
    ranks = sorted(
        (-scores[number], number, ids[token[:cut]], ids[token[cut:]])
        for token, number in ids.items()
        for cut in range(1, len(token))
        if kinds[number] == NORMAL and token[:cut] in ids and token[cut:] in ids
    )
    return [(tokens[left], tokens[right]) for *_, left, right in ranks]


def _sentence_piece(
    fields: Fields, vocabulary: Vocabulary, merges: list[tuple[str, str]]
) -> Tokenizer:
    """Spaces are a letter of the tokens, and words are not split."""
    tokens, ids = vocabulary.tokens, vocabulary.ids
    unknown = tokens[vocabulary.special(fields, "unknown", 0) or 0]
    if unknown not in ids:
        raise ConfigError(f"{fields.file} has no unknown token: convert the model again")
    model = BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("▁")] if has_prefix else []) + [normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        steps + ([decoders.Strip(" ", 1, 0)] if has_prefix else [])
    )
    return tokenizer


def token_settings(fields: Fields, vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens and chat templates."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, in_file in SPECIAL.items():
        number = vocabulary.special(fields, in_file)
        if number is not None:
            settings[f"{name}_token"] = vocabulary.tokens[number]
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).lstrip(".") or "default": fields.text(key, is_name=False)
        for key in fields.values
        if key == prefix or key.startswith(f"{prefix}.")
    }
    if templates:
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    return settings


def end_token_ids(fields: Fields, vocabulary: Vocabulary) -> list[int]:
    """The tokens that end a text."""
    stated = (vocabulary.special(fields, name) for name in ("eos", "eot", "eom"))
    names = END_NAMES[fields.text("general.architecture")]
    named = (
        number
        for number, token in enumerate(vocabulary.tokens)
        if token in names and vocabulary.kinds[number] in (CONTROL, USER_DEFINED)
    )
    return list(dict.fromkeys([*(number for number in stated if number is not None), *named]))
