"""GGUF files that are refused: those that cannot be served, and damaged ones."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from gguf_files import few_fields, write_gguf
from gguf_models import fields, write
from local_models import make_model

from smartspec_py.engines.checkpoints.checks import ModelError, check_files
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.gguf.header import read_header
from smartspec_py.engines.checkpoints.pair import check_pair
from smartspec_py.faults import ConfigError

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "bloom"}, "the architecture bloom, which cannot be read: use one of"),
        (
            {"split.count": 3},
            "has the split.no 0 and the split.count 3, which its name",
        ),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "the pre-tokenizer kimi-k2, which cannot be read"),
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
        ({"kind": "TQ1_0"}, "tensors of the type TQ1_0, such as .* cannot be read: use one of F32"),
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
        (
            {"llama.attention.head_count_kv": [2, 1]},
            "other numbers of key heads in some layers",
        ),
        ({"llama.attention.head_count_kv": [0.5]}, r"kv \[0\.5\], but it must be a list of 1"),
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
