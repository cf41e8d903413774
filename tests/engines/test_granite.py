"""Granite with experts and Granite 4: what files give, adapters, texts with drafts, and what is
refused. Whether bits depend on the pass is in test_same_bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from adapter_files import merged, random_adapter, write_adapter
from gguf_files import add_fields, few_fields, file_name, file_parameters, permuted
from net_models import SIZES, tokens_of
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.constants import DRAFT_MODEL
from smartspec_py.engines.checkpoints.adapters import Adapters, linear_layers, load_adapter
from smartspec_py.engines.checkpoints.checks import ModelError, check_model
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.recurrent import state_shapes
from smartspec_py.engines.checkpoints.sizes import check_sizes
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.pytorch.causal import load_runner
from smartspec_py.engines.runtimes.runner import RowInput as Row
from smartspec_py.engines.runtimes.runner import Runner, RunnerConfig
from smartspec_py.faults import ConfigError
from smartspec_py.serving.build import build_engine
from smartspec_testing.local import generate, serving

pytestmark = pytest.mark.slow  # so that they run beside the others

CPU = torch.device("cpu")
TINY = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
LONG = "one two three four five six seven eight nine ten " * 12
TOKENS = [5 * i % 2048 for i in range(45)]
LAYERS = ["mamba", "mamba", "attention", "mamba"]
"""As published files name them."""

OWN = {
    **{name: SIZES[name] for name in SIZES if not name.startswith(("linear", "head_dim"))},
    "initializer_range": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
    "rms_norm_eps": 1e-2,
    "rope_theta": 1e6,
}
OF_4 = {
    "layer_types": LAYERS,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "nope",
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
CASES: dict[str, dict[str, Any]] = {
    "states": OF_4 | {"intermediate_size": 96},
    "states and experts": OF_4 | EXPERTS,
    "groups of heads": OF_4
    | {
        "intermediate_size": 96,
        "mamba_n_groups": 2,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "time_step_limit": [0.1, 0.9],
        "position_embedding_type": "rope",
    },
    "experts": OF_4 | EXPERTS | {"layer_types": ["attention"] * 4, "attention_bias": True},
    "plain": OF_4
    | {
        "layer_types": ["attention"] * 4,
        "position_embedding_type": "rope",
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "granitemoe": EXPERTS,
}


def make_model(case: str, **more: Any) -> Any:
    torch.manual_seed(0)
    kind = "granitemoe" if case == "granitemoe" else "granitemoehybrid"
    config = AutoConfig.for_model(kind, **OWN | CASES[case] | more)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(0.05 * torch.randn_like(weight))
            if name.endswith("A_log"):
                weight.uniform_(-4.0, 0.5)  # so that states remember
            if name.endswith("dt_bias"):
                weight.uniform_(-2.0, 0.0)
    return model


def write_model(folder: Path, case: str, model: Any) -> None:
    """With the names of layers in published files."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    layers = {key: CASES[case][key] for key in ("layer_types",) if key in CASES[case]}
    path.write_text(json.dumps(json.loads(path.read_text()) | layers))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)


def logits_of(runner: Runner) -> torch.Tensor:
    """In three passes, whose bounds are no multiples of 8."""
    bounds = [(0, 13), (13, 20), (20, len(TOKENS))]
    return torch.cat(
        [runner.forward([Row(0, i, TOKENS[i:end], end - i)]).logits for i, end in bounds]
    )


def check_logits(folder: Path, model: Any, load: Callable[[RunnerConfig], Runner]) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    found = logits_of(load(RunnerConfig(folder, CPU, torch.float32, 1, 64, 2048)))
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4 * largest)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    """PyTorch computes those that have neither states nor, with other names, experts."""
    model = make_model(case)
    write_model(tmp_path, case, model)
    check_model("the target", tmp_path)
    check_logits(tmp_path, model, load_openvino_runner)
    if case in ("plain", "granitemoe"):
        check_logits(tmp_path, model, load_runner)


FILE_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.gate": "ffn_gate_exps.weight",
    "block_sparse_moe.experts.up": "ffn_up_exps.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
}


def write_file(path: Path, case: str, model: Any, **changed: Any) -> None:
    """As llama.cpp's converter writes it."""
    config, settings = model.config, CASES[case]
    has_states = "mamba" in settings.get("layer_types", ())
    kind = "granitehybrid" if has_states else "granitemoe"
    num_keys = config.num_key_value_heads
    fields: dict[str, Any] = {
        "context_length": 1 << 20,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": num_keys,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "vocab_size": config.vocab_size,
    }
    if case != "granitemoe":
        fields |= {
            "attention.head_count_kv": [num_keys * (kind == "attention") for kind in LAYERS]
            if has_states
            else [num_keys] * config.num_hidden_layers,
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.time_step_rank": config.mamba_n_heads,
        }
    if config.num_local_experts:
        fields |= {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
        }
    fields = {f"{kind}.{key}": value for key, value in fields.items()}
    fields |= {f"tokenizer.ggml.{key}": value for key, value in few_fields(2048).items()}
    writer = gguf.GGUFWriter(path, kind)
    add_fields(writer, fields | changed)
    shared = "_shexp" if config.num_local_experts else ""
    parts = FILE_PARTS | {"shared_mlp.output_linear": f"ffn_down{shared}"}
    heads = {"attn_q": config.num_attention_heads, "attn_k": num_keys}
    for parameter, weight in file_parameters(model):
        if "shared_mlp.input_linear" in parameter:
            layer = parameter.partition(".shared_mlp")[0].replace("model.layers", "blk")
            for part, half in zip(("gate", "up"), weight.chunk(2), strict=True):
                name = f"{layer}.ffn_{part}{shared}.weight"
                writer.add_tensor(name, half.detach().contiguous().numpy())
            continue
        name, numbers = file_name(parameter, parts), weight.detach().contiguous().numpy()
        if name.split(".")[-2] in heads:
            numbers = permuted(numbers, heads[name.split(".")[-2]])
        if parameter.endswith(("A_log", ".D")):
            numbers = (-weight.exp() if "A_log" in parameter else weight).detach().numpy()
            numbers = numbers[:, None]
        if "conv1d.weight" in parameter:
            numbers = numbers[:, 0]
        if "mamba.norm" in parameter:
            numbers = numbers.reshape(config.mamba_n_groups, -1)
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


OF_FILES = [case for case in CASES if case != "plain"]
"""A plain one is a file of `granite`, as in test_gguf."""


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("case", OF_FILES)
def test_a_gguf_file(tmp_path: Path, case: str) -> None:
    """It has no bias of the states' products and no limits of their steps."""
    model = make_model(case, mamba_proj_bias=False, time_step_limit=(0.0, float("inf")))
    write_file(tmp_path / "m.gguf", case, model)
    check_logits(model_folder(tmp_path / "m.gguf"), model, load_openvino_runner)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("attention.head_count_kv", [0, 0, 3, 0], "one number that divides them"),
        ("attention.head_count_kv", ["0", "0", "2", "0"], "a list of 4 numbers"),
        ("attention.head_count_kv", [0, 0, 2], "a list of 4 numbers"),
        ("attention.head_count_kv", [0, 0, 0, 0], "one number that divides them"),
        ("ssm.inner_size", 250, "does not divide by them and by 128"),
        ("ssm.state_size", 25, r"ssm_in\.weight of the shape"),
        ("ssm.other", 1, r"ssm\.other, which cannot be read"),
        ("expert_shared_feed_forward_length", 7, "expert_shared_feed_forward_length"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, field: str, value: Any, words: str) -> None:
    changed = {f"granitehybrid.{field}": value}
    write_file(tmp_path / "m.gguf", "states", make_model("states"), **changed)
    with pytest.raises(ConfigError, match=words):
        model_folder(tmp_path / "m.gguf")


def test_an_adapter_of_all_layers(tmp_path: Path) -> None:
    """Its files have the rows of gate and up in one layer."""
    model = make_model("states")
    write_model(tmp_path / "m", "states", model)
    hf_config = load_config(tmp_path / "m", 64)
    shapes = {
        name: tuple(layer.weight.shape)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    }
    given = random_adapter("a", shapes, 4)
    folder = write_adapter(tmp_path / "a", given)
    adapters = Adapters([load_adapter("a", folder, linear_layers(hf_config))])
    config = RunnerConfig(tmp_path / "m", CPU, torch.float32, 1, 64, 2048, adapters=adapters)
    found = load_openvino_runner(config).forward([Row(0, 0, TOKENS, 45, 45, adapter=1)]).logits
    with torch.inference_mode():
        changed = merged(model, Adapters([given]), "a")
        expected = changed(torch.tensor([TOKENS]), use_cache=False).logits[0]
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4 * largest)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A target with states and experts, and as a draft the same, disturbed a little."""
    root, case = tmp_path_factory.mktemp("granite"), "states and experts"
    model = make_model(case)
    for name in ("target", "draft"):
        write_model(root / name, case, model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.002 * torch.randn_like(weight))
    models = {"model": str(root / "target"), "draft": str(root / "draft")}
    few = {"max_sequences": 4, "max_draft_len": 9, "max_context_len": 512, "profile_s": 0.0}
    own = {"kind": "local", "device": "cpu", "num_threads": 1, **models}
    config = ServerConfig.model_validate({"engine": own, "limits": few})
    with serving(build_engine(config, root), config) as made:
        yield made


def test_texts_do_not_depend_on_drafts(server: Any) -> None:
    samplings: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"repetition_penalty": 1.2}]
    asked = [
        GenerateParams(f"{LONG[: 30 * n]} Q{n}:", 40, seed=n + 1, policy="none", **samplings[n % 3])
        for n in range(5)
    ]
    expected = tokens_of(generate(server, asked))
    drafted = [replace(one, policy="fixed:9", proposer=DRAFT_MODEL) for one in asked]
    found = generate(server, drafted)
    assert tokens_of(found) == expected
    assert sum(sink.progress.num_accepted for sink in found) > 60


def test_a_conversation_continues_at_a_kept_state(server: Any) -> None:
    [first] = generate(server, [GenerateParams(LONG, 8, policy="none")])
    following = GenerateParams(LONG + "and so on", 8, policy="none")
    [again] = generate(server, [following])
    [alone] = generate(server, [replace(following, reuse_prefix=False)])
    assert again.progress.num_cached == first.last.num_input_tokens // 8 * 8 > 270
    assert again.tokens == alone.tokens


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("mamba_n_groups", 3, "a whole number that divides the 8 mamba_n_heads"),
        ("mamba_d_state", 0, r"a whole number in 1\.\.100000000"),
        ("mamba_d_conv", 9, r"a whole number in 1\.\.8"),
        ("time_step_limit", [0.5, 0.1], "two numbers from 0, the smaller first"),
        ("num_experts_per_tok", 5, r"a whole number in 1\.\.4"),
    ],
)
def test_impossible_numbers(field: str, value: Any, rule: str) -> None:
    config = AutoConfig.for_model(
        "granitemoehybrid", **OWN | CASES["states and experts"] | {field: value}
    )
    with pytest.raises(ModelError, match=f"m has the {field} .*, which must be {rule}"):
        check_sizes("m", config)


def test_layers_with_states_alone_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "states", make_model("states"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": ["mamba"] * 4}))
    config = ServerConfig.model_validate({"engine": {"model": str(tmp_path), "device": "cpu"}})
    with pytest.raises(ConfigError, match="type granitemoehybrid with this config"):
        build_engine(config, tmp_path)


def test_sizes_of_states() -> None:
    config = AutoConfig.for_model("granitemoehybrid", **OWN | CASES["states"])
    assert state_shapes(config) == (3, (8, 24, 32), 256 + 2 * 24 + 8, 4)
