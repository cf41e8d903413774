"""GGUF files: values, configuration, tokenizer, and what is refused."""

from __future__ import annotations

import gc
import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import bpe_fields, few_fields, file_name, write_gguf
from local_models import VOCAB_SIZE, make_model, make_runner
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig, LocalEngineConfig, ServerConfig
from smartspec_py.defaults import DRAFT_MODEL, ConfigError
from smartspec_py.engines.checkpoints import rows
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.gguf.config import TYPES
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.gguf.header import read_header
from smartspec_py.engines.checkpoints.gguf.weights import GgufMatrix
from smartspec_py.engines.checkpoints.pair import check_pair
from smartspec_py.engines.checkpoints.supported import ModelError, check_files
from smartspec_py.engines.checkpoints.tensors import CheckedTensors, file_tensors
from smartspec_py.engines.local.build import build_local
from smartspec_py.engines.model_files import end_tokens, load_tokenizer
from smartspec_py.engines.runtimes.openvino.runner import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.weights import Weights
from smartspec_py.engines.runtimes.pytorch.causal import load_runner
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig
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
    model = large_model(len(tokenizer["tokens"]))
    return write_gguf(path, model, tokenizer, kind, **changed)


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_those_of_the_reference_dequantisation(tmp_path: Path, kind: str) -> None:
    written = write(tmp_path / "m.gguf", fields(), kind)
    found = file_tensors(model_folder(tmp_path))
    assert set(found) == set(written)
    for name, stored in written.items():
        given = gguf.GGMLQuantizationType["F32" if stored.ndim == 1 else kind]
        expected = gguf.quants.dequantize(stored, given)
        np.testing.assert_array_equal(found[name].float().numpy(), expected, err_msg=name)


@pytest.mark.parametrize("kind", ["Q4_K", "F16"])
def test_parts_give_what_a_whole_matrix_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Parts of three rows, which three threads round. The rows of queries and keys are in another
    order in the file."""
    write(tmp_path / "m.gguf", fields(), kind)
    files = CheckedTensors(model_folder(tmp_path), torch.float32)
    matrices = {name: tensor for name, tensor in files.items() if tensor.ndim == 2}
    monkeypatch.setattr(rows, "PART", 3 * 256)
    for name, matrix in matrices.items():
        [found], [expected] = Weights(files, 3).int8(name), Weights({name: matrix}).int8(name)
        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.scale, expected.scale)


def test_a_loaded_model_does_not_hold_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor rounded weights that it does not use. A start runs without the collection of cycles. No
    more than a part is ever read at once."""
    write(tmp_path / "m.gguf", fields(), "Q4_K")
    monkeypatch.setattr(rows, "PART", 64 * 256)
    sizes, read = [], GgufMatrix.read

    def recorded(matrix: GgufMatrix, part: slice, numbers: torch.Tensor) -> None:
        sizes.append(numbers.numel())
        read(matrix, part, numbers)

    monkeypatch.setattr(GgufMatrix, "read", recorded)
    gc.disable()
    try:
        config = replace(CONFIG, path=model_folder(tmp_path), weights="int8")
        runner = load_openvino_runner(config)
        assert str(tmp_path / "m.gguf") not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()
    assert runner.config.weights == "int8"
    assert max(sizes) == 64 * 256


def test_wrong_parts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PART", 256)
    model = large_model(len(fields()["tokens"]))
    model.model.layers[0].mlp.up_proj.weight.data[200, 3] = float("inf")
    write_gguf(tmp_path / "m.gguf", model, fields())
    weights = Weights(CheckedTensors(model_folder(tmp_path), torch.float32), 2)
    weights.int8("model.layers.0.mlp.down_proj.weight")
    with pytest.raises(ModelError, match=r"up_proj\.weight are not all finite"):
        weights.int8("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("kind", ["llama, grouped keys", "qwen2, one key head", "qwen3"])
@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_logits_are_those_of_the_original(
    tmp_path: Path, kind: str, load: Callable[[RunnerConfig], Any]
) -> None:
    model = make_model(kind)
    write_gguf(tmp_path / "m.gguf", model, few_fields(model.config.vocab_size))
    folder = model_folder(tmp_path / "m.gguf")
    expected = make_runner(model, with_openvino=load is load_openvino_runner).forward(PROMPT)
    found = load(replace(CONFIG, path=folder)).forward(PROMPT)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize(
    ("model_type", "left_out"),
    [("llama", ""), ("llama", "attn_output.bias"), ("llama", "ffn_up.bias"), ("qwen3", "")],
)
@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_biases(
    tmp_path: Path, model_type: str, left_out: str, load: Callable[[RunnerConfig], Any]
) -> None:
    """Where a file has no bias of a part, it is 0."""
    settings = make_model("llama, grouped keys").config.to_dict() | {"attention_bias": True}
    if model_type == "llama":
        settings["mlp_bias"] = True
    config = AutoConfig.for_model(**settings | {"model_type": model_type, "head_dim": 8})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0, 0.3)
            if left_out and file_name(name).endswith(left_out):
                weight.zero_()
    write_gguf(tmp_path / "m.gguf", model, few_fields(model.config.vocab_size), left_out=left_out)
    expected = make_runner(model, with_openvino=load is load_openvino_runner).forward(PROMPT)
    found = load(replace(CONFIG, path=model_folder(tmp_path))).forward(PROMPT)
    assert torch.equal(found.logits, expected.logits)


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear"}, None),
        ({"llama.rope.scaling.factor": 0.0}, None),
        ({"llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"llama.rope.scale_linear": 2.0, "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}),
        (
            {
                **YARN,
                "llama.rope.scaling.original_context_length": 512,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
            },
            {"original_max_position_embeddings": 512, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
)
def test_rotary_scaling(
    tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    write(tmp_path / "m.gguf", fields(), **changes)
    found = load_config(model_folder(tmp_path), CONFIG.max_len).rope_parameters
    expected = expected or {"rope_type": "default"}
    assert {name: found.get(name) for name in expected} == expected


def test_rotary_settings_of_llama_3(tmp_path: Path) -> None:
    """The file has the divisors of the frequencies only."""
    model = large_model(len(fields()["tokens"]))
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
    config = load_config(model_folder(tmp_path), CONFIG.max_len)
    assert {name: config.rope_parameters[name] for name in settings} == settings
    extra["rope_freqs.weight"][20] *= 1.1
    write_gguf(tmp_path / "m.gguf", model, fields(), tensors=extra)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight that is not that of Llama 3"):
        model_folder(tmp_path)


@pytest.mark.parametrize("name", ORIGINALS)
def test_tokens_are_those_of_the_original(tmp_path: Path, name: str) -> None:
    write(tmp_path / "m.gguf", fields(name))
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "gemma3"}, "the architecture gemma3, which cannot be read: use one of"),
        ({"split.count": 3}, "is one of 3 parts"),
        ({"tokenizer.ggml.pre": "tekken"}, "the pre-tokenizer tekken, which cannot be read"),
        ({"tokenizer.ggml.model": "bert"}, "a tokenizer of the kind bert"),
        ({"tokenizer.ggml.merges": None}, r"has no tokenizer\.ggml\.merges"),
        (
            {"llama.rope.dimension_count": 32},
            r"has the llama\.rope\.dimension_count 32, but it must be 64",
        ),
        ({"llama.rope.scaling.type": "longrope"}, "rotary embeddings of the type longrope"),
        (
            {"llama.rope.scaling.attn_factor": 1.2},
            r"rope\.scaling\.attn_factor 1\.2.* must be 1\.0",
        ),
        (
            {"llama.rope.scaling.yarn_attn_factor": 1.0},
            r"the field llama\..*yarn_attn_factor, which",
        ),
        ({"llama.attention.sliding_window": 64}, r"attention\.sliding_window 64, .* must be 0"),
        (
            {"llama.attention.scale": 0.5},
            r"the field llama\.attention\.scale, which cannot be read",
        ),
        ({"llama.logit_scale": 2.0}, r"the field llama\.logit_scale, which cannot be read"),
        ({"llama.final_logit_softcapping": 30.0}, "the field llama.final_logit_softcapping"),
        ({"llama.expert_count": 8}, r"expert_count 8, but it must be 0"),
        ({"llama.attention.value_length": 32}, r"attention\.value_length 32, .* must be 64"),
        ({"kind": "Q2_K"}, "tensors of the type Q2_K, such as .* cannot be read: use one of F32"),
        (
            {"tensors": {"blk.0.ffn_gate_inp.weight": np.zeros(1, np.float32)}},
            "has the tensor blk.0.ffn_gate_inp.weight, which a llama model with 1 layers has not",
        ),
        ({"tensors": {"blk.1.attn_norm.weight": np.zeros(256, np.float32)}}, "blk.1.attn_norm"),
        ({"left_out": "ffn_up.weight"}, "has no tensor blk.0.ffn_up.weight: convert or copy"),
        (
            {"tensors": {"output.bias": np.zeros(303, np.float32)}},
            "has the tensor output.bias, which a llama",
        ),
        ({"llama.block_count": 2}, "has no tensor blk.1.attn_norm.weight"),
        ({"llama.block_count": 2**31}, "has the llama.block_count 2147483648, but it must be"),
        ({"llama.feed_forward_length": 128}, r"ffn_gate.weight of the shape \(256, 256\), but"),
        ({"llama.attention.head_count": 0}, "head_count 0, but it must be a whole number in 1"),
        ({"llama.attention.head_count": [4]}, r"head_count \[4\], but it must be a whole number"),
        ({"llama.attention.head_count_kv": 3}, "has 4 heads of 64 and 3 of keys"),
        ({"llama.attention.head_count": 3}, "has 3 heads of 64 and 2 of keys"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon nan, but"),
        ({"general.quantization_version": 1}, "quantization_version 1, but it must be 2"),
        ({"general.alignment": 0}, r"damaged, .* \(general.alignment 0\): copy it again"),
        ({"tokenizer.ggml.eos_token_id": 303}, "eos_token_id 303, .* a whole number in 0..302"),
        ({"tokenizer.ggml.eos_token_id": [0]}, r"eos_token_id \[0\], but it must be a whole"),
        ({"tokenizer.ggml.token_type": [1]}, r"token_type \[1\], .* a list of 303 numbers in 0..6"),
        ({"tokenizer.ggml.merges": ["a nothing"]}, "has the merge 'a nothing' of tokens that it"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "token_type .* a list of 2 numbers"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token 'yes', but it must be true or"),
        ({"tokenizer.chat_template": 3}, r"chat_template 3, but it must be a text"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    write(tmp_path / "m.gguf", fields(), **changes)
    with pytest.raises(ConfigError, match=f"m.gguf.*{reason}"):
        model_folder(tmp_path)


def test_damaged_and_ambiguous_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write(path, fields())
    folder = model_folder(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    with pytest.raises(ModelError, match=f"{re.escape(str(path))}, which has changed"):
        check_files("the target", folder)
    with pytest.raises(ConfigError, match=r"not complete or too new .* ends after"):
        model_folder(path)
    (folder / "gguf.json").write_text("{}")
    with pytest.raises(ModelError, match="was made of None, which has changed"):
        check_files("the target", folder)
    path.write_bytes(whole[:2000])
    with pytest.raises(ConfigError, match="damaged, not complete or too new"):
        model_folder(path)
    (tmp_path / "b.gguf").write_bytes(whole)
    with pytest.raises(ConfigError, match="has 2 GGUF files: give the path of one"):
        model_folder(tmp_path)


def test_a_pair_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    """And not by the folder in the cache, which no one has heard of."""
    write(tmp_path / "m.gguf", fields())
    with pytest.raises(ModelError, match=r"^the target m\.gguf supports \d+ positions, fewer than"):
        check_pair(model_folder(tmp_path / "m.gguf"), None, 1_000_000)


def test_a_file_behind_links(tmp_path: Path) -> None:
    """The cache of the hub consists of links. One that has gone changes nothing for another one."""
    write(tmp_path / "blob", fields())
    first, second = tmp_path / "1" / "m.gguf", tmp_path / "2" / "m.gguf"
    for link in (first, second):
        link.parent.mkdir()
        link.symlink_to(tmp_path / "blob")
    folder = model_folder(first)
    first.unlink()
    assert model_folder(second) == folder
    check_files("the target", folder)
    assert len(file_tensors(folder)) > 0


def test_random_changes_of_a_header(tmp_path: Path) -> None:
    """Each is refused with one sentence, or changes something that can be any value, such as a
    letter of a token. Found by 12,000 changes with other seeds."""
    random = Random(1)
    path = tmp_path / "m.gguf"
    write_gguf(path, make_model("qwen3"), few_fields(104), **{"qwen3.rope.dimension_count": 12})
    whole, messages = path.read_bytes(), list[str]()
    header = range(4, min(tensor.offset for tensor in read_header(path)[1].values()))
    for number in range(300):
        changed = bytearray(whole)
        for place in random.sample(header, random.choice([1, 1, 2, 4])):
            changed[place] = random.choice([random.randrange(256), 0, 255])
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(changed)
        try:
            model_folder(path)
        except ConfigError as error:
            messages.append(str(error))
    assert len(messages) > 200
    for message in messages:
        assert re.fullmatch(rf"{re.escape(str(tmp_path))}/\d+.gguf .*: .*", message)


@pytest.mark.parametrize("count", [2**22 + 1, 2**60, 2**64 - 1])
@pytest.mark.parametrize("place", ["texts", "numbers", "text", "fields", "tensors", "sizes"])
def test_sizes_beyond_the_file(tmp_path: Path, place: str, count: int) -> None:
    """They are refused at once, before anything of this size is read."""
    text = struct.pack("<Q1s", 1, b"k")
    parts = {
        "texts": text + struct.pack("<IIQ", 9, 8, count),
        "numbers": text + struct.pack("<IIQ", 9, 4, count),
        "text": struct.pack("<Q", count),
        "sizes": text + struct.pack("<I", count % 2**32),
    }
    num_fields = count if place == "fields" else place in ("texts", "numbers", "text")
    num_tensors = count if place == "tensors" else place == "sizes"
    header = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_fields)
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(header + parts.get(place, b""))
        file.truncate(2**26)
    with pytest.raises(ConfigError, match="is damaged, not complete or too new"):
        model_folder(path)


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
        config = LocalEngineConfig(
            model=str(path), draft=str(TINY / "draft"), dtype="float32", num_threads=1
        )
        engine = build_local(config, limits, tmp_path)
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
