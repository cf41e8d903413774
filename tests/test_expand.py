"""Expansion keeps the function: logits and greedy text are those of the source."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from smartspec_bench.expand import PRESETS, SizeError, expand, expand_medusa
from smartspec_py.engines.drafts.medusa.heads import load_heads
from smartspec_py.engines.runtimes.runner import RunnerConfig

TINY = Path(__file__).parents[1] / "engines_build" / "tiny"
TARGET = TINY / "target"
WIDER = {"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 64}


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
        {},
        {"num_hidden_layers": 5, "intermediate_size": 100},
        {**WIDER, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 80},
        {"hidden_size": 96},
        {"head_dim": 64},
        {**WIDER, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    ],
    ids=["same", "deeper", "wider", "wider-by-three", "wide-heads", "grouped-keys"],
)
def test_expanded_model_computes_the_same(
    source: Path, tmp_path: Path, size: dict[str, int]
) -> None:
    expand(source, tmp_path / "large", size, seed=1)
    assert_same_function(source, tmp_path / "large", vocab_size=64)


@pytest.mark.parametrize(("role", "name", "millions"), [("target", "17m", 17), ("draft", "4m", 4)])
def test_preset_keeps_the_shipped_model(
    tmp_path: Path, role: str, name: str, millions: int
) -> None:
    num_parameters = expand(TINY / role, tmp_path / name, PRESETS[name])
    assert round(num_parameters / 1e6) == millions
    assert_same_function(TINY / role, tmp_path / name, vocab_size=2048)


def test_inactive_weights_are_random_and_finite(source: Path, tmp_path: Path) -> None:
    """The same seed gives the same file, and config.json says what was expanded."""
    for name in "ab":
        expand(source, tmp_path / name, WIDER, seed=7)
    files = [tmp_path / name / "model.safetensors" for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()
    weights = load_file(files[0])
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert weights["model.layers.2.mlp.up_proj.weight"].float().std() == pytest.approx(0.02, 0.1)
    reads_new_dimensions = weights["model.layers.0.self_attn.q_proj.weight"][:, 32:]
    assert reads_new_dimensions.count_nonzero() > 0.99 * 32 * 96
    assert not weights["model.layers.2.self_attn.o_proj.weight"].any()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["rms_norm_eps"] == pytest.approx(1e-3 / 4)
    assert config["smartspec_expanded"]["from"]["hidden_size"] == 32
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        ({"hidden_size": 16}, "hidden_size: cannot shrink from 32 to 16"),
        ({"num_attention_heads": 3}, "multiple of num_attention_heads"),
        ({"head_dim": 32}, "head_dim: got 32, must be one of 16, 64, 256"),
        ({"head_dim": 48}, "head_dim: got 48, must be one of 16, 64, 256"),
        ({"head_dim": 256}, r"10000 \*\* 16 is no rope_theta"),
    ],
)
def test_sizes_that_are_refused(
    source: Path, tmp_path: Path, size: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        expand(source, tmp_path / "large", size)
    assert not (tmp_path / "large").exists()


def test_a_source_with_grouped_keys(tmp_path: Path) -> None:
    """Two key heads of three query heads each, to three of four. Fewer of each are refused."""
    torch.manual_seed(0)
    source = tmp_path / "source"
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=36, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-3,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )
    ).save_pretrained(source)  # fmt: skip
    heads = {"hidden_size": 144, "num_attention_heads": 12, "num_key_value_heads": 3}
    expand(source, tmp_path / "large", {**WIDER, **heads})
    assert_same_function(source, tmp_path / "large", 64)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6}
    with pytest.raises(SizeError, match="query heads of each key head: cannot shrink from 3 to 2"):
        expand(source, tmp_path / "refused", {**WIDER, **heads, "hidden_size": 144})


def test_expanded_heads_make_the_same_guesses(tmp_path: Path) -> None:
    heads = TINY / "heads"
    num_parameters = expand_medusa(heads, tmp_path / "heads", 512)
    assert num_parameters == 4 * (512 * 512 + 512)
    expand(TARGET, tmp_path / "target", PRESETS["17m"])

    def guesses(folder: Path, target: Path, states: torch.Tensor) -> torch.Tensor:
        loaded = load_heads(
            folder, RunnerConfig(target, torch.device("cpu"), torch.float32, 1, 64, 2048)
        )
        return loaded.logits(states)

    torch.manual_seed(0)
    states = torch.randn(20, 128)
    wide = torch.cat([states, torch.zeros(20, 512 - 128)], dim=1)
    expected = guesses(heads, TARGET, states)
    found = guesses(tmp_path / "heads", tmp_path / "target", wide)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_heads_that_cannot_be_expanded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_size: cannot shrink from 128 to 64"):
        expand_medusa(TINY / "heads", tmp_path / "out", 64)
    config = json.loads((TINY / "heads" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"shares_lm_head": False}))
    with pytest.raises(ValueError, match="shares_lm_head"):
        expand_medusa(tmp_path, tmp_path / "out", 512)
