"""Small models and trained tokenizers, in GGUF files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from gguf_files import bpe_fields, write_gguf
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

TEXTS = (
    "the 2024 x =  12\n\n   don't  we'LL",
    "ab 12345 emoji \U0001f600 caf\u00e9 e\u0301 <end> and <end>",
    " \t the\nend  ",
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by_rule(split: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


ORIGINALS: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "qwen2": by_rule(QWEN),
    "gpt-4o": by_rule(GPT_4O),
    "tekken": by_rule(TEKKEN),
}
"""Those of the models' own tokenizer.json."""


@cache
def trained(name: str = "gpt-2") -> Tokenizer:
    """A byte-level tokenizer of VOCAB_SIZE and more tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ORIGINALS[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def fields(name: str = "gpt-2") -> dict[str, Any]:
    """The fields of the trained tokenizer."""
    return bpe_fields(trained(name).to_str(), name)


def small_model(model_type: str, num_tokens: int, **settings: Any) -> Any:
    """Of any type, with random weights."""
    sizes = {
        "vocab_size": num_tokens,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes | settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    return model


def large_model(num_tokens: int) -> Any:
    """Rows of 256 numbers, as K types need."""
    config = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config)


def write(path: Path, tokenizer: dict[str, Any], kind: str = "F32", **changed: Any) -> Any:
    """A file of a large model with this tokenizer; see `write_gguf`."""
    model = large_model(len(tokenizer["tokens"]))
    return write_gguf(path, model, tokenizer, kind, **changed)
