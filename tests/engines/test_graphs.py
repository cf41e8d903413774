"""Padded passes in static buffers against packed ones, on a CPU as a dry run.

The reference is `PyTorchRunner`, which pads nothing and which `test_local_engine` holds against
Transformers. Only the test marked `gpu` captures and replays; the rest shows that what would be
captured computes the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ragged_reference
import torch
from local_models import (
    CONFIGS,
    VOCAB_SIZE,
    make_model,
)

from smartspec_py.engines.draft import Tree
from smartspec_py.engines.local.load import uses_graphs
from smartspec_py.engines.runtimes.pytorch import graphs
from smartspec_py.engines.runtimes.pytorch.causal import CausalModel, PyTorchRunner
from smartspec_py.engines.runtimes.pytorch.compiled import merge_products
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner
from smartspec_py.engines.runtimes.pytorch.packed import ATTENTION_NAME, write_plainly
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig

pytestmark = pytest.mark.usefixtures("without_triton")


LONG = 600
"""Tokens of a row."""

MAX_WIDTH = 33
"""Of a pass of drafts here."""

CPU = torch.device("cpu")


def make_pair(
    kind: str = "llama",
    max_len: int = LONG,
    num_rows: int = 6,
) -> tuple[PyTorchRunner, GraphRunner]:
    """The same model, plain and padded, each with a cache of its own."""
    config = RunnerConfig(Path("model"), CPU, torch.float32, num_rows, max_len, VOCAB_SIZE)
    model = ready(kind, config)
    merge_products(model)  # as on a GPU
    padded = GraphRunner(CausalModel(model, config), config)
    padded.warm()
    assert is_captured(padded)
    return PyTorchRunner(CausalModel(ready(kind, config), config), config), padded


def is_captured(runner: GraphRunner) -> bool:
    return runner.about.endswith(" in CUDA graphs")


def ready(kind: str, config: RunnerConfig, noise: float = 0.0) -> Any:
    model = make_model(kind, noise=noise).to(config.device)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def some_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def fill(rng: random.Random, runners: Sequence[PyTorchRunner], lengths: Sequence[int]) -> None:
    """Read a prompt of each length, one a row, in chunks."""
    for row, length in enumerate(lengths):
        tokens = some_tokens(rng, length)
        for start in range(0, length, 100):
            chunk = RowInput(row, start, tokens[start : start + 100], 0)
            for runner in runners:
                runner.forward([chunk])


def random_pass(rng: random.Random, lengths: Sequence[int], max_len: int) -> list[RowInput]:
    """New tokens for some of the rows, in any order; drafts may begin before a row's end."""
    rows = rng.sample(range(len(lengths)), rng.randrange(1, len(lengths) + 1))
    inputs = []
    for row in rows:
        position = max(0, lengths[row] - rng.randrange(3))
        width = min(rng.choice((1, 1, 2, 4, 5, 8, 11, MAX_WIDTH)), max_len - position)
        tokens = some_tokens(rng, width)
        inputs.append(RowInput(row, position, tokens, rng.randrange(width + 1)))
    return inputs


@pytest.mark.parametrize(
    "kind", ["llama, grouped keys", "mistral, window 11", "gemma2, window 11", "gpt-neox"]
)
def test_logits_are_those_of_a_packed_pass(kind: str) -> None:
    """Rows of 0 to 599 tokens, with gaps between those in the pass, up to the last position."""
    rng = random.Random(3)
    plain, padded = make_pair(kind)
    lengths = [3, 599, 0, 250, 511, 590]
    fill(rng, [plain, padded], lengths)
    num_replays = padded.num_replays
    for _ in range(12):
        inputs = random_pass(rng, lengths, LONG)
        expected, found = plain.forward(inputs).logits, padded.forward(inputs).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert padded.num_replays == num_replays + 12


def test_trees_are_those_of_a_packed_pass() -> None:
    """Beside chains; of up to 64 tokens, which may also follow the row."""
    rng = random.Random(6)
    plain, padded = make_pair()
    lengths = [20, 599, 300, 41, 7, 2]
    fill(rng, [plain, padded], lengths)
    for num_tokens in (2, 7, 20, 64):
        tree_of_row = Tree((0, *(rng.randrange(node) for node in range(1, num_tokens))))
        tree = RowInput(2, 300, some_tokens(rng, num_tokens), num_tokens, tree=tree_of_row)
        inputs = [RowInput(0, 20, some_tokens(rng, 3), 3), tree, RowInput(3, 41, [5], 1)]
        expected, found = plain.forward(inputs).logits, padded.forward(inputs).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_products_with_the_same_input_are_merged() -> None:
    """q, k, v and gate, up of two layers, but not those of which only some have a bias."""
    model = make_model("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 48)
    merge_products(model)
    shapes = [
        tuple(part.weight.shape)
        for part in model.model.layers.modules()
        if isinstance(part, torch.nn.Linear)
    ]
    apart = [(48, 32), (48, 32), (32, 48)]
    assert sorted(shapes) == sorted([(96, 32), (32, 32)] * 2 + [(96, 32), (32, 48), *apart])


def test_padding_changes_no_key() -> None:
    """Of the whole cache, only the slots of the pass's own tokens change, in every layer, and to
    what a packed pass writes there. Row 3 of six is the highest, so two more are padding."""
    rng = random.Random(7)
    plain, padded = make_pair()
    fill(rng, [plain, padded], [30, 599, 12, 255, 40, 80])
    inputs = [RowInput(3, 254, some_tokens(rng, 3), 1), RowInput(1, 597, some_tokens(rng, 2), 2)]
    before = padded.cache.buffer.clone()
    for runner in (plain, padded):
        runner.forward(inputs)
    is_changed = (padded.cache.buffer != before).any(dim=(4, 5)).all(dim=(0, 1))
    assert is_changed.nonzero().tolist() == [[1, 597], [1, 598], [3, 254], [3, 255], [3, 256]]
    unchanged = before.transpose(2, 0).transpose(3, 1)[~is_changed]
    assert torch.equal(padded.cache.buffer.transpose(2, 0).transpose(3, 1)[~is_changed], unchanged)
    torch.testing.assert_close(padded.cache.buffer, plain.cache.buffer, rtol=1e-4, atol=1e-4)


def test_number_of_replays() -> None:
    """One for rows that decode and prompts together; none for more than 1,024 tokens."""
    _, padded = make_pair(num_rows=64, max_len=64)
    long = [RowInput(row, 0, [1] * 40, 1) for row in range(5)]
    for inputs, expected in (
        (long[:1], 1),
        ([RowInput(9, 0, [1], 1), *long], 1),
        ([RowInput(0, 0, [1] * 40, 40)], 1),
        ([RowInput(row, 0, [1] * 16, 1) for row in range(64)], 1),
        ([RowInput(row, 0, [1] * 17, 1) for row in range(64)], 0),
    ):
        num_replays = padded.num_replays
        padded.forward(inputs)
        assert padded.num_replays == num_replays + expected


def test_rows_beyond_a_split_have_other_graphs() -> None:
    """Rows of up to 1,024 keys, and longer ones."""
    _, padded = make_pair(max_len=1100, num_rows=2)
    calls = []
    for shape, replay in padded._graphs.items():
        padded._graphs[shape] = lambda shape=shape, replay=replay: (calls.append(shape), replay())
    for position in (1022, 1023, 1024):
        padded.forward([RowInput(0, position, [1], 1)])
    assert [shape.context_len for shape in calls] == [1024, 1024, 1100]


def test_a_capture_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return ragged_reference.attend(*arguments, **options) * 0.5

    monkeypatch.setattr(graphs, "kernels", lambda: (wrong, write_plainly))
    config = RunnerConfig(Path("model"), CPU, torch.float32, 3, 64, VOCAB_SIZE)
    runner = GraphRunner(CausalModel(ready("llama", config), config), config)
    runner.warm()
    assert not is_captured(runner)
    assert "their logits differ by" in caplog.text
    runner.forward([RowInput(0, 0, [1], 1)])
    assert runner.num_replays == 1, "that of the comparison"


def test_a_capture_whose_kernel_fails_leaves_plain_passes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(graphs, "kernels", lambda: (ragged_reference.attend, broken))
    config = RunnerConfig(Path("model"), CPU, torch.float32, 3, 64, VOCAB_SIZE)
    model = CausalModel(ready("llama", config), config)
    runner, plain = GraphRunner(model, config), PyTorchRunner(model, config)
    runner.warm()
    assert "cannot be captured as CUDA graphs (no compiler)" in caplog.text
    inputs = [RowInput(0, 0, [1, 2], 2)]
    assert torch.equal(runner.forward(inputs).logits, plain.forward(inputs).logits)


@pytest.mark.parametrize("states", [{}, {"gives_hidden": True}, {"state_layers": (0, 2)}])
def test_prompts_beside_rows_that_decode(states: dict[str, Any]) -> None:
    """Logits, states and keys are those of a packed pass, in the order of the inputs."""
    rng = random.Random(11)
    config = RunnerConfig(Path("model"), CPU, torch.float32, 6, LONG, VOCAB_SIZE, **states)
    model = CausalModel(ready("llama", config), config)
    plain, padded = PyTorchRunner(model, config), GraphRunner(model, config)
    padded.warm()
    fill(rng, [plain, padded], [20, 0, 300, 41, 0, 2])
    inputs = [
        RowInput(4, 0, some_tokens(rng, 200), 1),
        RowInput(2, 300, some_tokens(rng, 5), 5),
        RowInput(1, 0, some_tokens(rng, 64), 0),
        RowInput(0, 20, some_tokens(rng, 1), 1),
    ]
    num_replays = padded.num_replays
    expected, found = plain.forward(inputs), padded.forward(inputs)
    assert padded.num_replays == num_replays + 1
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    padded.forward([RowInput(5, 2, [1, 2, 3], 1)])  # must not change the states of the pass before
    plain.forward([RowInput(5, 2, [1, 2, 3], 1)])
    torch.testing.assert_close([*found.states], [*expected.states], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded.cache.buffer, plain.cache.buffer, rtol=1e-4, atol=1e-4)


def test_timed_passes_are_replayed_like_served_ones() -> None:
    """Decoding with drafts, and prompts."""
    _, padded = make_pair()
    for num_rows, width, context_len, num_logits in (
        (1, 1, 0, None), (6, 8, 300, None), (5, 7, 599, None), (3, 2, 511, None), (1, 400, 0, 1),
    ):  # fmt: skip
        num_replays = padded.num_replays
        assert padded.time_pass(num_rows, width, context_len, num_logits) > 0
        assert padded.num_replays == num_replays + 1


@pytest.mark.parametrize(
    ("device", "cuda_graphs", "expected"),
    [("cuda", True, True), ("cuda:1", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_who_uses_graphs(device: str, cuda_graphs: bool, expected: bool) -> None:
    from smartspec_py.config import LocalEngineConfig

    config = LocalEngineConfig(model="m", cuda_graphs=cuda_graphs)
    assert uses_graphs(config, torch.device(device)) is expected
    assert LocalEngineConfig(model="m").cuda_graphs


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns, and stops at a warning
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures on a CUDA device")
@pytest.mark.parametrize("kind", CONFIGS)
def test_captured_passes_on_a_gpu(kind: str) -> None:
    """The same comparison on a device, eager and replayed, each size more than once and in any
    order. Tolerances are wider: another shape may take another kernel."""
    rng = random.Random(3)
    config = RunnerConfig(Path("model"), torch.device("cuda"), torch.float32, 6, LONG, VOCAB_SIZE)
    model = CausalModel(ready(kind, config), config)
    plain, captured = PyTorchRunner(model, config), GraphRunner(model, config)
    captured.warm()
    assert is_captured(captured)
    lengths = [3, 599, 0, 250, 511, 590]
    fill(rng, [plain, captured], lengths)
    for _ in range(100):
        inputs = random_pass(rng, lengths, LONG)
        expected, found = plain.forward(inputs).logits, captured.forward(inputs).logits
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
