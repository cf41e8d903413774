"""GGUF files: values, configuration, tokenizer, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import bpe_fields, write_gguf
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch_models import VOCAB_SIZE, make_model, make_runner
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig, ServerConfig, TorchEngineConfig
from smartspec_py.defaults import DRAFT_MODEL, ConfigError
from smartspec_py.engines.model_files import end_tokens, load_tokenizer
from smartspec_py.engines.torch.build import build_torch
from smartspec_py.engines.torch.checkpoint import ModelError, check_files
from smartspec_py.engines.torch.gguf_folder import TYPES, model_folder
from smartspec_py.engines.torch.openvino_runner import load_openvino_runner
from smartspec_py.engines.torch.packed import RowInput
from smartspec_py.engines.torch.runner import RunnerConfig, load_config, load_runner
from smartspec_py.engines.torch.weights import file_tensors
from smartspec_py.serving.server import Server
from smartspec_testing.local import generate

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"
CONFIG = RunnerConfig(Path(), torch.device("cpu"), torch.float32, 5, 96, VOCAB_SIZE)
PROMPT = [RowInput(0, 0, [5, 6, 7, 8], 4, 4)]
TEXTS = (
    "the 2024 x =  12\n\n   don't  we'LL",
    "ab 12345 emoji \U0001f600 caf\u00e9 e\u0301 <end> and <end>",
    " \t the\nend  ",
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORIGINALS: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
"""Those of the models' own tokenizer.json."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    return bpe_fields(trained(name).to_str(), name)


def large_model() -> Any:
    """Rows of 256 numbers, as K types need."""
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_those_of_the_reference_dequantisation(tmp_path: Path, kind: str) -> None:
    written = write_gguf(tmp_path / "m.gguf", large_model(), fields(), kind)
    found = file_tensors(model_folder(tmp_path))
    assert set(found) == set(written)
    for name, stored in written.items():
        given = gguf.GGMLQuantizationType["F32" if stored.ndim == 1 else kind]
        expected = gguf.quants.dequantize(stored, given)
        np.testing.assert_array_equal(found[name].float().numpy(), expected, err_msg=name)


@pytest.mark.parametrize("kind", ["llama, grouped keys", "qwen2, one key head", "qwen3"])
@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_logits_are_those_of_the_original(
    tmp_path: Path, kind: str, load: Callable[[RunnerConfig], Any]
) -> None:
    model = make_model(kind)
    write_gguf(tmp_path / "m.gguf", model, fields())
    folder = model_folder(tmp_path / "m.gguf")
    expected = make_runner(model, with_openvino=load is load_openvino_runner).forward(PROMPT)
    found = load(replace(CONFIG, path=folder)).forward(PROMPT)
    assert torch.equal(found.logits, expected.logits)


def test_rotary_settings_of_llama_3(tmp_path: Path) -> None:
    """The file has the divisors of the frequencies only."""
    model = large_model()
    settings = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model.config.rope_parameters = settings
    changed, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = 1 / 10_000 ** (torch.arange(0, 64, 2) / 64)
    extra = {"rope_freqs.weight": (plain / changed).numpy()}
    write_gguf(tmp_path / "m.gguf", model, fields(), tensors=extra)
    config = load_config(replace(CONFIG, path=model_folder(tmp_path)))
    assert {name: config.rope_parameters[name] for name in settings} == settings
    extra["rope_freqs.weight"][20] *= 1.1
    write_gguf(tmp_path / "m.gguf", model, fields(), tensors=extra)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight that is not that of Llama 3"):
        model_folder(tmp_path)


@pytest.mark.parametrize("name", ORIGINALS)
def test_tokens_are_those_of_the_original(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "m.gguf", large_model(), fields(name))
    found = load_tokenizer("engine.model", model_folder(tmp_path))
    for text in TEXTS:
        # Tokenizers of Qwen compose characters and their accents.
        given = text.replace("e\u0301", "\u00e9") if name == "qwen2" else text
        assert found.encode(text).ids == trained(name).encode(given).ids
        assert found.decode(found.encode(text).ids, skip_special_tokens=False) == given


@pytest.mark.parametrize(
    ("pre", "stated", "starts"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
    ],
)
def test_start_tokens(tmp_path: Path, pre: str, stated: bool | None, starts: bool) -> None:
    tokenizer = {**fields(), "pre": pre, "add_bos_token": stated}
    write_gguf(tmp_path / "m.gguf", large_model(), tokenizer)
    found = load_tokenizer("engine.model", model_folder(tmp_path)).encode("ab").tokens
    assert (found[0] == "<end>") is starts


def test_tokens_of_sentence_piece(tmp_path: Path) -> None:
    """By hand: "▁abc" is ▁ a b c; of the unions, "bc" (-1) comes before "ab" (-2)."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "c", "ab", "bc", "▁a"]
    tokenizer = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0],
        "token_type": [2, 3, 3, 6, *[1] * 7],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    write_gguf(tmp_path / "m.gguf", large_model(), tokenizer)
    found = load_tokenizer("engine.model", model_folder(tmp_path))
    assert found.encode("abc\n").tokens == ["<s>", "▁a", "bc", "<0x0A>"]
    assert found.encode("<unk>").tokens == ["<s>", "<unk>"]
    assert found.decode(found.encode("abc ab\n").ids) == "abc ab\n"


def test_end_tokens_and_templates(tmp_path: Path) -> None:
    """Unused tokens, which pad the vocabulary, are left out."""
    tokenizer = fields()
    tokenizer["tokens"] += ["<|eot_id|>", "[PAD1]"]
    tokenizer["token_type"] += [3, 5]
    templates = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    write_gguf(tmp_path / "m.gguf", large_model(), tokenizer, **templates)
    folder = model_folder(tmp_path)
    found = load_tokenizer("engine.model", folder)
    eot = found.token_to_id("<|eot_id|>")
    assert end_tokens(folder, 400, found) == (0, eot)
    assert found.token_to_id("[PAD1]") is None
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<end>"
    assert {one["name"]: one["template"] for one in settings["chat_template"]} == {
        "default": "A",
        "tool_use": "B",
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "gemma3"}, "the architecture gemma3, which cannot be read: use one of"),
        ({"split.count": 3}, "is one of 3 parts"),
        ({"tokenizer.ggml.pre": "tekken"}, "the pre-tokenizer tekken, which cannot be read"),
        ({"tokenizer.ggml.model": "bert"}, "a tokenizer of the kind bert"),
        ({"tokenizer.ggml.merges": None}, r"has no tokenizer\.ggml\.merges"),
        ({"llama.rope.dimension_count": 32}, "rotates a part of each head only"),
        ({"llama.rope.scaling.type": "longrope"}, "rotary embeddings of the type longrope"),
        ({"kind": "Q2_K"}, "tensors of the type Q2_K, which cannot be read: use one of F32"),
        (
            {"tensors": {"blk.0.ffn_gate_inp.weight": np.zeros(1, np.float32)}},
            "has a tensor blk.0.ffn_gate_inp",
        ),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    write_gguf(tmp_path / "m.gguf", large_model(), fields(), **changes)
    with pytest.raises(ConfigError, match=f"m.gguf.* {reason}"):
        model_folder(tmp_path)


def test_damaged_and_ambiguous_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, large_model(), fields())
    folder = model_folder(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    with pytest.raises(ModelError, match=f"{re.escape(str(path))}, which has changed"):
        check_files("the target", folder)
    with pytest.raises(ConfigError, match=r"not complete or too new .* ends after"):
        model_folder(path)
    path.write_bytes(whole[:2000])
    with pytest.raises(ConfigError, match="damaged, not complete or too new"):
        model_folder(path)
    (tmp_path / "b.gguf").write_bytes(whole)
    with pytest.raises(ConfigError, match="has 2 GGUF files: give the path of one"):
        model_folder(tmp_path)


def test_it_is_served_as_its_original(tmp_path: Path) -> None:
    """With an ordinary folder as its draft. The type of the weights is that of the original."""
    model = AutoModelForCausalLM.from_pretrained(TINY / "target")
    tokenizer = bpe_fields((TINY / "target" / "tokenizer.json").read_text(), "gpt-2")
    write_gguf(
        tmp_path / "tiny.gguf", model, tokenizer, "BF16", **{"tokenizer.ggml.add_bos_token": False}
    )
    limits = LimitsConfig(max_sequences=2, max_context_len=128, max_draft_len=3, profile_s=0.0)
    texts = []
    for path in (TINY / "target", tmp_path / "tiny.gguf"):
        config = TorchEngineConfig(
            model=str(path), draft=str(TINY / "draft"), dtype="float32", num_threads=1
        )
        engine = build_torch(config, limits, tmp_path)
        assert DRAFT_MODEL in engine.proposers
        server = Server(engine, ServerConfig(engine=config, limits=limits))
        server.start()
        try:
            sinks = generate(server, [GenerateParams("SELECT name FROM", 32, policy="fixed:2")])
        finally:
            server.stop()
        texts.append((sinks[0].tokens, sinks[0].text, sinks[0].error))
    assert texts[0] == texts[1]
    assert len(texts[0][0]) > 1
