"""EAGLE-3 heads: both checkpoint layouts against a short reference, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import (
    DRAFTED,
    EAGLE,
    FLAGS,
    HIDDEN,
    LAYER,
    OF_TARGET,
    ROWS,
    SPECULATORS,
    TARGET,
    VOCAB,
    own,
    weights,
    write,
)
from eagle_driver import PaddedEagleRunner, runner_of
from eagle_reference import Reference
from transformers import LlamaConfig, LlamaForCausalLM

from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.drafts.eagle.head import is_eagle, read_config
from smartspec_py.engines.drafts.eagle.openvino import OpenVinoEagleRunner
from smartspec_py.engines.drafts.eagle.runner import EagleRunner
from smartspec_py.engines.runtimes.runner import RowInput, Runner

RUNNERS = [EagleRunner, PaddedEagleRunner, OpenVinoEagleRunner]

TOKENS = {2: [5, 9, 33, 0, 12, 7, 30, 3, 1], 0: [8, 8, 35, 21]}
"""By row: tokens that have a state before them."""


def compare(runner: Runner, reference: Reference, first: int = 1) -> None:
    """Two rows read their tokens, one of them in two passes, and then two drafts each."""
    torch.manual_seed(2)
    states = {row: torch.randn(len(tokens), 3 * OF_TARGET) for row, tokens in TOKENS.items()}
    drafts = {2: [4, 6], 0: [9, 9]}
    runner.forward([RowInput(2, first, TOKENS[2][:5], 0, first=first, states=states[2][:5])])
    inputs: list[RowInput] = [
        RowInput(2, first + 5, TOKENS[2][5:], 1, first=first, states=states[2][5:]),
        RowInput(0, first, TOKENS[0], 1, first=first, states=states[0]),
    ]
    found = [runner.forward(inputs).logits]
    for i in range(2):
        inputs = [
            RowInput(row, first + len(TOKENS[row]) + i, drafts[row][i : i + 1], 1, first=first)
            for row in TOKENS
        ]
        found.append(runner.forward(inputs).logits)
    for place, row in enumerate(TOKENS):
        expected = reference.chain(TOKENS[row], states[row], drafts[row])
        logits = torch.stack([one[place] for one in found])
        assert logits.shape == (3, VOCAB)
        torch.testing.assert_close(logits[:, ::3], expected, atol=1e-4, rtol=1e-4)
        assert int(logits.isfinite().sum()) == 3 * DRAFTED


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("first", [1, 7])
def test_the_eagle_layout(tmp_path: Path, first: int, kind: type[Runner]) -> None:
    """first: the row begins later if earlier states are unknown. Rotations are relative."""
    tensors = weights("midlayer")
    runner = runner_of(write(tmp_path, EAGLE, tensors), own(tmp_path), kind)
    compare(runner, Reference(tensors, "midlayer"), first)


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize(
    "flags", [(), ("norm_before_residual",), FLAGS[:2], ("fc_norm", "norm_output")], ids=str
)
def test_the_speculators_layout(tmp_path: Path, flags: tuple[str, ...], kind: type[Runner]) -> None:
    tensors = weights("layers.0", *flags)
    head = write(tmp_path, SPECULATORS | dict.fromkeys(flags, True), tensors)
    compare(runner_of(head, own(tmp_path), kind), Reference(tensors, "layers.0", *flags))


def test_several_tokens_without_states(tmp_path: Path) -> None:
    """So the profile times passes. Each token is read with the last state of its row."""
    head, config = write(tmp_path, EAGLE, weights("midlayer")), own(tmp_path)
    states = torch.randn(2, 3 * OF_TARGET)
    first = [RowInput(row, 1, [5, 9], 1, first=1, states=states * (row + 1)) for row in (0, 1)]
    later = [RowInput(row, 3, [8, 2, 7, 1], num, first=1) for row, num in ((0, 4), (1, 1))]
    found = []
    for kind in (EagleRunner, OpenVinoEagleRunner):
        runner = runner_of(head, config, kind)
        runner.forward(first)
        found.append(runner.forward(later).logits)
        assert runner.time_pass(2, 16, 6, 1) > 0.0
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_drafted", [DRAFTED, ROWS])
def test_a_head_that_shares_embedding_and_lm_head(tmp_path: Path, num_drafted: int) -> None:
    """The target's hidden size. The LM head is the target's rows of the head's tokens."""
    config = LlamaConfig(**TARGET.to_dict() | {"hidden_size": HIDDEN})
    tensors = weights("midlayer")
    shared = ("embed_tokens.weight", "lm_head.weight", *(("d2t", "t2d") * (num_drafted == ROWS)))
    for name in shared:
        del tensors[name]
    tensors["fc.weight"] = tensors["fc.weight"][:, : 3 * HIDDEN].clone()
    document, ours = EAGLE | {"draft_vocab_size": num_drafted}, own(tmp_path, config)
    runner = runner_of(write(tmp_path, document, tensors), ours)
    target = LlamaForCausalLM.from_pretrained(ours.path)
    reference = Reference(
        tensors
        | {
            "embed_tokens.weight": target.model.embed_tokens.weight.detach(),
            "lm_head.weight": target.lm_head.weight.detach()[:: ROWS // num_drafted][:num_drafted],
        },
        "midlayer",
    )
    states = torch.randn(4, 3 * HIDDEN)
    found = runner.forward([RowInput(0, 1, TOKENS[0], 1, first=1, states=states)]).logits
    expected = reference.chain(TOKENS[0], states, [])
    step = ROWS // num_drafted
    torch.testing.assert_close(found[:, ::step], expected[:, :VOCAB], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "layer_ids"),
    [
        (EAGLE, (2, 3, 4)),
        (SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        (EAGLE | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)),
    ],
    ids=["default", "inputs", "outputs"],
)
def test_which_layers_are_read(
    tmp_path: Path, config: dict[str, Any], layer_ids: tuple[int, ...]
) -> None:
    assert read_config(write(tmp_path, config, {}), TARGET).layer_ids == layer_ids


def layer_of(**fields: Any) -> dict[str, Any]:
    return {**SPECULATORS, "transformer_layer_config": LAYER | fields}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SPECULATORS | {"speculators_model_type": "dflash"}, "speculators_model_type is dflash"),
        (layer_of(model_type="qwen3"), "model_type is qwen3, but for EAGLE heads only llama"),
        (EAGLE | {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        (EAGLE | {"hidden_act": "gelu"}, "hidden_act is gelu"),
        (layer_of(use_sliding_window=True), "use_sliding_window is True"),
        (layer_of(layer_types=["sliding_attention"]), "use_sliding_window is True"),
        (EAGLE | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        (EAGLE | {"draft_vocab_size": "x"}, "draft_vocab_size 'x' .* a whole number above 0"),
        (
            EAGLE | {"draft_vocab_size": 41},
            r"another model .*\(draft_vocab_size is 41, and the target has 40 tokens\): "
            "give heads that were trained for this model, or leave `heads` out$",
        ),
        (
            EAGLE | {"target_hidden_size": 25},
            r"another model .*\(target_hidden_size is 25, and the target's is 24\): give heads",
        ),
        (EAGLE | {"norm_before_residual": "no"}, "norm_before_residual 'no' .* true or false"),
        (EAGLE | {"eagle_config": 5}, "eagle_config 5 .* must be an object"),
        (EAGLE | {"eagle_aux_hidden_state_layer_ids": [0.5]}, r"layer_ids \[0\.5\] .* a list of"),
        (EAGLE | {"hidden_size": 0}, "hidden_size 0 in its config.json|cannot use"),
        (EAGLE | {"rms_norm_eps": -1.0}, "rms_norm_eps -1.0 .* a number in 0..1"),
        (layer_of(num_attention_heads=0), "a config.json that Transformers cannot use"),
        (layer_of(rope_theta="x"), "a config.json that Transformers cannot use"),
        (EAGLE | {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, r"\(2, 3, 7\), .* layers 0 to 6"),
    ],
)
def test_refused_before_loading(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(write(tmp_path, config, {}), TARGET)


GOOD = weights("midlayer")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({n: t for n, t in GOOD.items() if n != "fc.weight"}, 'Missing key.*: "fc.weight"'),
        (GOOD | {"fc.bias": torch.zeros(HIDDEN)}, 'Unexpected key.*: "fc.bias"'),
        (
            GOOD | {"fc.weight": torch.zeros(16, 48)},
            r"another model .*fc.weight has the shape \(16, 48\), and .* must be \(16, 72\)\)",
        ),
        (
            GOOD | {"embed_tokens.weight": torch.zeros(50, HIDDEN)},
            r"embed_tokens.weight has the shape \(50, 16\), and .* must be \(40, 16\)\)",
        ),
        (
            {n: t for n, t in GOOD.items() if n != "embed_tokens.weight"},
            "have no embed_tokens, and their hidden_size is 16, but the target's is 24",
        ),
        (
            GOOD | {"norm.weight": torch.zeros(5)},
            r"not those of an EAGLE-3 head \(.*size mismatch for norm.weight",
        ),
        (
            GOOD | {"norm.weight": torch.full((HIDDEN,), torch.nan)},
            "norm.weight are not all finite",
        ),
        ({n: t for n, t in GOOD.items() if n != "d2t"}, "the weight file lacks d2t"),
        (GOOD | {"d2t": torch.zeros(5, dtype=torch.long)}, "d2t has 5 entries, but needs 12"),
        (GOOD | {"d2t": torch.zeros(DRAFTED, dtype=torch.long)}, "d2t must have the tokens of t2d"),
        (GOOD | {"d2t": -torch.arange(DRAFTED)}, "d2t must have the tokens of t2d, each once"),
        (GOOD | {"fc.weight": GOOD["fc.weight"].to(torch.int8)}, "fc.weight of the type int8"),
        (
            GOOD | {"layers.0.hidden_norm.weight": torch.ones(HIDDEN)},
            "has tensors of both midlayer and layers.0",
        ),
        (GOOD | {"d2t": torch.full((DRAFTED,), 30)}, "d2t has tokens 30 to 41, and .* 40 tokens"),
    ],
)
def test_refused_weights(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        runner_of(write(tmp_path, EAGLE, tensors), own(tmp_path))


def test_folders_without_an_eagle_head(tmp_path: Path) -> None:
    assert not is_eagle(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 4, "architectures": 5}))
    assert not is_eagle(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="an unreadable config"):
        is_eagle(tmp_path)
