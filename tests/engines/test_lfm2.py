"""LFM2: texts with drafts, conversations, GGUF files and what is refused. Whether it gives what
Transformers gives is in test_model_types, and whether bits depend on the pass in test_same_bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import add_fields, few_fields, file_name, file_parameters
from net_models import SIZES, tokens_of
from transformers import Lfm2Config, Lfm2MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.constants import DRAFT_MODEL
from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.experts import EXPERT_BIAS
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.recurrent import state_shapes
from smartspec_py.engines.checkpoints.sizes import check_sizes
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.short_convs import KEPT, PAST, TAPS, ConvStates
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig
from smartspec_py.faults import ConfigError
from smartspec_py.serving.build import build_engine
from smartspec_testing.local import generate, serving

TINY = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
LONG = "one two three four five six seven eight nine ten " * 12
LAYERS = ["conv", "conv", "full_attention", "conv"]


def make_config(**more: Any) -> Any:
    sizes = {name: SIZES[name] for name in SIZES if not name.startswith("linear")}
    return Lfm2Config(**sizes | {"layer_types": LAYERS} | more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and as a draft the same with its weights disturbed a little."""
    root = tmp_path_factory.mktemp("lfm2")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config())
    for name in ("target", "draft"):
        model.save_pretrained(root / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / file, root / name)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.004 * torch.randn_like(weight))
    return root


def config_of(folder: Path, **limits: Any) -> ServerConfig:
    models = {"model": str(folder / "target"), "draft": str(folder / "draft")}
    few = {"max_sequences": 4, "max_draft_len": 9, "max_context_len": 512, "profile_s": 0.0}
    own = {"kind": "local", "device": "cpu", "num_threads": 1, **models}
    return ServerConfig.model_validate({"engine": own, "limits": few | limits})


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Any]:
    config = config_of(folder)
    with serving(build_engine(config, folder), config) as made:
        yield made


def asked(num: int, **more: Any) -> list[GenerateParams]:
    samplings: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"repetition_penalty": 1.2}]
    return [
        GenerateParams(f"{LONG[: 30 * n]} Q{n}:", 40, seed=n + 1, **samplings[n % 3], **more)
        for n in range(num)
    ]


def test_texts_do_not_depend_on_drafts(server: Any) -> None:
    """Of a draft model that convolves, too. What preemption does is in test_recurrent."""
    expected = tokens_of(generate(server, asked(5, policy="none")))
    found = generate(server, asked(5, policy="fixed:9", proposer=DRAFT_MODEL))
    assert tokens_of(found) == expected
    assert sum(sink.progress.num_accepted for sink in found) > 80


def test_a_conversation_continues_at_a_kept_state(server: Any) -> None:
    [first] = generate(server, [GenerateParams(LONG, 8, policy="none")])
    following = GenerateParams(LONG + "and so on", 8, policy="none")
    [again] = generate(server, [following])
    [alone] = generate(server, [replace(following, reuse_prefix=False)])
    assert again.progress.num_cached == first.last.num_input_tokens // 8 * 8 > 270
    assert again.tokens == alone.tokens


def write_file(path: Path, model: Any, **changed: Any) -> None:
    """As llama.cpp writes it."""
    config, has_experts = model.config, model.config.model_type == "lfm2_moe"
    names = {
        "model.embed_tokens": "token_embd",
        "model.embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "feed_forward.expert_bias": "exp_probs_b.bias",
        "feed_forward.experts.gate": "ffn_gate_exps.weight",
        "feed_forward.experts.up": "ffn_up_exps.weight",
        "feed_forward.experts.down_proj": "ffn_down_exps.weight",
        "feed_forward.gate.": "ffn_gate_inp.",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w2": "ffn_down",
        "feed_forward.w3": "ffn_up",
        "conv.conv": "shortconv.conv",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
    }
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": model.model.layers[0].feed_forward.w1.out_features,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [0, 0, config.num_key_value_heads, 0],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "shortconv.l_cache": config.conv_L_cache,
        "vocab_size": config.vocab_size,
    }
    if has_experts:
        fields |= {
            "leading_dense_block_count": config.num_dense_layers,
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_gating_func": 2,
        }
    kind = "lfm2moe" if has_experts else "lfm2"
    fields = {f"{kind}.{key}": value for key, value in fields.items()}
    fields |= {f"tokenizer.ggml.{key}": value for key, value in few_fields(2048).items()}
    fields["tokenizer.ggml.pre"] = "lfm2"
    writer = gguf.GGUFWriter(path, kind)
    add_fields(writer, fields | {"tokenizer.ggml.bos_token_id": 1} | changed)
    biases = [one for one in model.named_buffers() if one[0].endswith(EXPERT_BIAS)]
    for parameter, weight in [*file_parameters(model), *biases]:
        numbers = weight.detach().numpy()
        numbers = numbers[:, 0] if "conv.conv" in parameter else numbers
        writer.add_tensor(file_name(parameter, names), numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def small_model(has_experts: bool = False) -> Any:
    torch.manual_seed(0)
    config = make_config()
    if has_experts:
        sizes = config.to_dict() | {"num_experts": 4, "num_experts_per_tok": 2}
        sizes |= {"num_dense_layers": 1, "moe_intermediate_size": 64}
        del sizes["model_type"]
        config = Lfm2MoeConfig(**sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, bias in model.named_buffers():
        if name.endswith(EXPERT_BIAS):
            torch.nn.init.uniform_(bias, -0.5, 0.5)
    return model


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("has_experts", [False, True])
def test_a_gguf_file(tmp_path: Path, has_experts: bool) -> None:
    model = small_model(has_experts)
    write_file(tmp_path / "m.gguf", model)
    tokens = [5 * i % 2048 for i in range(30)]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    folder = model_folder(tmp_path / "m.gguf")
    assert load_config(folder, 64).layer_types == LAYERS
    config = RunnerConfig(folder, torch.device("cpu"), torch.float32, 1, 64, 2048)
    found = load_openvino_runner(config).forward([RowInput(0, 0, tokens, 30, 30)]).logits
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4 * largest)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("attention.head_count_kv", [0, 1, 2, 0], "one number that divides them"),
        ("attention.head_count_kv", [0, 0, 3, 0], "one number that divides them"),
        ("attention.sliding_window", 7, "sliding_window, which cannot be read"),
        ("shortconv.l_cache", 4, r"shortconv\.conv\.weight of the shape"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, field: str, value: Any, words: str) -> None:
    write_file(tmp_path / "m.gguf", small_model(), **{f"lfm2.{field}": value})
    with pytest.raises(ConfigError, match=words):
        model_folder(tmp_path / "m.gguf")


def test_what_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match=r"conv_L_cache 0 .* a whole number in 1\.\."):
        check_sizes("m", make_config(conv_L_cache=0))
    shutil.copytree(folder / "target", tmp_path / "target")
    shutil.copytree(folder / "draft", tmp_path / "draft")
    path = tmp_path / "target" / "config.json"
    for layers, words in (
        (["conv"] * 4, "type lfm2 with this config are not supported"),
        (["sliding_attention", *LAYERS[1:]], "layers of type sliding_attention"),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": layers}))
        with pytest.raises(ConfigError, match=words):
            build_engine(config_of(tmp_path), tmp_path)


def test_taps_of_a_pass() -> None:
    """Of each token: its own inputs, and those of the two before it."""
    shapes = state_shapes(make_config())
    assert shapes == (3, (), 128, 3)
    assert shapes.num_past(2) == 2 + 8 + 2
    assert shapes.row_bytes(2) == 4 * 3 * 12 * 128
    assert shapes.prefix_bytes == 4 * 3 * 2 * 128
    states = ConvStates(shapes, num_rows=2, num_back=2, num_kept=3)
    given = states.begin([RowInput(0, 0, [5] * 19, 1, 19, kept_state=(16, 1))], [19], 20)
    assert given[PAST].tolist() == []
    assert given[TAPS].T[[0, 1, 2, 18]].tolist() == [
        [20, 20, 0],
        [20, 0, 1],
        [0, 1, 2],
        [16, 17, 18],
    ]
    assert given[TAPS][:, 19].tolist() == [20] * 3  # there is no such token
    assert given[KEPT].tolist() == [*range(7, 19)]
    results = [np.arange(7.0, 19.0)[:, None].repeat(128, 1)] * 3  # each token's number
    states.finish(results)
    # Beside another row, with a lone token of a prompt and its copy; two tokens are taken back.
    rows = [RowInput(1, 0, [5], 1, num_prompt=1), RowInput(0, 17, [5] * 3, 3)]
    given = states.begin(rows, [2, 3], 6)
    past = states.tensors["conv_inputs.2"].data
    assert past[given[PAST]][:, 0].tolist() == [15.0, 16.0]
    assert given[TAPS].tolist() == [[8, 8, 0, 1, 4, 8], [8, 2, 1, 4, 5, 8], [2, 3, 4, 5, 6, 8]]
    assert given[KEPT].tolist() == [0, 2, 3, 4]
    states.finish([np.full((4, 128), 50.0)] * 3)
    # A prefix of 16 tokens begins in the other row.
    states.load(1, 1, 16)
    given = states.begin([RowInput(1, 16, [5], 1)], [1], 1)
    assert past[given[PAST]][:, 0].tolist() == [14.0, 15.0]
