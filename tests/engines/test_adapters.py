"""LoRA adapters: their files, and their passes against the model into which one is merged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import merged, random_adapter, random_adapters, shapes_of, write_adapter
from local_models import OPENVINO, VOCAB_SIZE, make_model, make_runner

from smartspec_py.engines.checkpoints.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from smartspec_py.engines.checkpoints.adapters import Adapters, linear_layers, load_adapter
from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.runtimes.pytorch.causal import CausalModel
from smartspec_py.engines.runtimes.pytorch.compiled import merge_products
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig

SHAPES = {"layers.0.q": (6, 4), "layers.0.v": (2, 4)}
Q = "base_model.model.layers.0.q.lora_{}.weight"


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 1.0),
        ({"lora_alpha": 12}, 3.0),
        ({"lora_alpha": 12, "use_rslora": True}, 6.0),
        ({"lora_alpha": 2.0, "layers_to_transform": [0], "layers_pattern": "layers"}, 0.5),
    ],
)
def test_the_files_of_peft(tmp_path: Path, fields: dict[str, Any], scale: float) -> None:
    """Rank 4: the scale is alpha / 4, or alpha / 2 if it is rank-stabilised."""
    given = random_adapter("sql", SHAPES, rank=4)
    found = load_adapter("sql", write_adapter(tmp_path, given, **fields), SHAPES)
    assert (found.name, found.rank, set(found.pairs)) == ("sql", 4, set(SHAPES))
    for layer, (a, b) in found.pairs.items():
        assert torch.equal(a, given.pairs[layer][0])
        assert torch.equal(b, given.pairs[layer][1] * scale)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "the peft_type 'IA3' in its adapter_config.json, which must be one"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' .* one of CAUSAL_LM: use"),
        ({"bias": "all"}, "bias 'all' .* one of none"),
        ({"use_dora": True}, "use_dora True .* left out"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] .* left out"),
        ({"rank_pattern": {"q": 2}}, r"rank_pattern \{'q': 2\} .* left out"),
        ({"alpha_pattern": {"q": 2}}, "alpha_pattern .* left out"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices .* left out"),
        ({"target_parameters": ["experts"]}, "target_parameters .* left out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication .* left out"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True .* left out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' .* one of True, False, gauss"),
        ({"a_new_kind": 1}, "a_new_kind 1 .* left out"),
        ({"r": 0}, "the r 0 .* a whole number in 1..512"),
        ({"r": 5}, r"lora_A.weight of the shape \(4, 4\), but with an r of 5 .* needs \(5, 4\)"),
        ({"lora_alpha": "8"}, "lora_alpha '8' .* a finite number"),
    ],
)
def test_other_configurations_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    folder = write_adapter(tmp_path, random_adapter("sql", SHAPES, rank=4), **fields)
    with pytest.raises(ModelError, match=words) as caught:
        load_adapter("sql", folder, SHAPES)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"base_model.model.layers.1.q.lora_A.weight": (4, 4)}, "layers.1.q.lora_A.weight, which"),
        ({"base_model.model.layers.0.q.lora_magnitude_vector": (6,)}, "magnitude_vector, which is"),
        ({"base_model.model.embed.lora_embedding_A": (4, 9)}, "lora_embedding_A, which is no matr"),
        (
            {Q.format("B"): (5, 4)},
            r"lora_B.weight of the shape \(5, 4\), .* needs \(6, 4\): use",
        ),
    ],
)
def test_other_tensors_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], words: str
) -> None:
    made = {name: torch.ones(shape) for name, shape in tensors.items()}
    folder = write_adapter(tmp_path, random_adapter("sql", SHAPES, rank=4), made)
    with pytest.raises(ModelError, match=words):
        load_adapter("sql", folder, SHAPES)


WHOLE = ("language_model.model.", "model.language_model.")
"""Beginnings of names in models that read images, of Transformers 4 and 5."""


@pytest.mark.parametrize("prefix", WHOLE)
def test_an_adapter_of_a_model_that_reads_images(tmp_path: Path, prefix: str) -> None:
    """Its language model, which is served alone, has shorter names."""
    given = random_adapter("sql", {f"{prefix}{layer}": SHAPES[layer] for layer in SHAPES}, rank=4)
    layers = {f"model.{layer}": shape for layer, shape in SHAPES.items()}
    found = load_adapter("sql", write_adapter(tmp_path, given), layers)
    assert set(found.pairs) == set(layers)
    for layer, pair in found.pairs.items():
        expected = given.pairs[layer.replace("model.", prefix, 1)]
        assert all(map(torch.equal, pair, expected))


@pytest.mark.parametrize("part", ["vision_tower.layers.0.q", "multi_modal_projector.fc"])
@pytest.mark.parametrize("first", ["", "model."])
def test_how_an_adapter_reads_images_is_left_out(tmp_path: Path, part: str, first: str) -> None:
    """PEFT's short names of modules, such as q_proj, stand for layers of the vision tower too."""
    name = f"base_model.model.{first}{part}.lora_B.weight"
    adapter = random_adapter("sql", SHAPES, 4)
    folder = write_adapter(tmp_path, adapter, {name: torch.zeros(6, 4)})
    assert load_adapter("sql", folder, SHAPES).pairs.keys() == adapter.pairs.keys()
    inner = name.replace(first or part, f"layers.{first or part}", 1)
    folder = write_adapter(tmp_path, adapter, {inner: torch.zeros(6, 4)})
    with pytest.raises(ModelError, match="which is no matrix A or B"):
        load_adapter("sql", folder, SHAPES)


def test_an_adapter_of_the_mlp_of_granite_4(tmp_path: Path) -> None:
    """Its files have gate and up in one layer."""
    mlp = "model.layers.0"
    given = random_adapter(
        "sql",
        {f"{mlp}.shared_mlp.input_linear": (12, 4), f"{mlp}.shared_mlp.output_linear": (4, 6)},
        rank=2,
    )
    layers = {f"{mlp}.mlp.{name}_proj": (6, 4) for name in ("gate", "up")}
    layers[f"{mlp}.mlp.down_proj"] = (4, 6)
    pairs = load_adapter("sql", write_adapter(tmp_path, given), layers).pairs
    both, down = given.pairs.values()
    assert all(map(torch.equal, pairs[f"{mlp}.mlp.down_proj"], down))
    for part, rows in (("gate", slice(6)), ("up", slice(6, 12))):
        a, b = pairs[f"{mlp}.mlp.{part}_proj"]
        assert torch.equal(a, both[0])
        assert torch.equal(b, both[1][rows])


def test_an_adapter_with_both_names_of_a_layer(tmp_path: Path) -> None:
    shapes = {"model.q": (6, 4)}
    twice = {"base_model.model.model.language_model.q.lora_A.weight": torch.ones(4, 4)}
    folder = write_adapter(tmp_path, random_adapter("sql", shapes, rank=4), twice)
    with pytest.raises(ModelError, match=r"has the matrix A of model\.q twice: save"):
        load_adapter("sql", folder, shapes)


def test_files_that_cannot_be_served(tmp_path: Path) -> None:
    adapter = random_adapter("sql", SHAPES, rank=4)
    a, b = adapter.pairs["layers.0.q"]
    infinite = write_adapter(tmp_path / "infinite", adapter, {Q.format("B"): b / 0})
    with pytest.raises(ModelError, match=r"lora_B.weight are not all finite in float32"):
        load_adapter("sql", infinite, SHAPES)
    half = write_adapter(tmp_path / "half", random_adapter("sql", {}, 4), {Q.format("A"): a})
    with pytest.raises(ModelError, match=r"has only one of the matrices A and B of layers.0.q"):
        load_adapter("sql", half, SHAPES)
    (half / WEIGHTS_FILE).unlink()
    for folder in (half, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match=rf"{folder} must be a directory with {CONFIG_FILE}"):
            load_adapter("sql", folder, SHAPES)


def test_the_ranks_are_bounded_together() -> None:
    shapes = {"q": (2, 2)}
    assert Adapters([random_adapter("ab"[i], shapes, 256) for i in range(2)]).rank == 512
    with pytest.raises(ModelError, match="have a rank of 513 together, which must be at most 512"):
        Adapters([random_adapter("ab"[i], shapes, 256 + i) for i in range(2)])


def test_joined_matrices_by_hand() -> None:
    """Ranks 1 and 2. The second adapter leaves out v."""
    adapters = random_adapters(SHAPES, (1, 2))
    first, second = adapters._adapters
    assert adapters.columns.tolist() == [
        [False, False, False],
        [True, False, False],
        [False, True, True],
    ]
    assert (adapters.index(""), adapters.index("a"), adapters.index("b")) == (0, 1, 2)
    a, b = adapters.joined("layers.0.v")
    assert torch.equal(a, torch.cat([first.pairs["layers.0.v"][0], torch.zeros(2, 4)]))
    assert torch.equal(b, torch.cat([first.pairs["layers.0.v"][1], torch.zeros(2, 2)], 1))
    a, b = adapters.joined("layers.0.q")
    assert torch.equal(a[1:], second.pairs["layers.0.q"][0])
    assert torch.equal(b[:, 1:], second.pairs["layers.0.q"][1])


def test_layers_of_a_model() -> None:
    model = make_model("llama, grouped keys")
    assert linear_layers(model.config) == shapes_of(model)
    assert "lm_head" not in shapes_of(model)


KINDS = ["llama, grouped keys", "qwen2, one key head", "qwen3"]


@pytest.mark.parametrize("kind", [*KINDS, "gpt-neox", *(OPENVINO + kind for kind in KINDS)])
def test_logits_are_those_of_the_merged_model(kind: str) -> None:
    """One pass over a prompt without an adapter and one with each."""
    model, with_openvino = make_model(kind), kind.startswith(OPENVINO)
    adapters = random_adapters(shapes_of(model), (8, 3, 16, 64))
    runner = make_runner(make_model(kind), with_openvino=with_openvino, adapters=adapters)
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(9 + row)] for row in range(5)]
    out = runner.forward(
        [
            RowInput(row, 0, prompt, len(prompt), num_prompt=len(prompt), adapter=row)
            for row, prompt in enumerate(prompts)
        ]
    )
    found = torch.split(out.logits, [len(prompt) for prompt in prompts])
    model.set_attn_implementation("eager")
    plain = model(torch.tensor(prompts[:1]), use_cache=False).logits[0, :, :VOCAB_SIZE]
    torch.testing.assert_close(found[0], plain, rtol=1e-4, atol=1e-4)
    for name, prompt, logits in zip(adapters.names, prompts[1:], found[1:], strict=True):
        tokens = torch.tensor([prompt])
        with_it = merged(model, adapters, name)(tokens, use_cache=False).logits[0, :, :VOCAB_SIZE]
        torch.testing.assert_close(logits, with_it, rtol=1e-4, atol=1e-4)
        without = model(tokens, use_cache=False).logits[0, :, :VOCAB_SIZE]
        assert (with_it - without).abs().max() > 0.1, "it changes much more than rounding does"


@pytest.mark.parametrize("with_openvino", [False, True])
def test_an_adapter_that_overflows_harms_no_other(with_openvino: bool) -> None:
    """A x is infinite, and the logits of a token with this adapter are not finite."""
    model = make_model("llama")
    adapters = random_adapters(shapes_of(model), (4, 4))
    for a, _ in adapters._adapters[0].pairs.values():
        a *= 1e38
    runner = make_runner(model, with_openvino=with_openvino, adapters=adapters)
    prompt = list(range(6))
    inputs = [RowInput(row, 0, prompt, 1, num_prompt=6, adapter=row) for row in range(3)]
    logits = runner.forward(inputs).logits
    assert [bool(row.isfinite().all()) for row in logits] == [True, False, True]


@pytest.mark.usefixtures("without_triton")
def test_padded_passes_have_adapters() -> None:
    """Of CUDA graphs, here as a dry run. Products with the same input are merged there."""
    model = make_model("llama")
    adapters = random_adapters(shapes_of(model), (8, 3))
    merge_products(model)
    plain = make_runner(make_model("llama"), adapters=adapters)
    config = RunnerConfig(
        Path("model"), torch.device("cpu"), torch.float32, 5, 96, VOCAB_SIZE, adapters=adapters
    )
    model.set_attn_implementation("smartspec_packed")
    padded = GraphRunner(CausalModel(model, config), config)
    padded.warm()
    num_replays = padded.num_replays
    for chosen in ((1, 0, 2), (2, 2, 1), (0, 0, 0)):
        inputs = [
            RowInput(row, 0, list(range(3 + row)), 2, adapter=adapter)
            for row, adapter in enumerate(chosen)
        ]
        expected, found = plain.forward(inputs).logits, padded.forward(inputs).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert padded.num_replays == num_replays + 3
