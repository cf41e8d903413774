"""Assistants of Gemma 4: what they compute, from the files of a checkpoint to texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from net_models import check_texts
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma4TextConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.engines.checkpoints.checks import ModelError, check_model
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.drafts.assistant.model import read_assistant
from smartspec_py.engines.drafts.assistant.runner import AssistantRunner
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig
from smartspec_py.faults import ConfigError
from smartspec_py.serving.build import build_engine
from smartspec_testing.local import serving

TINY = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
VOCAB, WIDTH, WINDOW, NUM_LAYERS = 2048, 128, 11, 4
KINDS = ["sliding_attention", "full_attention"]
BOTH: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "intermediate_size": 128,
    "sliding_window": WINDOW,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 0,
}
TARGET = BOTH | {
    "num_hidden_layers": NUM_LAYERS,
    "layer_types": KINDS * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
}
LAYERS = BOTH | {
    "model_type": "gemma4_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", *KINDS],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
CLUSTERS = {
    "use_ordered_embeddings": True,
    "num_centroids": 64,
    "centroid_intermediate_top_k": 8,
}
CLOSE: dict[str, float] = {"atol": 1e-3, "rtol": 1e-3}
TOKENS = [(37 * i + 11) % VOCAB for i in range(21)]
LONG = "one two three four five six seven eight nine ten " * 12


@pytest.fixture(autouse=True)
def _all_layers_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers 5.23 makes no assistant: it looks for layers whose keys are shared in it."""
    known = Gemma4TextConfig.kv_sharing_modes.fget

    def modes(config: Gemma4TextConfig) -> list[str | None]:
        num = config.num_hidden_layers
        return ["reuse"] * num if config.num_kv_shared_layers == num else known(config)

    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))


def write(folder: Path, follows: bool = False, **more: Any) -> tuple[Any, Any]:
    """A random target, and in `assistant` its assistant. Returns both.

    follows: each token decides mostly what the next one is, so that most drafts are right.
    """
    torch.manual_seed(0)
    tied = {"tie_word_embeddings": not follows}
    target = AutoModelForCausalLM.from_config(Gemma4TextConfig(**TARGET, **tied)).eval()
    config = AutoConfig.for_model(
        "gemma4_assistant", text_config=LAYERS | tied, backbone_hidden_size=WIDTH, **tied, **more
    )
    assistant = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        if assistant.masked_embedding is not None:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
        if follows:
            for name, weight in [*target.named_parameters(), *assistant.named_parameters()]:
                if name.endswith(("o_proj.weight", "down_proj.weight", "_projection.weight")):
                    weight.mul_(0.005)
            head = target.model.embed_tokens.weight[torch.randperm(VOCAB)]
            assistant.pre_projection.weight[:, :WIDTH] += torch.eye(WIDTH)
            for model in (target, assistant):
                model.lm_head.weight.copy_(head)
    for model, path in ((target, folder), (assistant, folder / "assistant")):
        path.mkdir(exist_ok=True)
        model.config.save_pretrained(path)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if not follows:
            del weights["lm_head.weight"]
        save_file(weights, path / "model.safetensors")
    document = json.loads((folder / "config.json").read_text())
    document["architectures"] = ["Gemma4ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(document))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    return target, assistant


@torch.inference_mode()
def expected_drafts(target: Any, assistant: Any, num: int) -> torch.Tensor:
    """The logits of num drafts after TOKENS, of which the target has not read the last one."""
    read = torch.tensor([TOKENS[:-1]])
    out = target.model(read, return_shared_kv_states=True)
    state, token, found = out.last_hidden_state[:, -1:], TOKENS[-1], []
    keys = dict(out.shared_kv_states)
    near = tuple(each[:, :, -(WINDOW - 1) :] for each in keys["sliding_attention"])
    for _ in range(num):
        embedded = target.model.embed_tokens(torch.tensor([[token]]))
        drafted = assistant(
            inputs_embeds=torch.cat([embedded, state], -1),
            position_ids=torch.tensor([[len(TOKENS) - 1]]),
            shared_kv_states=keys | {"sliding_attention": near},
        )
        state, logits = drafted.last_hidden_state, drafted.logits[0, 0]
        found.append(logits)
        token = int(logits.argmax())
    return torch.stack(found)


def load(folder: Path, **more: Any) -> tuple[OpenVinoRunner, AssistantRunner]:
    own = RunnerConfig(
        folder, torch.device("cpu"), torch.float32, 2, 96, VOCAB,
        gives_hidden=True, gives_keys=True, keeps_weights=True,
    )  # fmt: skip
    target = load_openvino_runner(replace(own, **more))
    of = read_assistant(folder / "assistant", load_config(folder, 96))
    return target, AssistantRunner(of, target)


def drafts(target: OpenVinoRunner, runner: AssistantRunner, num: int) -> Iterator[torch.Tensor]:
    """Beside another row that asks as its first token."""
    read, width = TOKENS[:-1], WIDTH
    [other] = target.forward([RowInput(0, 0, [5], 1, 1)]).states
    target.forward([RowInput(1, 0, read[:9], 0, 9)])
    [states] = target.forward([RowInput(1, 9, read[9:], 1, len(read) - 9)]).states
    token, state = TOKENS[-1], states[-1:]
    for _ in range(num):
        out = runner.forward(
            [
                RowInput(0, 1, [7], 1, states=other),
                RowInput(1, len(read), [token], 1, states=state),
            ]
        )
        yield out.logits[1]
        token = int(out.logits[1].argmax())
        state = torch.cat([out.states[1], state[:, width:]], 1)


@pytest.mark.parametrize("clusters", [{}, CLUSTERS])
def test_drafts_are_those_of_transformers(tmp_path: Path, clusters: dict[str, Any]) -> None:
    """Also with a window that is shorter than the text. Transformers gives tokens that are not
    drafted the least logit less 1."""
    expected = expected_drafts(*write(tmp_path, **clusters), 4)
    found = torch.stack(list(drafts(*load(tmp_path), 4)))
    if clusters:
        assert (found.isfinite().sum(1) == VOCAB // 8).all()
        floor = expected.amin(1, keepdim=True)
        found = torch.where(found.isfinite(), found, floor.expand_as(found))
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_compressed_weights_change_drafts_little(tmp_path: Path, weights: str) -> None:
    whole, found = [], []
    for each, into in (("stored", whole), (weights, found)):
        write(tmp_path, **CLUSTERS)
        into.append(next(drafts(*load(tmp_path, weights=each), 1)))
    both = whole[0].isfinite() & found[0].isfinite()
    assert both.sum() > VOCAB // 16
    scale = float(whole[0][both].abs().max())
    allowed = 0.1 if weights == "int8" else 0.5  # the target's state has 4 bits, too
    torch.testing.assert_close(found[0][both], whole[0][both], atol=allowed * scale, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["stored", "int8"])
@pytest.mark.parametrize("kv_cache", ["auto", "u8"])
def test_drafts_do_not_change_the_target_s_keys(
    tmp_path: Path, weights: str, kv_cache: str, dtype: torch.dtype
) -> None:
    write(tmp_path)
    target, runner = load(tmp_path, weights=weights, kv_cache=kv_cache, dtype=dtype)
    drafting = drafts(target, runner, 2)
    [states] = target.forward([RowInput(1, 0, TOKENS[:-1], 1, len(TOKENS) - 1)]).states
    before = {name: each.data.copy() for name, each in target.cache.tensors.items()}
    runner.forward([RowInput(1, len(TOKENS) - 1, [7], 1, states=states[-1:])])
    for name, each in target.cache.tensors.items():
        assert before[name].any()
        assert before[name].tobytes() == each.data.tobytes()
    assert len(list(drafting)) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma4")


def test_texts_do_not_depend_on_drafts(folder: Path) -> None:
    """Four at once, one of them sampled, and a second turn, whose first tokens are cached."""
    write(folder, follows=True)
    engine = {"kind": "local", "device": "cpu", "num_threads": 1, "weights": "int8"}
    engine |= {"model": str(folder), "heads": str(folder / "assistant")}
    limits = {"max_sequences": 4, "max_draft_len": 6, "max_context_len": 512, "profile_s": 0.0}
    config = ServerConfig.model_validate({"engine": engine, "limits": limits})
    more: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"repetition_penalty": 1.2}, {}]
    asked = [
        GenerateParams(
            f"{LONG[: 100 * n]} Question {n}:",
            50,
            seed=n + 1,
            policy="none",
            ignore_eos=True,
            **one,
        )
        for n, one in enumerate(more)
    ]
    with serving(build_engine(config, folder), config) as server:
        check_texts(server, asked, "fixed:6", 20)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("backbone_hidden_size", 64, "backbone_hidden_size is 64, and the target's is 128"),
        ("num_centroids", 100, "num_centroids 100 .* a divisor of the vocab_size of 2048"),
        ("centroid_intermediate_top_k", 0, r"0 .* a whole number in 1\.\.64"),
        ("text_config", LAYERS | {"vocab_size": 96}, "vocab_size is 96"),
        ("text_config", LAYERS | {"global_head_dim": 32}, "layer 2 are 32 wide"),
    ],
)
def test_an_assistant_of_another_model(tmp_path: Path, field: str, value: Any, text: str) -> None:
    write(tmp_path, **CLUSTERS)
    path = tmp_path / "assistant" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ModelError, match=text):
        read_assistant(tmp_path / "assistant", load_config(tmp_path, 96))


def test_what_is_refused(tmp_path: Path) -> None:
    """As a model, for another type of target, beside a draft model, and with damaged files."""
    write(tmp_path, **CLUSTERS)
    assistant = tmp_path / "assistant"
    with pytest.raises(ModelError, match="is a head and not a model: give it as --heads"):
        check_model("the draft", assistant)
    with pytest.raises(ModelError, match="is of the type llama, not gemma4_text or"):
        read_assistant(assistant, AutoConfig.for_model("llama"))
    own = {"kind": "local", "device": "cpu", "model": str(tmp_path), "heads": str(assistant)}
    config = ServerConfig.model_validate({"engine": own | {"draft": str(tmp_path)}})
    with pytest.raises(ConfigError, match="an assistant and a draft model cannot be loaded"):
        build_engine(config, tmp_path)
    path = assistant / "model.safetensors"
    weights = load_file(path)
    for name, tensor, text in (
        ("masked_embedding.token_ordering", torch.zeros(VOCAB, dtype=torch.long), "2048 tokens on"),
        ("post_projection.weight", None, "lack 1 tensors, such as post_projection.weight"),
    ):
        save_file({k: v for k, v in (weights | {name: tensor}).items() if v is not None}, path)
        config = ServerConfig.model_validate({"engine": own})
        with pytest.raises(ConfigError, match=text):
            build_engine(config, tmp_path)
