"""Expansion keeps the function: logits and greedy text are those of the source."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from smartspec_bench.expand import PRESETS, Size, expand, expand_medusa, expanded
from smartspec_bench.expand_heads import widen_heads
from smartspec_py.engines.torch.medusa import load_heads

TINY = Path(__file__).parents[1] / "engines_build" / "tiny"
TARGET = TINY / "target"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two layers of 32 (two heads of 16), 64 tokens; an epsilon large enough to be seen."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-3,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


def load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def assert_same_function(small: Path, large: Path, vocab_size: int) -> None:
    """Logits (2, 12, vocab) within 1e-4, and 8 greedy tokens equal, in float32."""
    models = [load(small), load(large)]
    tokens = torch.randint(1, vocab_size, (2, 12), generator=torch.Generator().manual_seed(3))
    expected, actual = (model(tokens).logits[..., :vocab_size] for model in models)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    texts = [tokens, tokens]
    for _ in range(8):
        for i, model in enumerate(models):
            logits = model(texts[i]).logits[:, -1:, :vocab_size]
            texts[i] = torch.cat([texts[i], logits.argmax(-1)], dim=1)
    assert torch.equal(texts[0], texts[1])


@pytest.mark.parametrize(
    "size",
    [
        Size(hidden_size=32, num_layers=2, intermediate_size=48, num_heads=2),
        Size(hidden_size=32, num_layers=5, intermediate_size=100, num_heads=4),
        Size(hidden_size=128, num_layers=3, intermediate_size=64, num_heads=4, vocab_size=80),
        Size(hidden_size=96, num_layers=3, intermediate_size=64, num_heads=4),
    ],
    ids=["same", "deeper", "wider", "wider-by-three"],
)
def test_expanded_model_computes_the_same(source: Path, tmp_path: Path, size: Size) -> None:
    expand(source, tmp_path / "large", **size, seed=1)
    assert_same_function(source, tmp_path / "large", vocab_size=64)


@pytest.mark.parametrize(("name", "millions"), [("17m", 17), ("88m", 88)])
def test_preset_keeps_the_shipped_target(tmp_path: Path, name: str, millions: int) -> None:
    num_parameters = expand(TARGET, tmp_path / name, **PRESETS[name])
    assert round(num_parameters / 1e6) == millions
    assert_same_function(TARGET, tmp_path / name, vocab_size=2048)


def test_preset_keeps_the_shipped_draft(tmp_path: Path) -> None:
    draft = TARGET.with_name("draft")
    assert round(expand(draft, tmp_path / "4m", **PRESETS["4m"]) / 1e6) == 4
    assert_same_function(draft, tmp_path / "4m", vocab_size=2048)


def test_inactive_weights_are_random_and_finite(source: Path, tmp_path: Path) -> None:
    size = Size(hidden_size=128, num_layers=3, intermediate_size=64, num_heads=4)
    expand(source, tmp_path / "large", **size)
    weights = load_file(tmp_path / "large" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert weights["model.layers.2.mlp.up_proj.weight"].float().std() == pytest.approx(0.02, 0.1)
    reads_new_dimensions = weights["model.layers.0.self_attn.q_proj.weight"][:, 32:]
    assert reads_new_dimensions.count_nonzero() > 0.99 * 64 * 96
    assert not weights["model.layers.2.self_attn.o_proj.weight"].any()


def test_config_says_what_was_expanded(source: Path, tmp_path: Path) -> None:
    size = Size(hidden_size=128, num_layers=3, intermediate_size=64, num_heads=4)
    expand(source, tmp_path / "large", **size)
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert config["head_dim"] == 16
    assert config["rms_norm_eps"] == pytest.approx(1e-3 / 4)
    assert config["smartspec_expanded"]["from"]["hidden_size"] == 32
    assert (tmp_path / "large" / "tokenizer.json").read_text() == "{}"


def test_same_seed_gives_the_same_weights(source: Path, tmp_path: Path) -> None:
    size = Size(hidden_size=128, num_layers=3, intermediate_size=64, num_heads=4)
    files = []
    for name in "ab":
        expand(source, tmp_path / name, **size, seed=7)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_expanded_in_memory_is_what_the_folder_holds(source: Path, tmp_path: Path) -> None:
    size = Size(hidden_size=128, num_layers=3, intermediate_size=64, num_heads=4, vocab_size=80)
    expand(source, tmp_path / "large", **size, seed=7)
    config, tensors = expanded(source, size, torch.Generator().manual_seed(7))
    assert config == json.loads((tmp_path / "large" / "config.json").read_text())
    stored = load_file(tmp_path / "large" / "model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_shrinking_is_refused(source: Path, tmp_path: Path) -> None:
    size = Size(hidden_size=16, num_layers=3, intermediate_size=64, num_heads=4)
    with pytest.raises(ValueError, match="hidden_size: cannot shrink from 32 to 16"):
        expand(source, tmp_path / "large", **size)


def test_heads_that_do_not_divide_the_hidden_size_are_refused(source: Path, tmp_path: Path) -> None:
    size = Size(hidden_size=32, num_layers=2, intermediate_size=48, num_heads=3)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        expand(source, tmp_path / "large", **size)


def test_grouped_query_attention_is_refused(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text()) | {"num_key_value_heads": 1}
    (source / "config.json").write_text(json.dumps(config))
    size = Size(hidden_size=32, num_layers=2, intermediate_size=48, num_heads=2)
    with pytest.raises(ValueError, match="num_key_value_heads"):
        expand(source, tmp_path / "large", **size)


@pytest.mark.parametrize("head_dim", [16, 64])
def test_wider_heads_keep_logits_and_text(source: Path, tmp_path: Path, head_dim: int) -> None:
    widen_heads(source, tmp_path / "wide", head_dim)
    assert load(tmp_path / "wide").config.head_dim == head_dim
    assert_same_function(source, tmp_path / "wide", 64)


def test_the_shipped_target_widened_and_expanded(tmp_path: Path) -> None:
    widen_heads(TARGET, tmp_path / "wide", 64)
    expand(tmp_path / "wide", tmp_path / "large", **PRESETS["17m"])
    assert_same_function(TARGET, tmp_path / "large", 2048)


@pytest.mark.parametrize("head_dim", [8, 32, 48, 0])
def test_a_width_that_is_not_exact_is_refused(source: Path, tmp_path: Path, head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"head_dim: got {head_dim}, must be one of 16, 64, 256"):
        widen_heads(source, tmp_path / "wide", head_dim)
    assert not (tmp_path / "wide").exists()


def test_a_width_whose_theta_leaves_float32_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"10000 \*\* 16 is no rope_theta"):
        widen_heads(source, tmp_path / "wide", 256)
    assert not (tmp_path / "wide").exists()


def test_expanded_heads_make_the_same_guesses(tmp_path: Path) -> None:
    heads = TINY / "heads"
    num_parameters = expand_medusa(heads, tmp_path / "heads", 512)
    assert num_parameters == 4 * (512 * 512 + 512)
    expand(TINY / "target", tmp_path / "target", **PRESETS["17m"])

    def guesses(folder: Path, target: Path, states: torch.Tensor) -> torch.Tensor:
        loaded = load_heads(folder, target, 2048, torch.float32, torch.device("cpu"))
        return loaded.logits(states)

    torch.manual_seed(0)
    states = torch.randn(20, 128)
    wide = torch.cat([states, torch.zeros(20, 512 - 128)], dim=1)
    expected = guesses(heads, TINY / "target", states)
    found = guesses(tmp_path / "heads", tmp_path / "target", wide)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_heads_that_cannot_be_expanded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_size: cannot shrink from 128 to 64"):
        expand_medusa(TINY / "heads", tmp_path / "out", 64)
    config = json.loads((TINY / "heads" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"shares_lm_head": False}))
    with pytest.raises(ValueError, match="shares_lm_head"):
        expand_medusa(tmp_path, tmp_path / "out", 512)
