"""The layer of Qwen3.5 that drafts: what it computes, from the files of a checkpoint to texts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_files import random_adapter, shapes_of, write_adapter
from gguf_files import NET_FIELDS, NET_PARTS, few_fields, file_name, write_gguf
from net_models import SIZES as NET_SIZES
from net_models import check_texts
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LocalEngineConfig, ServerConfig
from smartspec_py.constants import HEADS
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.mtp import has_mtp, mtp_model, mtp_parameters
from smartspec_py.engines.drafts import vocabulary
from smartspec_py.engines.drafts.mtp import OpenVinoMtpRunner
from smartspec_py.engines.local.build import drafts_itself
from smartspec_py.engines.runtimes.openvino import precision
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.weights import Compressed
from smartspec_py.engines.runtimes.runner import OPENVINO, PYTORCH, RowInput, RunnerConfig
from smartspec_py.faults import ConfigError
from smartspec_py.serving.build import build_engine
from smartspec_testing.local import serving

CPU = torch.device("cpu")
TINY = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
SIZES = NET_SIZES | {"linear_num_value_heads": 2}
VOCAB: int = SIZES["vocab_size"]
OF_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
OF_FILE = {
    "nextn_predict_layers": 1,
    "block_count": 5,
    "ssm.time_step_rank": 2,
    "ssm.inner_size": 64,
    "attention.recurrent_layers": [True, True, True, False, False],
}
CLOSE: dict[str, float] = {"atol": 1e-3, "rtol": 1e-3}
TOKENS = [(37 * i + 11) % VOCAB for i in range(21)]
LONG = "one two three four five six seven eight nine ten " * 12
SAMPLINGS: list[dict[str, Any]] = [
    {"ignore_eos": True, **more} for more in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.2})
]


def write(folder: Path, kind: str = "qwen3_5_text", follows: bool = False) -> Any:
    """A random model with a layer that drafts. Returns the model, and the layer as a reference.

    follows: each token decides mostly what the next one is, so that most drafts are right.
    """
    torch.manual_seed(0)
    more = OF_EXPERTS if "moe" in kind else {}
    config = AutoConfig.for_model(kind, **SIZES, **more, tie_word_embeddings=not follows)
    model = AutoModelForCausalLM.from_config(config).eval()
    drafting = {
        name: torch.randn(each.shape) * (0.1 if "norm" in name else 0.2)
        for name, each in mtp_parameters(config).items()
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-6.0, -2.0)  # so that states remember
        if follows:
            for name, weight in [*model.named_parameters(), *drafting.items()]:
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    weight.mul_(0.005)
            model.lm_head.weight.copy_(model.model.embed_tokens.weight[torch.randperm(VOCAB)])
            drafting["mtp.fc.weight"][:, :128] += 5 * torch.eye(128)
    model.save_pretrained(folder)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()} | drafting
    if not follows:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    return model, Reference(model, drafting)


class Reference:
    """The layer by Transformers' classes: every draft reads the whole text again."""

    def __init__(self, model: Any, weights: dict[str, torch.Tensor]) -> None:
        self.own, self.model = mtp_model(model.config).to_empty(device="cpu").eval(), model
        self.weights = weights
        known = {name.removeprefix("mtp."): tensor for name, tensor in weights.items()}
        inner = {name for name in known if name.startswith(("layers.", "norm."))}
        named = {f"model.{name}" if name in inner else name: known[name] for name in known}
        embedding = {"model.embed_tokens.weight": model.model.embed_tokens.weight}
        self.own.load_state_dict(named | embedding, strict=False)
        self.own.model.rotary_emb = type(model.model.rotary_emb)(model.config)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], num: int) -> torch.Tensor:
        """The logits of num drafts, each of which is the most probable token."""
        states = self.model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        read, found = tokens[1:], []
        for _ in range(num):
            embedded = self.model.model.embed_tokens.weight[read]
            normed = self.own.pre_fc_norm_embedding(embedded), self.own.pre_fc_norm_hidden(states)
            joined = self.own.fc(torch.cat(normed, -1))
            out = self.own.model(inputs_embeds=joined[None]).last_hidden_state[0, -1:]
            found.append(self.model.lm_head(out)[0])
            states, read = torch.cat([states, out]), [*read, int(found[-1].argmax())]
        return torch.stack(found)


def config_of(folder: Path, engine: dict[str, Any] | None = None, **limits: Any) -> ServerConfig:
    few = {"max_sequences": 4, "max_draft_len": 9, "max_context_len": 512, "profile_s": 0.0}
    own = {"kind": "local", "device": "cpu", "num_threads": 1, "model": str(folder)}
    return ServerConfig.model_validate({"engine": own | (engine or {}), "limits": few | limits})


def four_drafts(folder: Path, weights: str = "stored") -> torch.Tensor:
    """Their logits: after the target's states of a prompt in two parts, and then after its own."""
    own = RunnerConfig(folder, CPU, torch.float32, 2, 96, VOCAB, state_layers=(4,), has_mtp=True)
    target = load_openvino_runner(replace(own, weights=weights))
    head = OpenVinoMtpRunner(target)
    for first, end in ((0, 9), (9, 20)):
        part = TOKENS[first:end]
        [states] = target.forward([RowInput(0, first, part, 0, len(part))]).states
        following = RowInput(0, first + 1, TOKENS[first + 1 : end + 1], 1, first=1, states=states)
        found = [head.forward([following]).logits[0]]
    for i in range(3):
        draft = int(found[-1].argmax())
        found.append(head.forward([RowInput(0, 21 + i, [draft], 1, first=1)]).logits[0])
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_drafts_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    _, reference = write(tmp_path, kind)
    torch.testing.assert_close(four_drafts(tmp_path), reference.drafts(TOKENS, 4), **CLOSE)


def test_a_gguf_file_with_the_layer(tmp_path: Path) -> None:
    """It comes behind the others, with some names of its own, and 1 is added to norms."""
    model, reference = write(tmp_path)
    inside = "mtp.layers.0."
    behind = {"fc": "eh_proj", "norm": "shared_head_norm"}
    behind |= {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    drafting = {}
    for name, tensor in reference.weights.items():
        _, part, _ = name.split(".", 2)
        served = name.replace(inside, "model.layers.4.")
        if not name.startswith(inside):
            served = f"model.layers.4.nextn.{behind[part]}.weight"
        drafting[file_name(served, NET_PARTS)] = (tensor + ("norm" in name)).numpy()
    fields = {f"qwen35.{key}": value for key, value in (NET_FIELDS | OF_FILE).items()}
    path = tmp_path / "m.gguf"
    write_gguf(path, model, few_fields(VOCAB), tensors=drafting, **fields)
    folder = model_folder(path)
    assert load_config(folder, 64).num_hidden_layers == 4
    torch.testing.assert_close(four_drafts(folder), reference.drafts(TOKENS, 4), **CLOSE)
    lost = {"blk.4.nextn.embed_tokens.weight": np.ones((VOCAB, 128), np.float32)}
    write_gguf(path, model, few_fields(VOCAB), tensors=drafting | lost, **fields)
    folder = model_folder(path)
    assert not has_mtp(folder, load_config(folder, 64)), "it has an embedding of its own"


@pytest.mark.parametrize("least_weights", [1, 1_000_000])
def test_frequent_tokens_and_those_of_texts_are_drafted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least_weights: int
) -> None:
    """With weights in 8 bits, also rotated ones. Other tokens have no logits."""
    monkeypatch.setattr(precision, "LEAST_WEIGHTS", least_weights)
    write(tmp_path)
    [whole, *_] = four_drafts(tmp_path, "int8")
    monkeypatch.setattr(vocabulary, "NUM_LOW", 256)
    [found, *_] = four_drafts(tmp_path, "int8")
    known = sorted({*range(256), *TOKENS[1:]})
    scale = float(whole.abs().max())
    torch.testing.assert_close(found[known], whole[known], atol=0.03 * scale, rtol=0.0)
    assert found.isfinite().sum() == len(known) < VOCAB


def test_tokens_that_were_added_first_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "NUM_LOW", 2)
    monkeypatch.setattr(vocabulary, "MOST_SEEN", 4)
    rows = torch.arange(60, dtype=torch.int8).view(20, 3)
    layer = [Compressed(rows, torch.full((20, 1), 2.0), torch.zeros((), dtype=torch.uint8))]
    seen = vocabulary.SeenTokens(layer, 0)
    low, states = np.ones((1, 2), np.float32), np.array([[1.0, 0.0, 0.0]], np.float32)
    for tokens, kept in (([1, 5], [5]), ([7, 5, 9], [5, 7, 9]), ([11, 12, 0], [7, 9, 11, 12])):
        seen.add(tokens)
        [logits] = seen.logits(low, states, 20)
        assert np.isfinite(logits).nonzero()[0].tolist() == [0, 1, *kept]
        assert logits[kept].tolist() == [2.0 * 3 * token for token in kept]
    seen.add(range(20))
    assert np.isfinite(seen.logits(low, states, 20)).sum() == 2 + 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mtp")
    model, _ = write(made, follows=True)
    shapes = {name: shape for name, shape in shapes_of(model).items() if ".3.self_attn" in name}
    write_adapter(made / "a", random_adapter("a", shapes, 4))
    return made


def test_texts_do_not_depend_on_drafts(folder: Path) -> None:
    """Four at once, one with an adapter, and a second turn, whose first tokens are cached."""
    asked = [
        GenerateParams(f"{LONG[: 100 * n]} Question {n}:", 50, seed=n + 1, policy="none", **more)
        for n, more in enumerate([*SAMPLINGS, SAMPLINGS[0]])
    ]
    asked[0] = replace(asked[0], adapter="a")
    config = config_of(folder, {"weights": "int8", "lora": {"a": str(folder / "a")}})
    with serving(build_engine(config, folder), config) as server:
        check_texts(server, asked, "fixed:9", 25)


def test_files_without_the_layer_or_with_a_part_of_it(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    hf_config = load_config(folder, 64)
    assert has_mtp(folder, hf_config)
    del weights["mtp.norm.weight"]
    save_file(weights, path)
    text = r"engine\.model: .* lack 1 tensors, such as mtp\.norm\.w"
    with pytest.raises(ConfigError, match=text):
        build_engine(config_of(tmp_path / "model"), folder)
    made = build_engine(config_of(tmp_path / "model", {"mtp": False}), folder)
    assert HEADS not in made.proposers
    save_file({n: each for n, each in weights.items() if not n.startswith("mtp.")}, path)
    assert not has_mtp(tmp_path / "model", hf_config)


@pytest.mark.parametrize(
    ("engine", "is_used"),
    [({}, True), ({"mtp": False}, False), ({"draft": "d"}, False), ({"heads": "h"}, False)],
)
def test_it_is_used_unless_something_else_drafts(
    folder: Path, engine: dict[str, Any], is_used: bool
) -> None:
    own = config_of(folder, engine).engine
    assert isinstance(own, LocalEngineConfig)
    assert drafts_itself(own, folder, 64, OPENVINO) == is_used
    assert not drafts_itself(own, folder, 64, PYTORCH)
