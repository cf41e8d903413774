"""GGUF files: values, configuration, and the served text."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import bpe_fields, few_fields, file_name, stored, write_gguf
from gguf_models import fields, large_model, small_model, write
from local_models import VOCAB_SIZE, make_model, make_runner
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig, LocalEngineConfig, ServerConfig
from smartspec_py.constants import DRAFT_MODEL
from smartspec_py.engines.checkpoints import rows
from smartspec_py.engines.checkpoints.checks import ModelError, check_files
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.gguf import folder as folder_module
from smartspec_py.engines.checkpoints.gguf.dequantise import (
    FOUR_BITS,
    KINDS,
    dequantise,
    integers_of,
)
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.gguf.places import TYPES
from smartspec_py.engines.checkpoints.gguf.weights import GgufMatrix
from smartspec_py.engines.checkpoints.tensors import CheckedTensors, file_tensors
from smartspec_py.engines.local.build import build_local
from smartspec_py.engines.local.load import runtime_of
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.weights import Weights
from smartspec_py.engines.runtimes.pytorch.causal import load_runner
from smartspec_py.engines.runtimes.runner import PYTORCH, RowInput, RunnerConfig
from smartspec_py.faults import ConfigError
from smartspec_testing.local import generate, serving

pytestmark = [
    pytest.mark.slow,  # so that they run beside the others
    pytest.mark.usefixtures("own_cache"),
]

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"
CONFIG = RunnerConfig(Path(), torch.device("cpu"), torch.float32, 5, 96, VOCAB_SIZE)
PROMPT = [RowInput(0, 0, [5, 6, 7, 8], 4, 4)]


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_those_of_the_reference_dequantisation(tmp_path: Path, kind: str) -> None:
    written = write(tmp_path / "m.gguf", fields(), kind)
    found = file_tensors(model_folder(tmp_path))
    assert set(found) == set(written)
    for name, numbers in written.items():
        given = gguf.GGMLQuantizationType["F32" if numbers.ndim == 1 else kind]
        expected = gguf.quants.dequantize(numbers, given)
        np.testing.assert_array_equal(found[name].float().numpy(), expected, err_msg=name)


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_integers_of_4_bits(kind: str) -> None:
    """They stand for the numbers of the type, also where a scale is 0."""
    block_bytes = KINDS[kind][0]
    numbers = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    given = torch.from_numpy(stored(numbers, kind))
    scale = slice(4, 8) if kind == "Q4_K" else slice(0, 2)
    given.view(-1, block_bytes)[3, scale] = 0
    found = integers_of(given, kind) or pytest.fail("it has 4 bits")
    integers, scales, zeros = found.values, found.scales, found.zeros
    assert integers.dtype == torch.uint8
    assert integers.max() == 15
    groups = (integers.view(8, -1, 32) - zeros[:, :, None]) * scales[:, :, None]
    expected = torch.empty(8, 512)
    dequantise(given, kind, expected)
    error = (groups - expected.view(8, -1, 32)).abs().amax(-1)
    assert (error <= 1e-6 * scales.abs() * (15 + zeros.abs())).all()


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


def test_a_model_in_several_files(tmp_path: Path) -> None:
    """Its folder, and each of them, stand for all."""
    written = write_gguf(tmp_path / "m.gguf", make_model("qwen3"), few_fields(104), part_len=9)
    first, *others = sorted(tmp_path.iterdir())
    assert len(others) > 1
    folder = model_folder(tmp_path)
    assert folder.name == "m"
    assert [model_folder(file) for file in (first, others[-1])] == [folder, folder]
    found = file_tensors(folder)
    assert set(found) == set(written)
    for name, numbers in written.items():
        np.testing.assert_array_equal(found[name], numbers)
    others[1].write_bytes(others[0].read_bytes())
    with pytest.raises(ConfigError, match=r"split\.no 1 and the split\.count"):
        model_folder(first)
    others[0].write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigError, match=r"not a GGUF file; .*git lfs pull"):
        model_folder(first)
    others[0].unlink()
    with pytest.raises(ConfigError, match=f"{others[0]} is missing: copy all"):
        model_folder(tmp_path)


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


GEMMA = {
    "head_dim": 8,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 8,
    "sliding_window": 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}
GEMMA_FIELDS = {
    "gemma3.attention.sliding_window": 2,
    "gemma3.rope.scaling.type": "linear",
    "gemma3.rope.scaling.factor": 8.0,
}
GEMMA_2 = {"head_dim": 8, "num_hidden_layers": 3, "query_pre_attn_scalar": 8}
LIMITS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA_2_FIELDS = {f"gemma2.{name}": limit for name, limit in LIMITS.items()} | {
    "gemma2.attention.sliding_window": 2
}
LAYERS = ["sliding_attention", "full_attention"] * 2
FACTORS = {"long": [1.0, 1.5, 2.5], "short": [1.0, 1.1, 1.3]}
PHI = {
    "max_position_embeddings": 96,
    "original_max_position_embeddings": 48,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope"}
    | {f"{name}_factor": FACTORS["long"] for name in FACTORS},  # that of the served context
}
PHI_FIELDS = {
    "phi3.rope.dimension_count": 6,
    "phi3.rope.scaling.original_context_length": 48,
    "phi3.rope.scaling.attn_factor": math.sqrt(1 + math.log(2) / math.log(48)),
}
GRANITE = {
    "embedding_multiplier": ("embedding_scale", 3.0),
    "residual_multiplier": ("residual_scale", 0.3),
    "attention_multiplier": ("attention.scale", 0.2),
    "logits_scaling": ("logit_scale", 4.0),
}
GRANITE_FIELDS = {f"granite.{field}": factor for field, factor in GRANITE.values()}
GRANITE_4_FIELDS = {
    "granite.attention.head_count_kv": [2],
    "granite.expert_shared_feed_forward_length": 48,
    "granite.ssm.conv_kernel": 4,
    "granite.rope.scaling.finetuned": True,
}
MINISTRAL = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 2,
        "llama_4_scaling_beta": 0.5,
    }
    | dict.fromkeys(("mscale", "mscale_all_dim"), 1.0)
}
PLAIN_MINISTRAL = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 2,
    "llama_4_scaling_beta": 0.0,
}
MINISTRAL_FIELDS = {
    "mistral3.rope.scaling.type": "yarn",
    "mistral3.rope.scaling.factor": 8.0,
    "mistral3.rope.scaling.original_context_length": 2,
    "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
    "mistral3.attention.temperature_scale": 0.5,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "head_dim": 8,
}
EXPERTS_FIELDS = {
    "qwen3moe.expert_count": 6,
    "qwen3moe.expert_used_count": 2,
    "qwen3moe.expert_feed_forward_length": 24,
    "qwen3moe.expert_shared_feed_forward_length": 0,  # as files of Qwen3-Coder have it
}


@pytest.mark.parametrize(
    ("model_type", "settings", "changed"),
    [
        ("gemma3_text", GEMMA, GEMMA_FIELDS),
        (
            "gemma3_text",
            GEMMA | {"num_hidden_layers": 4, "layer_types": LAYERS},
            GEMMA_FIELDS | {"gemma3.attention.sliding_window_pattern": 2},
        ),
        ("granite", {name: factor for name, (_, factor) in GRANITE.items()}, GRANITE_FIELDS),
        ("granite", {"attention_multiplier": 8**-0.5}, GRANITE_4_FIELDS),
        ("ministral3", MINISTRAL, MINISTRAL_FIELDS),
        ("ministral3", {"rope_parameters": PLAIN_MINISTRAL}, {}),
        ("smollm3", {"num_hidden_layers": 4}, {}),
        ("phi3", {"sliding_window": 3}, {"phi3.attention.sliding_window": 3}),
        ("phi3", PHI, PHI_FIELDS),
        ("qwen3_moe", EXPERTS, EXPERTS_FIELDS),
    ],
    ids=[
        *("gemma3", "gemma3, pattern", "granite 3", "granite 4", "ministral3", "mistral small"),
        *("smollm3", "phi3, window", "phi3, longrope", "qwen3_moe"),
    ],
)
@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_logits_of_other_types(
    tmp_path: Path,
    model_type: str,
    settings: dict[str, Any],
    changed: dict[str, Any],
    load: Callable[[RunnerConfig], Any],
) -> None:
    """Windows, rotations and norms of Gemma 3, factors of Granite, queries of Ministral 3, layers
    of SmolLM3 without rotation, joined products of Phi 3, and its two lists of divisors, of which
    the context chooses the long one, and experts."""
    model = small_model(model_type, VOCAB_SIZE, **settings)
    extra = {
        f"rope_factors_{name}.weight": np.array(factors, np.float32)
        for name, factors in FACTORS.items()
        if settings is PHI
    }
    tokens = few_fields(VOCAB_SIZE)
    write_gguf(tmp_path / "m.gguf", model, tokens, tensors=extra, **changed)
    expected = make_runner(model, with_openvino=load is load_openvino_runner).forward(PROMPT)
    found = load(replace(CONFIG, path=model_folder(tmp_path))).forward(PROMPT)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        (GEMMA_2 | LIMITS | {"sliding_window": 2}, GEMMA_2_FIELDS),
        (GEMMA_2 | {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}, {}),
        (GEMMA_2, {}),
    ],
    ids=["limits and window", "largest", "defaults"],
)
def test_logits_of_gemma_2(
    tmp_path: Path, settings: dict[str, Any], changed: dict[str, Any]
) -> None:
    """PyTorch computes it. The largest one scales queries by its width, 64 for 4 heads, not by that
    of a head."""
    model = small_model("gemma2", VOCAB_SIZE, hidden_size=64, **settings)
    write_gguf(tmp_path / "m.gguf", model, few_fields(VOCAB_SIZE), **changed)
    folder = model_folder(tmp_path)
    assert (
        runtime_of(folder, CONFIG.device, LocalEngineConfig(model="m"), CONFIG.max_len) == PYTORCH
    )
    expected = make_runner(model).forward(PROMPT)
    assert load_config(folder, CONFIG.max_len).sliding_window == model.config.sliding_window
    found = load_runner(replace(CONFIG, path=folder)).forward(PROMPT)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)


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
    with pytest.raises(ConfigError, match="not that of Llama 3: divisor 20 is "):
        model_folder(tmp_path)


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


def test_folders_of_files_that_have_gone_or_changed_are_removed(tmp_path: Path) -> None:
    """When a new one is made."""
    files = [tmp_path / f"{name}.gguf" for name in ("gone", "changed", "same", "new")]
    for file in files[:3]:
        write(file, fields())
    gone, changed, same = map(model_folder, files[:3])
    files[0].unlink()
    os.utime(files[1], (1, 1))
    assert model_folder(files[2]) == same
    assert gone.is_dir()
    write(files[3], fields())
    new = model_folder(files[3])
    assert sorted(new.parents[1].iterdir()) == sorted([same.parent, new.parent])
    assert not changed.exists()
    assert same.is_dir()


def test_two_starts_at_once_leave_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that there is none."""
    write(tmp_path / "m.gguf", fields())
    documents = folder_module._documents

    def meanwhile(file: Path) -> dict[str, str]:
        monkeypatch.setattr(folder_module, "_documents", documents)
        model_folder(file)
        return documents(file)

    monkeypatch.setattr(folder_module, "_documents", meanwhile)
    folder = model_folder(tmp_path)
    check_files("the target", folder)
    assert list(folder.parent.iterdir()) == [folder]


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
        with serving(engine, ServerConfig(engine=config, limits=limits)) as server:
            sinks = generate(server, [GenerateParams("SELECT name FROM", 32, policy="fixed:2")])
        texts.append((sinks[0].tokens, sinks[0].text, sinks[0].error))
    assert texts[0] == texts[1]
    assert len(texts[0][0]) > 1
