"""Models with gated delta nets, from the files of a checkpoint to texts. Whether they give what
Transformers gives is in test_model_types, and whether bits depend on the pass in test_same_bits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import NET_FIELDS, NETS, few_fields, write_gguf
from net_models import SIZES, tokens_of
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.constants import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.recurrent import num_key_layers, state_shapes
from smartspec_py.engines.checkpoints.sizes import check_sizes
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.recurrent import (
    ALONE,
    ALONE_SLOTS,
    KEPT,
    LOOPED,
    PAST,
    PLACES,
    SLOTS,
    TAPS,
    TILE_ENDS,
    TILE_TOKENS,
)
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.openvino.states import States
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig
from smartspec_py.faults import ConfigError
from smartspec_py.serving.build import build_engine
from smartspec_testing.local import generate, serving

pytestmark = pytest.mark.slow  # so that they run beside the others

CPU = torch.device("cpu")
TINY = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
LONG = "one two three four five six seven eight nine ten " * 12
NUM = 6
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"repetition_penalty": 1.2}]


def make_config(**more: Any) -> Any:
    return AutoConfig.for_model("qwen3_5_text", **SIZES | more)


def write_model(folder: Path, noise: float = 0.0) -> None:
    """noise: a draft is the target with its weights disturbed by so much."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-6.0, -2.0)  # so that states remember
            weight.add_(noise * torch.randn_like(weight))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recurrent")
    write_model(root / "target")
    write_model(root / "draft", noise=0.004)
    return root


def config_of(folder: Path, engine: dict[str, Any] | None = None, **limits: Any) -> ServerConfig:
    models = {"model": str(folder / "target"), "draft": str(folder / "draft")}
    few = {"max_sequences": 4, "max_draft_len": 5, "max_context_len": 512, "profile_s": 0.0}
    own = {"kind": "local", "device": "cpu", "num_threads": 1, **models, **(engine or {})}
    return ServerConfig.model_validate({"engine": own, "limits": few | limits})


def asked(num: int, **more: Any) -> list[GenerateParams]:
    return [
        GenerateParams(
            f"{LONG[: 30 * n]} Question {n}:",
            60,
            seed=n + 1,
            **SAMPLINGS[n % len(SAMPLINGS)],
            **more,
        )
        for n in range(num)
    ]


def test_texts_do_not_depend_on_drafts(folder: Path) -> None:
    """With a draft model that has states, too, in a cache that has room for all, and in one that
    preempts."""
    config = config_of(folder)
    with serving(build_engine(config, folder), config) as server:
        expected = tokens_of(generate(server, asked(NUM, policy="none")))
        ways = [("fixed:5", DRAFT_MODEL), ("goodput", None)]
        for policy, proposer in ways:
            found = generate(server, asked(NUM, policy=policy, proposer=proposer))
            assert tokens_of(found) == expected
            if proposer == DRAFT_MODEL:
                assert sum(sink.progress.num_accepted for sink in found) > 100
    tight = config_of(folder, max_context_len=192, max_cache_tokens=192)
    with serving(build_engine(tight, folder), tight) as server:
        found = generate(server, asked(NUM, policy="fixed:5", proposer=DRAFT_MODEL))
        assert tokens_of(found) == expected
        assert server.loop.lifecycle.num_preemptions


def test_long_drafts_are_taken_back(folder: Path) -> None:
    """Over several tiles, from short and long prompts."""
    config = config_of(folder, max_draft_len=24)
    given = [
        GenerateParams(LONG[: 90 * n] + f"Q{n}", 50, policy="none", temperature=n % 2, seed=n)
        for n in range(2)
    ]
    with serving(build_engine(config, folder), config) as server:
        expected = tokens_of(generate(server, given))
        for proposer in (DRAFT_MODEL, PROMPT_LOOKUP):
            drafted = [replace(one, policy="fixed:24", proposer=proposer) for one in given]
            found = generate(server, drafted)
            assert tokens_of(found) == expected
            if proposer == DRAFT_MODEL:
                assert sum(sink.progress.num_drafted for sink in found) > 150


@pytest.mark.parametrize("max_context_len", [31, 32])
def test_contexts_of_one_block(folder: Path, max_context_len: int) -> None:
    """Whose block has not the number of a row."""
    config = config_of(folder, {"draft": None}, max_context_len=max_context_len)
    given = [GenerateParams(f"Question {n}", 6, seed=1, policy="none") for n in range(6)]
    with serving(build_engine(config, folder), config) as server:
        alone = [generate(server, [one])[0].tokens for one in given]
        assert tokens_of(generate(server, given)) == alone


def test_a_draft_that_is_not_finite_spoils_no_token_before_it(folder: Path) -> None:
    """In the same tile."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    config = RunnerConfig(folder / "target", CPU, torch.float32, 2, 96, 2048, num_back=7)
    runner = OpenVinoRunner(model, config)
    tokens = [11 + 3 * i for i in range(40)]
    runner.forward([RowInput(row, 0, tokens[:20], 0, 20) for row in (0, 1)])
    expected = runner.forward([RowInput(0, 20, tokens[20:30], 10)]).logits
    drafted = runner.forward([RowInput(1, 20, [*tokens[20:22], 7, 7, 7, 7, 7], 7)]).logits
    assert torch.equal(drafted[:2], expected[:2])
    assert drafted[2:].isnan().all()
    again = runner.forward([RowInput(1, 22, tokens[22:30], 8)]).logits
    assert torch.equal(again, expected[2:])


def test_a_conversation_continues_at_a_kept_state(folder: Path) -> None:
    config = config_of(folder)
    with serving(build_engine(config, folder), config) as server:
        [first] = generate(server, [GenerateParams(LONG, 8, policy="none")])
        num_read = first.last.num_input_tokens
        following = GenerateParams(LONG + "and so on", 8, policy="none")
        [again] = generate(server, [following])
        [alone] = generate(server, [replace(following, reuse_prefix=False)])
    assert again.progress.num_cached == num_read // 8 * 8 > 270
    assert alone.progress.num_cached == 0
    assert again.tokens == alone.tokens


def test_pytorch_does_not_compute_it(folder: Path) -> None:
    text = "target is of the type qwen3_5_text, which only OpenVINO computes, on a CPU: engine.runt"
    with pytest.raises(ConfigError, match=text):
        build_engine(config_of(folder, {"runtime": "torch"}), folder)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("linear_num_value_heads", 3, "a multiple of the 2 linear_num_key_heads"),
        ("linear_key_head_dim", 0, "a whole number in 1..100000000"),
        ("linear_conv_kernel_dim", 9, "a whole number in 1..8"),
    ],
)
def test_impossible_numbers(field: str, value: int, rule: str) -> None:
    text = f"m has the {field} {value} in its config.json, which must be {rule}: replace it"
    with pytest.raises(ModelError, match=text):
        check_sizes("m", make_config(**{field: value}))


def test_layers_without_attention_alone_are_refused(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder / "target", tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"layer_types": ["linear_attention"] * 4})
    )
    config = config_of(tmp_path, {"draft": None})
    with pytest.raises(ConfigError, match="type qwen3_5_text with this config are not supported"):
        build_engine(config, tmp_path)


EXPERT_SIZES = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
}
EXPERT_FIELDS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 32,
}


def write_file(path: Path, kind: str, num_values: int, **changed: Any) -> Any:
    """A GGUF file; returns its model."""
    torch.manual_seed(0)
    has_experts = "moe" in kind
    sizes = SIZES | {"linear_num_value_heads": num_values} | (EXPERT_SIZES if has_experts else {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    fields = NET_FIELDS | (EXPERT_FIELDS if has_experts else {})
    fields |= {"ssm.time_step_rank": num_values, "ssm.inner_size": 32 * num_values}
    fields = {f"{NETS[kind]}.{key}": value for key, value in fields.items()}
    write_gguf(path, model, few_fields(2048), **(fields | changed))
    return model


@pytest.mark.parametrize(("kind", "num_values"), [(kind, n) for kind in NETS for n in (2, 4)])
def test_a_gguf_file(tmp_path: Path, kind: str, num_values: int) -> None:
    """If keys have fewer heads than values, the file has those of values in another order."""
    model = write_file(tmp_path / "m.gguf", kind, num_values)
    tokens = [5 * i % 2048 for i in range(30)]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    config = RunnerConfig(model_folder(tmp_path / "m.gguf"), CPU, torch.float32, 1, 64, 2048)
    found = load_openvino_runner(config).forward([RowInput(0, 0, tokens, 30, 30)]).logits
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4 * largest)


def test_layers_of_a_gguf_file_that_draft_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    fields = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 5}
    drafting = {"blk.4.nextn.eh_proj.weight": np.ones((128, 256), np.float32)}
    write_file(path, "qwen3_5_text", 2, tensors=drafting, **fields)
    assert load_config(model_folder(path), 64).num_hidden_layers == 4


def test_adapters_do_not_fit_a_file_with_another_order(tmp_path: Path) -> None:
    write_file(tmp_path / "m.gguf", "qwen3_5_text", 4)
    engine = {"model": str(tmp_path / "m.gguf"), "draft": None, "lora": {"a": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"engine\.lora: .* heads in another order"):
        build_engine(config_of(tmp_path, engine), tmp_path)


def test_a_pass_is_timed_behind_the_longest_context(folder: Path) -> None:
    """As far as there is room for it."""
    config = RunnerConfig(folder / "target", CPU, torch.float32, 2, 64, 2048)
    runner = load_openvino_runner(config)
    for num_tokens in (1, 16, 80):
        assert runner.time_pass(2, num_tokens, 60) > 0


def test_sizes() -> None:
    config = make_config()
    shapes = state_shapes(config)
    assert shapes is not None
    assert num_key_layers(config) == 1
    assert shapes == (3, (4, 32, 32), 256 + 8, 4)
    assert shapes.num_bases(7) == 2
    assert shapes.num_past(7) == 3 + 8 + 16
    assert shapes.row_bytes(7) == 4 * 3 * (2 * 4 * 32 * 32 + 27 * 264)
    assert shapes.prefix_bytes == 4 * 3 * (4 * 32 * 32 + 3 * 264)


def results_of(states: States, value: float) -> list[Any]:
    """Those of a pass, all equal to the value."""
    shapes = state_shapes(make_config())
    assert shapes is not None
    num_changed, num_kept = sum(part.changes_state for part in states._parts), len(states._kept)
    each = [np.full((num_kept, shapes.width), value), np.full((num_changed, *shapes.delta), value)]
    return each * shapes.num_layers


def test_tiles_of_a_pass() -> None:
    """Two slots are of each row, and the first of none."""
    shapes = state_shapes(make_config())
    assert shapes is not None
    states = States(shapes, num_rows=2, num_back=2, num_kept=3)
    assert states.free_slots == range(5, 8)
    first = RowInput(0, 0, [5] * 19, 1, num_prompt=19, kept_state=(16, 6))
    given = states.begin([first], [19], 20)
    assert given[SLOTS].tolist() == [0]
    assert given[LOOPED].tolist() == [[0], [1], [2]]
    assert given[ALONE].tolist() == given[ALONE_SLOTS].tolist() == given[PAST].tolist() == []
    taps = given[TAPS].reshape(4, -1)
    assert taps[:, :3].tolist() == [[20, 20, 20], [20, 20, 0], [20, 0, 1], [0, 1, 2]]
    assert taps[:, 18].tolist() == [15, 16, 17, 18]
    assert taps[:, 19].tolist() == [20] * 4  # there is no such token
    assert given[PLACES].tolist() == [*range(19), 0]
    assert given[TILE_TOKENS].reshape(-1).tolist() == [1.0] * 19 + [0.0] * 13
    assert given[TILE_ENDS].reshape(-1).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert given[KEPT].tolist() == [*range(2, 19)]  # the last 3 + 8 + 6
    states.finish(results_of(states, 7.0))
    of_states = states.tensors["states.0"].data
    assert (of_states[[1, 6]] == 7.0).all()
    # Beside another row, with a lone token of a prompt and its copy.
    rows = [RowInput(1, 0, [5], 1, num_prompt=1), RowInput(0, 19, [5] * 6, 6)]
    given = states.begin(rows, [2, 6], 8)
    assert given[SLOTS].tolist() == [1]
    assert given[LOOPED].tolist() == [[1], [2]]
    assert given[ALONE_SLOTS].tolist() == given[ALONE].tolist() == [0]
    assert given[PAST].tolist() == [13, 14, 15, 16, 0, 1]  # tokens 13 to 18 of 17 that are kept
    assert given[PLACES].tolist() == [16, 16, *range(3, 9)]
    assert given[TAPS][3, 1].tolist() == [3, 4, 5, 8, 9, 10, 11, 12]
    assert given[TILE_ENDS].reshape(-1).tolist() == [0.0, 1.0, 0.0, 0.0]
    states.finish(results_of(states, 8.0))
    assert (of_states[2] == 8.0).all()
    # The last three tokens are taken back, and with them the state behind 24.
    given = states.begin([RowInput(0, 22, [5], 1)], [1], 1)
    assert given[SLOTS].tolist() == []
    assert given[ALONE_SLOTS].tolist() == [1]
    states.finish(results_of(states, 9.0))
    assert (of_states[1] == 7.0).all()
    # A prefix of 16 tokens begins in the other row.
    states.load(6, 1, 16)
    given = states.begin([RowInput(1, 16, [5], 1)], [1], 1)
    assert given[ALONE_SLOTS].tolist() == [3]
    assert (of_states[3] == 7.0).all()
    assert (states.tensors["past.0"].data[given[PAST]] == 7.0).all()
    states.pretend(2, 9)
    assert states.begin([RowInput(1, 9, [5], 1)], [1], 1)[ALONE_SLOTS].tolist() == [3]
    states.release()
    # Rows with one tile and two.
    given = states.begin([RowInput(0, 0, [5] * 8, 1), RowInput(1, 0, [5] * 12, 1)], [8, 12], 20)
    assert given[LOOPED].tolist() == [[0, 1], [3, 2]]
    assert given[PLACES].tolist() == [*range(16), *range(24, 28)]
    states.release()
    with pytest.raises(AssertionError, match="row 1 has no state before token 9"):
        states.begin([RowInput(1, 9, [5], 1)], [1], 1)
