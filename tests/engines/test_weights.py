"""Weights that are read from files tensor by tensor, and weights that are rounded to 8 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
import pytest
import torch
from local_models import VOCAB_SIZE, make_model, make_runner
from safetensors.torch import load_file, save_file
from test_same_bits import CONFIGS, SIZES
from transformers import LlamaConfig, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.config import model_without_weights
from smartspec_py.engines.checkpoints.rows import TensorRows
from smartspec_py.engines.runtimes.openvino import precision
from smartspec_py.engines.runtimes.openvino import runner as runner_module
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.operators import parameter
from smartspec_py.engines.runtimes.openvino.products import Products
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.openvino.weights import Weights, to_int4, to_int8
from smartspec_py.engines.runtimes.pytorch.causal import load_runner
from smartspec_py.engines.runtimes.runner import RowInput, Runner, RunnerConfig

CONFIG = RunnerConfig(Path(), torch.device("cpu"), torch.float32, 2, 64, VOCAB_SIZE)
PROMPT = [RowInput(0, 0, [5, 6, 7], 1, 3)]


def test_rounding_to_8_bits() -> None:
    """At most half a level off, where a level is 1/127 of the row's largest number."""
    weight = torch.randn(7, 300) * torch.logspace(-3, 3, 7)[:, None]
    weight[2] = 0
    found = to_int8(TensorRows(weight))
    errors = (found.values * found.scale - weight).abs().amax(1)
    assert (errors <= weight.abs().amax(1) / 127 / 2 * 1.001).all()
    assert found.values.abs().amax() == 127


@pytest.mark.parametrize("group", [32, 64, 128])
def test_rounding_to_4_bits(group: int) -> None:
    """At most half a level off, or one where 0 is moved to a level."""
    weight = torch.randn(7, 384) * torch.logspace(-3, 3, 7)[:, None] + 0.5
    weight[2] = 0
    found = to_int4(TensorRows(weight), group)
    low, high = found.values & 15, found.values >> 4
    levels = torch.stack([low, high], -1).flatten(1).unflatten(1, (-1, group))
    errors = (levels - found.zero.float()) * found.scale - weight.unflatten(1, (-1, group))
    assert (errors.abs() <= found.scale * 1.001).all()
    assert errors.abs().mean() < 0.3 * found.scale.mean()


@pytest.mark.parametrize(("weights", "dtypes"), [("int8", ["i8"]), ("int4", ["i8", "u4"])])
def test_every_product_keeps_few_bits(weights: str, dtypes: list[str]) -> None:
    """OpenVINO must not expand the weights of a product: it would read more memory."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    runner = OpenVinoRunner(model, replace(CONFIG, weights=weights))
    nodes = runner.compiled.get_runtime_model().get_ordered_ops()
    products = [n for n in nodes if "FullyConnected" in str(n.get_rt_info()["layerType"].value)]
    assert len(products) == 4 * model.config.num_hidden_layers + 1
    assert sorted({n.input(1).get_element_type().to_string() for n in products}) == dtypes


def test_int4_that_no_group_fits_is_refused() -> None:
    model = make_model("llama")
    with pytest.raises(ModelError, match="int4 needs products whose width 32 divides"):
        OpenVinoRunner(model, replace(CONFIG, weights="int4"))


def test_passes_are_computed_by_the_copy_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 10 tokens gets two more and runs where 12 did. One of 5 replaces the size that was
    not used for the longest time."""
    runner = OpenVinoRunner(make_model("llama"), CONFIG, most_copies=3)
    for num_tokens, sizes in ((12, {12}), (20, {12, 20}), (30, {12, 20, 30}), (10, {12, 20, 30})):
        runner.forward([RowInput(0, 0, [3] * num_tokens, 1, num_tokens)])
        assert set(runner.warm_shapes) >= {size - i for size in sizes for i in range(3)}
    assert len(set(runner.warm_shapes)) == 3 * 3
    runner.forward([RowInput(0, 0, [3] * 5, 1, 5)])
    assert set(runner.warm_shapes) == {3, 4, 5, 10, 11, 12, 28, 29, 30}
    monkeypatch.setattr(runner_module, "COPIED_BYTES", 0)
    without_memory = OpenVinoRunner(make_model("llama"), CONFIG, most_copies=3)
    assert len(without_memory.warm_shapes) == 3


def products_with(weight: torch.Tensor, block: int) -> Products:
    return Products(
        torch.nn.Module(),
        Weights({"head.weight": weight}),
        num_bits=8,
        group=0,
        block=block,
        is_half=False,
    )


@pytest.mark.parametrize("block", [0, 32])
def test_a_tied_embedding_is_counted_once(block: int) -> None:
    """It decides how many compiled copies of the model there are. Those of whole numbers copy the
    scales of the rows, which are not counted then."""
    products = products_with(torch.randn(96, 320), block)
    products.rows("head.weight", op.constant(np.array([1, 2])))
    products.linear(["head"], parameter("states", [1, -1, 320], np.float32))
    assert products.num_bytes == 96 * (320 if block else 320 + 4)


def whole_product(weight: torch.Tensor, states: torch.Tensor, block: int) -> torch.Tensor:
    """The product without VNNI."""
    products = products_with(weight, block)
    given = parameter("states", [1, -1, weight.shape[1]], np.float32)
    graph = ov.Model([op.result(products.linear(["head"], given))], [given])
    compiled = ov.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([states[None].numpy()])[0])[0]


@pytest.mark.parametrize("block", [1, 32, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 33])
def test_products_of_whole_numbers(block: int, num_rows: int) -> None:
    """A few large activations do not spoil the others, if they are spread over blocks."""
    weight, states = torch.randn(96, 320), torch.randn(num_rows, 320)
    states[:, [7, 200]] *= 100
    found, expected = whole_product(weight, states, block), states @ weight.T
    error = (found - expected).norm() / expected.norm()
    assert error < (0.02 if block > 1 else 0.08)
    again = whole_product(weight, states[-1:], block)
    assert torch.equal(found[-1:], again)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_no_sum_of_two_products_is_cut_off(sign: float) -> None:
    """All numbers are as large as they can be. Processors without VNNI add pairs in 16 bits."""
    weight, states = torch.full((64, 1024), sign), torch.ones(9, 1024)
    assert torch.allclose(whole_product(weight, states, 1), torch.full((9, 64), 1024.0 * sign))


@pytest.mark.parametrize(("has_vnni", "sizes"), [(True, {1, 2, 3, 4, 5}), (False, {1, 2, 5})])
def test_padding_does_not_lead_to_a_pass_that_takes_much_longer(
    has_vnni: bool, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without VNNI, a pass over 5 tokens takes longer than one over 4."""
    monkeypatch.setattr(precision, "has_vnni", lambda: has_vnni)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    runner = OpenVinoRunner(model, replace(CONFIG, weights="int8"), most_copies=2)
    for tokens in ([5, 6], [5, 6, 7, 8, 9]):
        runner.forward([RowInput(0, 0, tokens, 1, len(tokens))])
    assert set(runner.warm_shapes) - {0} == sizes


@pytest.mark.parametrize(
    ("changed", "with_vnni", "weights"),
    [
        ({}, True, "int4"),
        ({}, False, "int8"),
        ({"intermediate_size": 4864 + 32}, True, "int8"),  # in groups of 32
        ({"num_hidden_layers": 2}, True, "int8"),
    ],
)
def test_a_large_draft_model_has_4_bits(
    changed: dict[str, int], with_vnni: bool, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one of the shape of Qwen2.5-0.5B."""
    monkeypatch.setattr(precision, "has_vnni", lambda: with_vnni)
    shape = {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    model = model_without_weights(Qwen2Config(**shape | changed))
    assert precision.draft_weights(model) == weights


def test_a_start_warms_every_copy() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    runner = OpenVinoRunner(model, replace(CONFIG, weights="int8"), most_copies=3)
    runner.warm()
    assert {1, 4, 7} <= set(runner.warm_shapes)


def test_a_timed_pass_that_fails_keeps_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = OpenVinoRunner(AutoModelForCausalLM.from_config(CONFIGS["llama"]), CONFIG)
    runner.forward([RowInput(0, 0, [3] * 12, 1, 12)])
    shapes = set(runner.warm_shapes)

    def fail(inputs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(runner, "forward", fail)
    with pytest.raises(MemoryError):
        runner.time_pass(1, 12, 0)
    assert set(runner.warm_shapes) == shapes


def test_blocks_give_memory_back() -> None:
    """Pages that were given back are read as 0. A block takes one page: 32 tokens of 32 numbers. Of
    two rows of 64 tokens and one more, there are six blocks, and one for padding."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"num_key_value_heads": 1}))
    runner = OpenVinoRunner(model, CONFIG)
    for tensor in runner.cache.tensors.values():
        tensor.data[:] = 1
    runner.cache.drop([1, 2, 5])
    for tensor in runner.cache.tensors.values():
        used = tensor.data.reshape(len(tensor.data), -1).any(1)
        assert used.tolist() == [True, False, False, True, True, False, True]


@pytest.mark.parametrize("form", ["safetensors", "shards", "bin"])
def test_files_give_what_the_model_in_memory_gives(tmp_path: Path, form: str) -> None:
    model = make_model("qwen2, one key head")
    expected = OpenVinoRunner(model, CONFIG).forward(PROMPT).logits
    if form == "bin":
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        size = "10KB" if form == "shards" else "1GB"
        model.save_pretrained(tmp_path, max_shard_size=size)
    runner = load_openvino_runner(replace(CONFIG, path=tmp_path))
    assert torch.equal(runner.forward(PROMPT).logits, expected)


def test_wrong_weights_are_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][0, 3] = float("nan")
    save_file(weights, path)
    with pytest.raises(ModelError, match=f"{name} are not all finite"):
        load_openvino_runner(replace(CONFIG, path=tmp_path))
    del weights[name]
    save_file(weights, path)
    with pytest.raises(ModelError, match=f"lack 1 tensors, such as {name}"):
        load_openvino_runner(replace(CONFIG, path=tmp_path))


@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_every_tensor_is_used(tmp_path: Path, load: Callable[[RunnerConfig], Runner]) -> None:
    """A bias of 0 and old constants change nothing. Other files are not read."""
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    layer = "model.layers.0.self_attn"
    weights[f"{layer}.q_proj.bias"] = torch.zeros(32)
    weights[f"{layer}.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, path)
    save_file(
        {"layers.0.attention.wq.weight": torch.ones(1)}, tmp_path / "consolidated.safetensors"
    )
    config = replace(CONFIG, path=tmp_path)
    expected = make_runner(model, with_openvino=load is load_openvino_runner)
    assert torch.equal(load(config).forward(PROMPT).logits, expected.forward(PROMPT).logits)
    weights[f"{layer}.q_proj.bias"][3] = 1
    save_file(weights, path)
    with pytest.raises(ModelError, match=f"have the tensor {layer}.q_proj.bias, which the model"):
        load(config)


@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_a_tied_output_layer_is_the_embedding(
    tmp_path: Path, load: Callable[[RunnerConfig], Runner]
) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path)
    load(replace(CONFIG, path=tmp_path))
    weights["lm_head.weight"][1, 2] += 1
    save_file(weights, path)
    with pytest.raises(ModelError, match="an output layer that is not the embedding: set tie_word"):
        load(replace(CONFIG, path=tmp_path))


@pytest.mark.parametrize("weights", ["stored", "int8"])
@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_a_tied_output_layer_may_be_stored_as_the_only_one_of_the_two(
    tmp_path: Path, load: Callable[[RunnerConfig], Runner], weights: str
) -> None:
    """As `safetensors.torch.save_model` writes it."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    config = replace(CONFIG, path=tmp_path)
    if load is load_openvino_runner:
        config = replace(config, weights=weights)
    expected = load(config).forward(PROMPT).logits
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path, {"format": "pt"})
    assert torch.equal(load(config).forward(PROMPT).logits, expected)


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (torch.ones(48, 32, dtype=torch.int8), "of the type int8, which must be one of float32"),
        (torch.ones(48, 32).to(torch.float8_e4m3fn), "of the type float8_e4m3fn, which must be"),
        (torch.ones(32, 48), r"of the shape \(32, 48\), but its config.json says \(48, 32\)"),
        (torch.ones(()), r"of the shape \(\), but its"),
        (torch.ones(1, 32), r"of the shape \(1, 32\), but its"),
    ],
)
@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_tensors_of_another_type_or_shape_are_refused(
    tmp_path: Path, load: Callable[[RunnerConfig], Runner], changed: torch.Tensor, reason: str
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {NAME: changed}, path)
    with pytest.raises(ModelError, match=f"have the tensor {NAME} {reason}"):
        load(replace(CONFIG, path=tmp_path))


@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_double_precision_is_read(tmp_path: Path, load: Callable[[RunnerConfig], Runner]) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(path).items()}, path)
    expected = make_runner(model, with_openvino=load is load_openvino_runner)
    found = load(replace(CONFIG, path=tmp_path))
    assert torch.equal(found.forward(PROMPT).logits, expected.forward(PROMPT).logits)


@pytest.mark.parametrize("is_bin", [True, False])
@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_a_tensor_in_two_shards_is_refused(
    tmp_path: Path, load: Callable[[RunnerConfig], Runner], is_bin: bool
) -> None:
    model = make_model("llama")
    model.config.save_pretrained(tmp_path)
    tensors = {name: one.detach().clone() for name, one in model.named_parameters()}
    file = "{}.bin" if is_bin else "{}.safetensors"
    for number, part in enumerate([tensors, {NAME: tensors[NAME] + 1}]):
        (torch.save if is_bin else save_file)(part, tmp_path / file.format(number))
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.format(0))}
    index["weight_map"][NAME] = file.format(1)
    single = "pytorch_model.bin" if is_bin else "model.safetensors"
    (tmp_path / f"{single}.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"has the tensor {NAME}, and so has another weight file"):
        load(replace(CONFIG, path=tmp_path))


@pytest.mark.parametrize("load", [load_openvino_runner, load_runner])
def test_a_type_that_pytorch_has_not_is_named(
    tmp_path: Path, load: Callable[[RunnerConfig], Runner]
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {NAME: torch.zeros(3, dtype=torch.uint8)}
    save_file(tensors, path)
    old, new = b'"dtype":"U8","shape":[3]', b'"dtype":"F6_E2M3","shape":[4]'
    content = path.read_bytes()
    assert old in content
    size = int.from_bytes(content[:8], "little") + len(new) - len(old)
    path.write_bytes(size.to_bytes(8, "little") + content[8:].replace(old, new))
    with pytest.raises(ModelError, match=r"cannot be loaded .*F6_E2M3"):
        load(replace(CONFIG, path=tmp_path))


class Opened:
    """What unpickling this object would do."""

    def __reduce__(self) -> Any:
        return print, ("ran",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({NAME: Opened()}, "it has more than tensors, or is damaged"),
        ({NAME: 5}, "does not have tensors alone"),
        ([torch.ones(2)], "does not have tensors alone"),
    ],
)
def test_a_pickle_of_other_things_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, reason: str
) -> None:
    make_model("llama").config.save_pretrained(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=reason):
        load_openvino_runner(replace(CONFIG, path=tmp_path))
    assert "ran" not in capsys.readouterr().out
