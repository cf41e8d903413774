"""Tokenizers and chat templates of GGUF files: the tokens are those of the original."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_files import write_gguf
from gguf_models import ORIGINALS, TEXTS, fields, small_model, trained, write

from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.model_files import end_tokens, load_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", ORIGINALS)
def test_tokens_are_those_of_the_original(tmp_path: Path, name: str) -> None:
    write(tmp_path / "m.gguf", {**fields(name), "add_bos_token": False})
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
        ("tekken", None, True),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
    ],
)
def test_start_tokens(tmp_path: Path, pre: str, stated: bool | None, starts: bool) -> None:
    tokenizer = {**fields(), "pre": pre, "add_bos_token": stated}
    write(tmp_path / "m.gguf", tokenizer)
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
    write(tmp_path / "m.gguf", tokenizer)
    found = load_tokenizer("engine.model", model_folder(tmp_path))
    assert found.encode("abc\n").tokens == ["<s>", "▁a", "bc", "<0x0A>"]
    assert found.encode("<unk>").tokens == ["<s>", "<unk>"]
    assert found.decode(found.encode("abc ab\n").ids) == "abc ab\n"


@pytest.mark.parametrize(("architecture", "num_kept"), [("llama", 1), ("phi3", 0)])
def test_special_tokens_of_phi_3_take_the_space_after_them(
    tmp_path: Path, architecture: str, num_kept: int
) -> None:
    tokenizer = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "<|end|>", "<0x0A>", "▁", "a"],
        "scores": [0.0] * 6,
        "token_type": [2, 3, 3, 6, 1, 1],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    write_gguf(tmp_path / "m.gguf", small_model(architecture, 6), tokenizer)
    found = load_tokenizer("engine.model", model_folder(tmp_path))
    assert found.encode("<|end|>\na<s>\n").ids == [2, *[3] * num_kept, 5, 1, 3]


def test_end_tokens_and_templates(tmp_path: Path) -> None:
    """Unused tokens, which pad the vocabulary, are left out."""
    tokenizer = fields()
    tokenizer["tokens"] += ["<|eot_id|>", "[PAD1]"]
    tokenizer["token_type"] += [3, 5]
    templates = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    write(tmp_path / "m.gguf", tokenizer, **templates)
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
