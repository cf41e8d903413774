"""gpt-oss from its files. Whether its layers give what Transformers gives is in test_model_types,
and whether bits depend on the pass in test_same_bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import add_fields, few_fields, file_name
from local_models import VOCAB_SIZE
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from smartspec_py.config import LimitsConfig
from smartspec_py.engines.checkpoints.checks import ModelError, check_files, check_quantization
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.sizes import check_sizes
from smartspec_py.engines.local import context
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig
from smartspec_py.faults import ConfigError

pytestmark = pytest.mark.slow  # so that they run beside the others

CONFIG = RunnerConfig(Path(), torch.device("cpu"), torch.float32, 2, 64, VOCAB_SIZE)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
NUM_LAYERS = 2


def make_model() -> Any:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=64,
        head_dim=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=4,
        initializer_range=0.2,
        max_position_embeddings=256,
    )
    model = GptOssForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "bias" in name or "sinks" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def write_mxfp4(folder: Path, model: Any) -> None:
    """As OpenAI's files have it, with random blocks that replace the experts of the model."""
    model.save_pretrained(folder)
    tensors, experts = load_file(folder / "model.safetensors"), dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num, width, num_out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (num, num_out, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        experts[name].data.copy_(numbers)
    save_file(tensors, folder / "model.safetensors")
    document = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(document | {"quantization_config": settings}))


IN_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}


def write_gguf(path: Path, model: Any, of_up: str = "MXFP4", **changed: Any) -> None:
    """As llama.cpp's converter writes it, with experts in MXFP4, which replace those of the
    model. of_up: another type of the matrices up. changed: fields."""
    config, rope = model.config, model.config.rope_parameters
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.intermediate_size,
        **changed,
    }
    fields = {f"gpt-oss.{key}": value for key, value in fields.items()}
    fields |= {f"tokenizer.ggml.{key}": value for key, value in few_fields(VOCAB_SIZE).items()}
    writer = gguf.GGUFWriter(path, "gpt-oss")
    add_fields(writer, fields)
    for name, weight in model.named_parameters():
        layer, _, part = name.rpartition(".mlp.experts.")
        if not layer:
            writer.add_tensor(file_name(name, IN_GGUF), weight.detach().numpy())
            continue
        begin = layer.replace("model.layers", "blk")
        places = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        for each, place in places.items() if part.startswith("gate") else [("down", slice(None))]:
            rows = weight.data[..., place]
            if part.endswith("bias"):
                writer.add_tensor(f"{begin}.ffn_{each}_exps.bias", rows.contiguous().numpy())
                continue
            kind = gguf.GGMLQuantizationType[of_up if each == "up" else "MXFP4"]
            blocks = gguf.quants.quantize(rows.transpose(1, 2).contiguous().numpy(), kind)
            rows.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind)).transpose(1, 2))
            writer.add_tensor(f"{begin}.ffn_{each}_exps.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(runner: OpenVinoRunner) -> torch.Tensor:
    return runner.forward([RowInput(0, 0, PROMPT, len(PROMPT), len(PROMPT))]).logits


def errors_of(runner: OpenVinoRunner, model: Any) -> torch.Tensor:
    """Of the logits of each token, relative to those of the model. With rounded weights, a token
    may get another expert."""
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    return (logits_of(runner) - wanted).std(1) / wanted.std(1)


def types_of_experts(runner: OpenVinoRunner) -> list[str]:
    nodes = runner.compiled.get_runtime_model().get_ordered_ops()
    products = [n for n in nodes if "GatherMatmul" in str(n.get_rt_info()["layerType"].value)]
    return [n.input(1).get_element_type().to_string() for n in products]


def test_a_checkpoint_without_blocks(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    assert "model.layers.0.mlp.experts.down_proj" in load_file(tmp_path / "model.safetensors")
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path))
    assert errors_of(runner, model).max() < 1e-5
    rounded = load_openvino_runner(replace(CONFIG, path=tmp_path, weights="int8"))
    assert types_of_experts(rounded) == ["i8"] * 2 * NUM_LAYERS
    assert errors_of(rounded, model).median() < 0.1


def test_weights_of_4_bits(tmp_path: Path) -> None:
    """In groups that divide the width of the products of experts, 64, which the files have as
    columns."""
    model = make_model()
    model.save_pretrained(tmp_path)
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path, weights="int4"))
    assert types_of_experts(runner) == ["u4"] * 2 * NUM_LAYERS
    assert errors_of(runner, model).median() < 0.5


def test_mxfp4_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stored weights, and as whole numbers, also from the file of converted weights. Beside
    these, the other products have 8 bits."""
    model = make_model()
    write_mxfp4(tmp_path, model)
    check_files("m", tmp_path)
    check_quantization("m", tmp_path)
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path))
    assert errors_of(runner, model).max() < 1e-5
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = replace(CONFIG, path=tmp_path, weights="int8", weights_cache_bytes=1 << 30)
    kept = replace(config, keeps_experts=True)
    runners = [load_openvino_runner(each) for each in (kept, kept, config)]
    for runner in runners:
        assert types_of_experts(runner) == ["i8"] * 2 * NUM_LAYERS
        assert errors_of(runner, model).median() < 0.1
    first, second, rounded = map(logits_of, runners)
    assert torch.equal(first, second)
    assert not torch.equal(first, rounded)
    assert [("experts as in the file" in runner.about) for runner in runners] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [
        ("down_proj_scales", torch.zeros(6, 128, 2), "scales of torch.float32"),
        (
            "down_proj_scales",
            torch.zeros(6, 128, 3, dtype=torch.uint8),
            r"blocks \(128, 2, 16\) and scales \(128, 3\)",
        ),
        ("down_proj_scales", torch.tensor(1, dtype=torch.uint8), r"shape \(\), which must have 3"),
        (
            "down_proj_blocks",
            torch.zeros(6, dtype=torch.uint8),
            r"down_proj_blocks of the shape \(6,\), which must have 4 dimensions",
        ),
        ("gate_up_proj_bias", torch.zeros(6), r"shape \(6,\), which must have 2 dimensions"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, wrong: Any, reason: str) -> None:
    write_mxfp4(tmp_path, make_model())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.0.mlp.experts.{name}"] = wrong
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=reason):
        load_openvino_runner(replace(CONFIG, path=tmp_path))


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    """The format has NaN as 255, here in the scale of a matrix that is kept as it is."""
    write_mxfp4(tmp_path, make_model())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][3, 5, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    config = replace(CONFIG, path=tmp_path, weights="int8", keeps_experts=True)
    with pytest.raises(ModelError, match=r"experts\.3\.down_proj\.weight are not all finite"):
        load_openvino_runner(config)


@pytest.mark.parametrize("field", ["swiglu_alpha", "swiglu_limit"])
@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf")])
def test_numbers_of_the_gate(field: str, value: float) -> None:
    with pytest.raises(ModelError, match=f"the {field} {value} .* must be a number above 0"):
        check_sizes("m", GptOssConfig(**{field: value}))


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_model()
    write_gguf(tmp_path / "m.gguf", model)
    folder = model_folder(tmp_path / "m.gguf")
    runner = load_openvino_runner(replace(CONFIG, path=folder))
    assert errors_of(runner, model).max() < 1e-5
    kept = load_openvino_runner(replace(CONFIG, path=folder, weights="int8", keeps_experts=True))
    assert "experts as in the file" in kept.about
    assert errors_of(kept, model).median() < 0.1


def test_a_gguf_file_of_two_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of one product that have 4 bits and MXFP4 are rounded to 8 bits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_model()
    write_gguf(tmp_path / "m.gguf", model, of_up="Q4_0")
    config = replace(CONFIG, path=model_folder(tmp_path / "m.gguf"), weights="int8")
    runner = load_openvino_runner(replace(config, keeps_experts=True))
    assert types_of_experts(runner) == ["i8"] * 2 * NUM_LAYERS
    assert errors_of(runner, model).median() < 0.1


def test_a_gguf_file_with_another_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", make_model(), expert_used_count=7)
    with pytest.raises(ConfigError, match=r"expert_used_count 7, but it must be a .* in 1\.\.6"):
        model_folder(tmp_path / "m.gguf")


def test_memory_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than that of the file, which has 4 bits of each."""
    model = make_model()
    write_mxfp4(tmp_path, model)
    of_weights, of_cache = int(1.125 * model.num_parameters()), 10_000_000
    monkeypatch.setattr(context, "free_bytes", lambda device: of_weights + 2 * of_cache)
    device, limits = torch.device("cpu"), LimitsConfig()
    found = context.choose_cache(
        [tmp_path], device, torch.float32, limits, weights="int8", has_blocks=True,
        keeps_experts=True,
    )  # fmt: skip
    assert found.num_bytes == of_cache


def test_converted_weights_may_be_too_large_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 4 bits too, experts in MXFP4 have 8."""
    model = make_model()
    write_mxfp4(tmp_path, model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = replace(CONFIG, path=tmp_path, weights="int4", keeps_experts=True)
    load_openvino_runner(replace(config, weights_cache_bytes=model.num_parameters()))
    assert not [*(tmp_path / "cache").glob("**/weights/*")]
