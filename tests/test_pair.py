"""check_pair on directories made for it: each wrong pair gets one sentence that names the cause."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from smartspec_py.pair import PairError, check_pair

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
VOCAB = {"<end>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "bc": 5}
MERGES = [("a", "b"), ("b", "c")]


def make_model(
    folder: Path,
    *,
    vocab: dict[str, int] | None = None,
    merges: list[tuple[str, str]] | None = None,
    end_token: str = "<end>",
    **config: Any,
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "model.safetensors").write_bytes(b"")
    tokenizer = Tokenizer(models.BPE(vocab=vocab or VOCAB, merges=merges or MERGES))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end_token}))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_model(tmp_path / "target")


def refusal(target: Path, draft: Path | None) -> str:
    with pytest.raises(PairError) as caught:
        check_pair(target, draft)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_same_tokenizer_and_padded_vocabulary_is_a_pair(target: Path, tmp_path: Path) -> None:
    check_pair(target, make_model(tmp_path / "draft", vocab_size=64))


def test_no_draft_checks_the_target_alone(target: Path) -> None:
    check_pair(target, None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab": VOCAB | {"d": 6}}, "has 6 tokens and the draft .* has 7: choose a draft"),
        (
            {"vocab": VOCAB | {"a": 2, "b": 1}},
            "token id 1 is 'a' in the target .* and 'b' in the d",
        ),
        ({"merges": MERGES[::-1]}, r"merge differently \(a \+ b against b \+ c\): choose a draft"),
        ({"merges": MERGES[:1]}, r"merge differently \(2 against 1 merges\)"),
        ({"end_token": "a"}, "ends a text with '<end>' and the draft .* with 'a': choose"),
        ({"vocab_size": 5}, "draft .* has a vocab_size of 5, but its tokenizer has the token id 5"),
    ],
)
def test_differing_tokenizers_are_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    draft = make_model(tmp_path / "draft", **changes)
    with pytest.raises(PairError, match=sentence):
        check_pair(target, draft)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "not a causal language"),
        ({"model_type": "vit", "architectures": []}, "not a causal language model"),
        ({"model_type": "no-such-type"}, "config.json that Transformers cannot use"),
        (
            {
                "model_type": "mistral",
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 4096,
            },
            r"sliding_attention.*give a model without",
        ),
        (
            {
                "model_type": "gemma2",
                "architectures": ["Gemma2ForCausalLM"],
                "num_hidden_layers": 2,
            },
            r"sliding_attention.*give a model without",
        ),
    ],
)
def test_unfit_architectures_are_refused(
    tmp_path: Path, config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(PairError, match=sentence):
        check_pair(make_model(tmp_path / "model", **config), None)


def test_window_that_is_switched_off_is_served(tmp_path: Path) -> None:
    check_pair(
        make_model(
            tmp_path / "model",
            model_type="qwen2",
            architectures=["Qwen2ForCausalLM"],
            sliding_window=4096,
            use_sliding_window=False,
        ),
        None,
    )


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer.json: save a fast tokenizer"),
    ],
)
def test_missing_files_are_named(target: Path, file: str, sentence: str) -> None:
    (target / file).unlink()
    assert sentence in refusal(target, None)


def test_missing_directory_is_named(tmp_path: Path) -> None:
    assert "is not a directory: give a local" in refusal(tmp_path / "nowhere", None)


def test_broken_json_is_named(target: Path) -> None:
    (target / "config.json").write_text("{")
    assert "unreadable config.json" in refusal(target, None)


def test_missing_shard_is_named(target: Path) -> None:
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks 1 of its 2 weight files, such as model-1.safetensors" in refusal(target, None)
