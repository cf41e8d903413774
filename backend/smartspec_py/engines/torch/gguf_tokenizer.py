"""The tokenizer of a GGUF file, as the tokenizer.json of its original has it.

Two kinds are read: byte-level BPE, named gpt2 in the file, and BPE of SentencePiece, named llama.
Where the file says nothing, such as whether Llama 3 begins texts with a start token, the rules of
llama.cpp (src/llama-vocab.cpp) are followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from smartspec_py.defaults import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Kinds of tokens. A tokenizer.json has no unused ones, which pad the vocabulary."""

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

SPLITS = {
    "gpt-2": "",
    "smollm": r"\p{N}",
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
}
"""How a text is split before tokens are merged, by `tokenizer.ggml.pre`. The first two also use the
rule of GPT-2."""

LLAMA3 = ("llama-bpe", "llama-v3", "llama3")

END_NAMES = {
    "llama": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "qwen2": ("<|endoftext|>",),
    "qwen3": ("<|endoftext|>",),
}
"""A file names one end token, and the originals of these architectures have several."""

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Tokens by their names in tokenizer_config.json and in the file."""


def make_tokenizer(file: Path, fields: Mapping[str, Any]) -> str:
    """The content of tokenizer.json. Raises ConfigError, or KeyError for a missing field."""
    kind = fields["tokenizer.ggml.model"]
    if kind == "gpt2":
        tokenizer, has_start = _byte_level(file, fields)
    elif kind == "llama":
        tokenizer, has_start = _sentence_piece(fields), True
    else:
        raise ConfigError(
            f"{file} has a tokenizer of the kind {kind}: only gpt2 and llama are read"
        )
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    is_added = {
        "bos": fields.get("tokenizer.ggml.add_bos_token", has_start),
        "eos": fields.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in is_added if is_added[name]}
    if ids:
        first, last = ([tokens[ids[name]]] if name in ids else [] for name in is_added)
        tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(tokens[number], number) for number in ids.values()],
        )
    text: str = tokenizer.to_str()
    return text


def _vocabulary(fields: Mapping[str, Any]) -> dict[str, int]:
    kinds = fields["tokenizer.ggml.token_type"]
    return {
        token: number
        for number, token in enumerate(fields["tokenizer.ggml.tokens"])
        if kinds[number] != UNUSED
    }


def _byte_level(file: Path, fields: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether texts begin with a start token if the file does not say it."""
    name = fields["tokenizer.ggml.pre"]
    if name not in SPLITS:
        raise ConfigError(
            f"{file} has the pre-tokenizer {name}, which cannot be read: use one of "
            f"{', '.join(SPLITS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    model = BPE(vocab=_vocabulary(fields), merges=merges, ignore_merges=name in LLAMA3)
    tokenizer = Tokenizer(model)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    by_gpt2 = name in ("gpt-2", "smollm")
    splits: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_gpt2)]
    if SPLITS[name]:
        splits.insert(0, pre_tokenizers.Split(Regex(SPLITS[name]), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in LLAMA3


def _sentence_piece(fields: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece merges the two neighbours whose union has the highest score."""
    vocabulary = _vocabulary(fields)
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    kinds = fields["tokenizer.ggml.token_type"]
    # The order of equal scores is that of the originals, which Transformers made.
    ranks = sorted(
        (-scores[number], number, vocabulary[token[:cut]], vocabulary[token[cut:]])
        for token, number in vocabulary.items()
        for cut in range(1, len(token))
        if kinds[number] == NORMAL and token[:cut] in vocabulary and token[cut:] in vocabulary
    )
    merges = [(tokens[left], tokens[right]) for *_, left, right in ranks]
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    model = BPE(
        vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    has_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("▁")] if has_prefix else []) + [normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        steps + ([decoders.Strip(" ", 1, 0)] if has_prefix else [])
    )
    return tokenizer


def token_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens and chat templates."""
    tokens = fields["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, in_file in SPECIAL.items():
        number = fields.get(f"tokenizer.ggml.{in_file}_token_id")
        if number is not None:
            settings[f"{name}_token"] = tokens[number]
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).lstrip(".") or "default": text
        for key, text in fields.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    if templates:
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    return settings


def end_token_ids(fields: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text."""
    stated = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    names = END_NAMES[fields["general.architecture"]]
    kinds = fields["tokenizer.ggml.token_type"]
    named = (
        number
        for number, token in enumerate(fields["tokenizer.ggml.tokens"])
        if token in names and kinds[number] == CONTROL
    )
    return list(dict.fromkeys([*(one for one in stated if one is not None), *named]))
