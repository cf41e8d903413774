"""An EAGLE-3 head served with the shipped target: texts are those without speculation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from heads_served import MIXED, MODEL, REQUESTS, TINY, config_of, served, serving
from safetensors.torch import save_file

from smartspec_py.constants import HEADS
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.faults import ConfigError
from smartspec_py.serving.build import build_engine
from smartspec_testing.local import LocalSink, generate

WIDTH, DRAFTED = 128, 512


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head that drafts the first 512 tokens. It shares the target's embedding."""
    folder = tmp_path_factory.mktemp("eagle")
    layer = json.loads((MODEL / "config.json").read_text()) | {"num_hidden_layers": 1}
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "transformer_layer_config": layer,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = {
        "self_attn.q_proj": (WIDTH, 2 * WIDTH),
        "self_attn.k_proj": (WIDTH, 2 * WIDTH),
        "self_attn.v_proj": (WIDTH, 2 * WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (384, WIDTH),
        "mlp.up_proj": (384, WIDTH),
        "mlp.down_proj": (WIDTH, 384),
    }
    tensors = {f"layers.0.{name}.weight": torch.randn(s) / 9 for name, s in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"layers.0.{name}.weight"] = torch.ones(WIDTH)
    tensors["norm.weight"] = torch.ones(WIDTH)
    tensors["fc.weight"] = torch.randn(WIDTH, 3 * WIDTH) / 9
    tensors["lm_head.weight"] = torch.randn(DRAFTED, WIDTH)
    tensors["d2t"] = torch.zeros(DRAFTED, dtype=torch.long)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "kv_cache"), [("torch", "auto"), ("openvino", "u8")])
def test_texts_are_those_without_speculation(head: Path, runtime: str, kv_cache: str) -> None:
    """First with room for all caches, then with a budget that preempts requests and drops the
    head's cache."""
    config = config_of(heads=str(head), runtime=runtime, kv_cache=kv_cache)
    asked = [replace(one, max_tokens=40) for one in MIXED]
    drafting = [
        replace(one, policy=f"fixed:{1 + 2 * (i % 4)}", proposer=HEADS)
        for i, one in enumerate(asked)
    ]
    with serving(config) as server:
        plain = generate(server, [replace(one, policy="none") for one in asked], 120.0)
        found = generate(server, drafting, 120.0)
    limits = {"max_context_len": 192, "max_cache_tokens": 192}
    tight = config_of(limits, heads=str(head), runtime=runtime, kv_cache=kv_cache)
    squeezed, num_preemptions = served(tight, drafting)
    assert [sink.tokens for sink in found] == [sink.tokens for sink in plain]
    assert [sink.tokens for sink in squeezed] == [sink.tokens for sink in plain]
    assert all(sink.progress.num_drafted > 0 for sink in found)
    assert num_preemptions > 0


@pytest.mark.slow
def test_a_head_drafts_with_products_of_whole_numbers(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of large heads on processors without VNNI."""
    from smartspec_py.engines.runtimes.openvino import precision

    monkeypatch.setattr(precision, "has_vnni", lambda: False)
    monkeypatch.setattr(precision, "LEAST_WEIGHTS", 0)
    config = config_of(heads=str(head), runtime="openvino", weights="int8")
    drafting = [replace(one, policy="fixed:3", proposer=HEADS) for one in MIXED]
    with serving(config) as server:
        plain = generate(server, [replace(one, policy="none") for one in MIXED], 120.0)
        found = generate(server, drafting, 120.0)
    assert [sink.tokens for sink in found] == [sink.tokens for sink in plain]
    assert all(sink.progress.num_drafted > 0 for sink in found)


def test_texts_with_trees_are_those_without_speculation(head: Path) -> None:
    """Passes of any size cost the same, so plans have large trees until the guard finds that they
    do not pay. One client leaves."""
    cost = CostModel(PassTable((1,), (1,), ((0.01,),)), PassTable((1,), (1,), ((1e-4,),)))
    config = config_of(heads=str(head), runtime="torch")
    plain, _ = served(config, [replace(one, policy="none") for one in MIXED])
    asked, gone = [replace(one, proposer=HEADS) for one in MIXED], LocalSink()
    with serving(config, cost=cost) as server:
        server.submit(asked[0], gone)
        gone.is_gone = True
        sinks = generate(server, asked, 120.0)
        drafted = [num for record in server.loop.records for num in record.drafted.values()]
    assert [sink.tokens for sink in sinks] == [sink.tokens for sink in plain]
    assert max(drafted) > config.limits.max_draft_len  # how often depends on measured times


def test_rejection_sampling_takes_the_heads_probabilities(head: Path) -> None:
    asked = [
        replace(one, temperature=1.0, verification="rejection", policy="fixed:3", proposer=HEADS)
        for one in REQUESTS[:3]
    ]
    sinks, _ = served(config_of(heads=str(head), runtime="torch"), asked)
    assert all(sink.progress.num_drafted > 0 for sink in sinks)


def test_the_profile_times_the_heads_passes(head: Path) -> None:
    engine = build_engine(config_of(heads=str(head), runtime="torch"), Path.cwd())
    assert engine.cost.draft_s(1) > 0.0
    assert engine.proposers[HEADS].capabilities.bytes_per_token == 2 * WIDTH * 4


def test_heads_that_do_not_fit_are_refused(head: Path, tmp_path: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"engine\.heads: .* target has layers 0 to 2"):
        build_engine(config_of(heads=str(tmp_path)), Path.cwd())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"engine\.heads: .* has none of .*: give the directory"):
        build_engine(config_of(heads=str(tmp_path)), Path.cwd())


def test_a_draft_model_cannot_be_loaded_too(head: Path) -> None:
    config = config_of(heads=str(head), draft=str(TINY / "draft"))
    with pytest.raises(ConfigError, match=r"engine\.heads: an EAGLE head and a draft model cannot"):
        build_engine(config, Path.cwd())
