"""Gemma 4 in GGUF files as llama.cpp writes them: logits, tokens, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import GEMMA_PARTS, add_fields, file_name
from tokenizers import Tokenizer
from transformers import Gemma4TextConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.model_files import end_tokens
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig
from smartspec_py.faults import ConfigError

pytestmark = pytest.mark.usefixtures("own_cache")

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", "<|tool_call>", "<|tool_response>"]
BYTES = [f"<0x{number:02X}>" for number in range(256)]
LETTERS = ["a", "b", "\u2581", "ab", "\u2581ab", "\n", "\n\n"]
TOKENS = [*SPECIAL, *BYTES, *LETTERS]
VOCAB = len(TOKENS)
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gemma4",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * 5 + [4] * 2 + [6] * 256 + [1] * len(LETTERS),
    "tokenizer.ggml.scores": [0.0] * VOCAB,
    "tokenizer.ggml.merges": ["a b", "\u2581 ab", "\n \n"],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": False,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 11,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0,
}
SMALL = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 5.0,
}
LARGE = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
EXPERTS = LARGE | {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
NAMES = {  # longer ones first
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    **GEMMA_PARTS,
}


def make_model(**more: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**SIZES | more)).eval()
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or "layer_scalar" in name or "router" in name:
                weight.add_(0.2 * torch.randn_like(weight))
    return model


def fields_of(config: Any) -> dict[str, Any]:
    """The fields that llama.cpp's converter writes."""
    num, num_shared = config.num_hidden_layers, config.num_kv_shared_layers
    is_sliding = [kind == "sliding_attention" for kind in config.layer_types]
    settings = config.to_dict()
    wide = config.per_layer_config[1]
    inner = [settings["intermediate_size"] * (1 + (i >= num - num_shared)) for i in range(num)]
    fields = {
        "context_length": settings["max_position_embeddings"],
        "embedding_length": settings["hidden_size"],
        "block_count": num,
        "feed_forward_length": inner if settings["use_double_wide_mlp"] else inner[0],
        "attention.head_count": settings["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": settings["rms_norm_eps"],
        "attention.key_length": wide.head_dim,
        "attention.value_length": wide.head_dim,
        "attention.key_length_swa": SIZES["head_dim"],
        "attention.value_length_swa": SIZES["head_dim"],
        "attention.sliding_window": settings["sliding_window"],
        "attention.sliding_window_pattern": is_sliding,
        "attention.shared_kv_layers": num_shared,
        "attention.head_count_kv": SIZES["num_key_value_heads"],
        "embedding_length_per_layer_input": settings["hidden_size_per_layer_input"],
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": wide.head_dim,
        "rope.dimension_count_swa": SIZES["head_dim"],
    }
    if settings["attention_k_eq_v"]:
        nums = {True: SIZES["num_key_value_heads"], False: wide.num_key_value_heads}
        fields["attention.head_count_kv"] = [nums[flag] for flag in is_sliding]
    if cap := settings["final_logit_softcapping"]:
        fields["final_logit_softcapping"] = cap
    if settings["enable_moe_block"]:
        fields["expert_count"] = settings["num_experts"]
        fields["expert_used_count"] = settings["top_k_experts"]
        fields["expert_feed_forward_length"] = settings["moe_intermediate_size"]
    return {f"gemma4.{key}": value for key, value in fields.items()} | TOKENIZER


def write(path: Path, model: Any, left_out: str = "", **changed: Any) -> None:
    """changed: fields; None leaves one out. left_out: a tensor that the file has not."""
    writer = gguf.GGUFWriter(path, "gemma4")
    add_fields(writer, fields_of(model.config) | changed)
    tensors = dict(model.state_dict())
    del tensors["lm_head.weight"]
    num = SIZES["num_hidden_layers"]
    for layer in range(num - model.config.num_kv_shared_layers, num):  # published files have them
        for part in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{part}.weight"] = torch.ones(16, 32)
    for parameter, tensor in tensors.items():
        name = file_name(parameter, NAMES)
        if name != left_out:
            writer.add_tensor(name, tensor.numpy())
    if left_out != "rope_freqs.weight":
        divisors = np.array([1.0, 1.0] + [1e30] * 6, np.float32)
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("more", [SMALL, LARGE, EXPERTS])
def test_logits_are_those_of_the_original(tmp_path: Path, more: dict[str, Any]) -> None:
    model = make_model(**more)
    write(tmp_path / "m.gguf", model)
    folder = model_folder(tmp_path / "m.gguf")
    config, expected = load_config(folder, 96).to_dict(), model.config.to_dict()
    assert config["rope_parameters"] == expected["rope_parameters"]
    tokens = [(7 * i) % VOCAB for i in range(40)]
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    runner = load_openvino_runner(
        RunnerConfig(folder, torch.device("cpu"), torch.float32, 1, 96, VOCAB)
    )
    found = runner.forward([RowInput(0, 0, tokens, 40, 40)]).logits
    torch.testing.assert_close(found, logits, atol=2e-4 * float(logits.abs().max()), rtol=0.0)


def test_the_tokenizer(tmp_path: Path) -> None:
    """Merges are those of the file. A letter that is no token becomes bytes."""
    write(tmp_path / "m.gguf", make_model(**LARGE))
    folder = model_folder(tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "ab ab\n\n\u00e9<|tool_call>b"
    found = tokenizer.encode(text)
    marks = ["<0xC3>", "<0xA9>", "<|tool_call>", "b"]
    assert found.tokens == ["<bos>", "ab", "\u2581ab", "\n\n", *marks]
    assert tokenizer.decode(found.ids[1:], skip_special_tokens=False) == text
    assert end_tokens(folder, VOCAB, tokenizer) == (1, 4, 6)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"gemma4.attention.sliding_window_pattern": [True, False]}, "pattern with 4 flags"),
        ({"gemma4.attention.shared_kv_layers": 4}, r"shared_kv_layers 4, .* in 0\.\.3"),
        ({"gemma4.feed_forward_length": [48, 48, 48, 60]}, "other widths than twice the first"),
        ({"gemma4.attention.head_count_kv": [2, 1, 1, 1]}, "other numbers in layers of one kind"),
        ({"gemma4.rope.dimension_count_swa": 4}, "rope.dimension_count_swa 4"),
        ({"gemma4.rope.scaling.factor": 2.0}, "rotary scaling"),
        ({"gemma4.attention.scale": 0.5}, r"the field gemma4\.attention\.scale"),
        ({"left_out": "rope_freqs.weight"}, r"no tensor rope_freqs\.weight"),
        ({"left_out": "blk.1.layer_output_scale.weight"}, "no tensor blk.1.layer_output_scale"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    write(tmp_path / "m.gguf", make_model(**LARGE), **changed)
    with pytest.raises(ConfigError, match=text):
        model_folder(tmp_path / "m.gguf")
