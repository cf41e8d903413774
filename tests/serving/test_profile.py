"""Profiling: the tables of an engine whose passes can be worked by hand, and the cache on disk."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from harness import CAPABILITIES, COST, VOCAB_SIZE, fake_engine, fake_serving

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig, LocalEngineConfig
from smartspec_py.core.cost import cost_from_json
from smartspec_py.engines import measure as measuring
from smartspec_py.engines import profile as module
from smartspec_py.engines.measure import ProfileShape, measure
from smartspec_py.engines.profile import (
    cached_profile,
    driver_name,
    falls,
    fingerprint,
    load_cost,
    machine_name,
    store_cost,
    vector_instructions,
)
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_engine import FakeTarget
from smartspec_testing.local import generate

if TYPE_CHECKING:
    from smartspec_py.engines.runtimes.pytorch.causal import PyTorchRunner
    from smartspec_py.engines.runtimes.runner import PassOutput, RowInput

PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
SHAPE = ProfileShape(
    max_sequences=6, max_draft_len=4, context_len=100, prefill_chunk=40, max_prompt=200
)


@pytest.fixture(autouse=True)
def any_pass_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ENOUGH_S", math.inf)
    monkeypatch.setattr(measuring, "LONG_S", math.inf)


def by_hand(batch_size: int, tokens_per_row: int, context_len: int, num_logits: int) -> float:
    """1 s, 0.3 s a token, 0.2 s for the logits of a position, and 0.01 s for each token of context
    of each row."""
    return 1.0 + batch_size * (0.3 * tokens_per_row + 0.2 * num_logits + 0.01 * context_len)


def test_keys_that_are_read_for_each_token_are_kept_apart() -> None:
    def reads(rows: int, tokens: int, context_len: int, _: int) -> float:
        return 1.0 + 0.01 * context_len * rows * tokens

    cost = measure(CountingEngine(reads), None, SHAPE)
    assert cost.target_s(3, 9, 500) == pytest.approx(1.0 + 5.0 * 9)
    assert cost.target_s(6, 6, 500) == pytest.approx(1.0 + 5.0 * 6)
    once = measure(CountingEngine(), None, SHAPE)
    assert once.target.context_token_s == pytest.approx(0.0)


class CountingEngine:
    """A pass lasts as long as `seconds` says."""

    def __init__(self, seconds: Callable[[int, int, int, int], float] = by_hand) -> None:
        self.seconds, self.num_passes = seconds, 0
        self.timed: set[tuple[int, int, int]] = set()

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        self.num_passes += 1
        self.timed.add((batch_size, tokens_per_row, context_len))
        num_logits = tokens_per_row if num_logits is None else num_logits
        return self.seconds(batch_size, tokens_per_row, context_len, num_logits)


def test_a_profile_tells_what_the_engine_takes() -> None:
    """Rows 1, 2, 4, 6 and 1, 2, 3, 4, 5 tokens each, at a context of 100."""
    cost = measure(CountingEngine(), CountingEngine(lambda *p: 0.1 * by_hand(*p)), SHAPE)
    assert cost.target.rows == (1, 2, 4, 6)
    assert cost.target.tokens_per_row == (1, 2, 3, 4, 5)
    assert cost.target_s(2, 6, 100) == pytest.approx(1.0 + 3.0 + 2.0)
    # between the points, and at another context
    assert cost.target_s(3, 9, 100) == pytest.approx(1.0 + 4.5 + 3.0)
    assert cost.target_s(6, 6, 50) == pytest.approx(1.0 + 3.0 + 3.0)
    assert cost.draft_s(2) == pytest.approx(0.1 * (1.0 + 1.0 + 2.0))
    # Passes of 80 and of 16 tokens differ by 64 tokens that were only read: 0.1 x 0.3 each.
    assert cost.draft_prefill_s == pytest.approx(0.03)


def test_a_prompt_is_timed_as_it_is_read() -> None:
    """One row without context, and one position with logits: 1 + 0.3 n + 0.2, so that n tokens add
    0.3 (n - 1) to a pass. The last size is the chunk; one beyond it goes on with the last slope."""
    cost = measure(CountingEngine(), None, SHAPE)
    assert cost.prompt is not None
    assert cost.prompt.tokens_per_row == (1, 16, 32, 40)
    assert cost.prompt.seconds[0] == pytest.approx((1.5, 6.0, 10.8, 13.2))
    assert cost.prefill_s(40) == pytest.approx(11.7)
    assert cost.prefill_s(100) == pytest.approx(29.7)


def test_what_another_number_of_tokens_costs_is_kept_apart() -> None:
    """Half a second more if none of the last three passes had as many tokens. Less than a fiftieth
    of a pass is chance."""
    last: deque[int] = deque(maxlen=3)

    def changing(rows: int, tokens: int, *more: int, shape_change_s: float = 0.5) -> float:
        is_warm = rows * tokens in last
        last.append(rows * tokens)
        return by_hand(rows, tokens, *more) + shape_change_s * (not is_warm)

    found = measure(CountingEngine(changing), None, SHAPE)
    assert found.shape_change_s == pytest.approx(0.5)
    steady = measure(CountingEngine(), None, SHAPE)
    assert steady.shape_change_s == 0.0
    assert found.target.seconds == tuple(map(pytest.approx, steady.target.seconds))
    by_chance = CountingEngine(partial(changing, shape_change_s=0.01))
    assert measure(by_chance, None, SHAPE).shape_change_s == 0.0


def test_draft_passes_are_timed_behind_passes_of_the_target() -> None:
    """Whose weights have pushed the draft's out of the caches: so the first of two takes longer."""
    target, num_seen = CountingEngine(), 0

    def cold(*point: int) -> float:
        nonlocal num_seen
        before, num_seen = num_seen, target.num_passes
        return by_hand(*point) * (3.0 if num_seen > before else 1.0)

    cost = measure(target, CountingEngine(cold), SHAPE)
    # 1 s + 2 rows of 0.3 + 0.2 + 1.0 s is 4 s warm; three times as long and warm, on average twice.
    assert cost.draft_s(2) == pytest.approx(2 * 4.0)


def test_noise_and_edges() -> None:
    """The first 30 passes take 100 s: more than a round. Costs that fall are no negative price."""
    noisy = CountingEngine(lambda *p: 100.0 if noisy.num_passes <= 30 else by_hand(*p))
    assert measure(noisy, None, SHAPE) == measure(CountingEngine(), None, SHAPE)
    falling = CountingEngine(lambda rows, tokens, context_len, _: (1 - 1e-3 * context_len) / tokens)
    assert measure(falling, None, SHAPE).target.context_s == 0.0
    assert measure(CountingEngine(), falling, SHAPE).draft_prefill_s == 0.0
    undrafted = measure(CountingEngine(), None, replace(SHAPE, max_draft_len=0, prefill_chunk=1))
    assert (undrafted.draft, undrafted.target.tokens_per_row) == (None, (1,))
    assert undrafted.prefill_s(1) == 0.0


@pytest.mark.parametrize(
    ("fixed_s", "max_prompt", "chunk"),
    [
        (0.0, 4000, 128),  # 256 tokens take as long as two passes of 128
        (100.0, 100, 100),  # no chunk is longer than a prompt
        # 138.4 s for 128 tokens, 176.8 for 256, 253.6 for 512, 407.2 for 1024, 714.4 for 2048:
        # half of twice the time is 0.64, 0.72, 0.80 and 0.88 of it
        (100.0, 4000, 2048),
        (100.0, 1000, 512),
        (50.0, 4000, 1024),  # 203.6 for 512, 357.2 for 1024, 664.4 for 2048: 0.93
    ],
)
def test_a_chunk_is_as_long_as_prompts_get_cheaper_by_it(
    fixed_s: float, max_prompt: int, chunk: int
) -> None:
    engine = CountingEngine(lambda rows, tokens, *_: fixed_s + 0.3 * rows * tokens)
    cost = measure(engine, None, replace(SHAPE, prefill_chunk=None, max_prompt=max_prompt))
    assert cost.prompt is not None
    assert cost.prompt.tokens_per_row[-1] == chunk


NUM_CHECKED = SHAPE.max_draft_len + 1 + 2
"""A stored profile is checked by passes of one row with 1 to 5 tokens, and two more of 5."""


def is_measured(folder: Path | None, *identity: str, shape: ProfileShape = SHAPE) -> bool:
    """Whether passes were timed, and not read from the folder."""
    engine = CountingEngine()
    cost = cached_profile(engine, None, shape, folder, identity)
    assert cost == measure(CountingEngine(), None, shape)
    return engine.num_passes > NUM_CHECKED


def test_only_the_same_models_on_the_same_machine_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file is measured again, as a full disk leaves it. Without a folder nothing is
    kept."""
    folder = tmp_path / "cache"
    assert is_measured(folder, "model a", "float32")
    for identity in (("model b", "float32"), ("model a",), ("float32", "model a")):
        assert is_measured(folder, *identity)
    assert is_measured(folder, "model a", "float32", shape=replace(SHAPE, context_len=101))
    for part in ("machine_name", "vector_instructions", "driver_name"):
        with monkeypatch.context() as patch:
            patch.setattr(module, part, lambda: "another")
            assert is_measured(folder, "model a", "float32")
    assert len(list(folder.iterdir())) == 8
    assert not is_measured(folder, "model a", "float32")
    for path in folder.iterdir():
        path.write_text(path.read_text()[:40])
    assert is_measured(folder, "model b", "float32")
    assert not is_measured(folder, "model b", "float32")
    assert all(is_measured(None, "model a") for _ in range(2))


@pytest.mark.parametrize(
    "cost", [[], {}, 1, None, "text", {"target": None}, {"target": []}, {"target": [1]}, {"x": 1}]
)
def test_what_is_no_cost_model_is_refused(cost: Any) -> None:
    """Of a profile, it is measured again."""
    with pytest.raises((TypeError, ValueError)):
        cost_from_json(cost)


@pytest.mark.parametrize(
    ("factor", "is_kept"), [(1.5, False), (1.4, True), (1.0, True), (0.5, True)]
)
def test_a_profile_of_a_busy_machine_is_measured_again(
    tmp_path: Path, factor: float, is_kept: bool
) -> None:
    """It is kept if the machine is busy now: if passes take longer than it says."""
    busy = CountingEngine(lambda *point: factor * by_hand(*point))
    stored = cached_profile(busy, None, SHAPE, tmp_path, ["model a"])
    found = cached_profile(CountingEngine(), None, SHAPE, tmp_path, ["model a"])
    assert found == (stored if is_kept else measure(CountingEngine(), None, SHAPE))
    assert load_cost(next(tmp_path.iterdir())) == found


def test_costs_that_fall_with_more_tokens_are_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another program was busy while the passes of one token were measured."""
    busy = CountingEngine(lambda *point: by_hand(*point) * (5 if point[1] == 1 else 1))
    assert falls(cached_profile(busy, None, SHAPE, tmp_path, ["model a"]))
    assert "other programs were busy" in caplog.text
    found = cached_profile(CountingEngine(), None, SHAPE, tmp_path, ["model a"])
    assert found == measure(CountingEngine(), None, SHAPE)
    assert not falls(found)
    assert load_cost(next(tmp_path.iterdir())) == found


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_a_cache_that_cannot_be_written_does_not_stop_the_start(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    reason: int,
) -> None:
    """A full or read-only file system fails once the file is there; or the folder is a file."""
    write, folder = Path.write_text, tmp_path / "cache"

    def fail(self: Path, *args: Any, **options: Any) -> int:
        write(self, "half")
        raise OSError(reason, os.strerror(reason))

    if reason == errno.ENOTDIR:
        folder = Path(__file__) / "cache"
    monkeypatch.setattr(Path, "write_text", fail)
    assert is_measured(folder, "model a")
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert os.strerror(reason) in warning
    assert "set a folder that can be written" in warning
    assert list(tmp_path.glob("cache/*")) == [], "half a file is left"


CPUINFO = """processor\t: 0
model name\t: AMD EPYC
cpu family\t: 25
model\t\t: {model}
flags\t\t: fpu fma sse4_2 avx2 {flags}

processor\t: 1
model name\t: AMD EPYC
"""


def test_processors_of_one_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By model and by instructions, as virtual machines of Zen 3 and 4 differ."""
    read, found = module._cpuinfo, []
    for model, flags in ((1, "bmi2"), (17, "avx512f bmi2")):
        path = tmp_path / f"cpuinfo-{model}"
        path.write_text(CPUINFO.format(model=model, flags=flags))
        monkeypatch.setattr(module, "_cpuinfo", partial(read, path))
        found.append((machine_name(), vector_instructions()))
    assert "AMD EPYC (family 25, model 1)" in found[0][0]
    assert "AMD EPYC (family 25, model 17)" in found[1][0]
    assert [flags for _, flags in found] == ["avx2 fma", "avx2 avx512f fma"]
    monkeypatch.setattr(module, "_cpuinfo", partial(read, tmp_path / "missing"))
    assert vector_instructions() == ""


def test_the_driver_is_named_by_the_first_file_that_tells_it(tmp_path: Path) -> None:
    """The kernel's own file holds a number, that of the driver a sentence and a compiler's name."""
    short, long = tmp_path / "version", tmp_path / "proc"
    assert driver_name((short, long)) == "no NVIDIA driver"
    long.write_text("NVRM version: NVIDIA UNIX  570.86.15  Thu\nGCC version: 12\n")
    assert driver_name((short, long)) == "NVIDIA driver NVRM version: NVIDIA UNIX  570.86.15  Thu"
    short.write_text("570.86.15\n")
    assert driver_name((short, long)) == "NVIDIA driver 570.86.15"


def test_the_key_of_a_torch_engine_names_what_its_cost_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models, the GPU by its name, precision, threads and libraries, in the file itself."""
    import torch
    import transformers

    from smartspec_py.engines.local import build as build_local
    from smartspec_py.engines.local import devices

    kept = tmp_path / "profiles"
    settings = {"dtype": "float32", "device": "cpu", "num_threads": 1, "runtime": "torch"}
    settings |= {"model": str(PAIR / "target"), "draft": str(PAIR / "draft")}
    config = LocalEngineConfig.model_validate(settings | {"profile_cache": str(kept)})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert devices.device_name(torch.device("cuda")) == "NVIDIA H200"
    monkeypatch.setattr(build_local, "device_name", lambda device: "NVIDIA H200")
    limits = LimitsConfig(max_sequences=1, max_draft_len=1, max_context_len=64)
    engine = build_local.build_local(config, limits, tmp_path)
    assert engine.kernels.count("PyTorch, LlamaForCausalLM") == 2
    assert [path.name.split("-")[0] for path in kept.iterdir()] == ["profile"]
    path = engine.profile_path
    assert path is not None
    assert engine.cost.prompt is not None
    assert engine.cost.prompt.tokens_per_row == (1, 16, 32, 64), "no chunk is longer than a request"
    identity = "\n".join(json.loads(path.read_text())["identity"])
    for part in (
        fingerprint(PAIR / "target"),
        fingerprint(PAIR / "draft"),
        "NVIDIA H200, torch.float32",
        "1 threads",
        engine.kernels,
        f"torch {torch.__version__}, transformers {transformers.__version__}",
        driver_name(),
        machine_name(),
        vector_instructions(),
    ):
        assert part in identity


NUM_CHANGE = 4 + 2
"""The passes that find out what another number of tokens costs: once, as they take more than
SHAPE_CHANGE_S."""
NUM_FIRST = 5 + 2 + 2 + 3
"""Of SHAPE: 1 to 5 tokens, 6 rows and 4 rows of 5 tokens at two lengths of context, and
prompts of 1, 16 and 40."""
NUM_POINTS = 4 * 5 + 2 + 4
"""Rows by tokens, two at a shorter context, and prompts."""


@pytest.mark.parametrize(
    ("budget_s", "num_passes"),
    [
        # One pass of the largest batch is not timed, and neither is the first pass of each size.
        (0.0, NUM_CHANGE + 1 + 2 * NUM_FIRST),
        (80.0, 80),
        (math.inf, NUM_CHANGE + 1 + (1 + 5) * NUM_POINTS),
    ],
)
def test_behind_the_budget_costs_are_inferred(budget_s: float, num_passes: int) -> None:
    """A pass of the engine takes 1 s, 0.5 s a token, and 1 s a row for its context. What was not
    timed follows from this: 2 rows of 3 tokens from 1 + 0.5 x 6 for as many tokens of one row."""
    clock = VirtualClock()

    def slow(*point: int) -> float:
        clock.sleep(1.0)
        return by_hand(*point)

    engine = CountingEngine(slow)
    cost = measure(engine, None, SHAPE, budget_s, clock.now)
    assert engine.num_passes == num_passes
    whole = measure(CountingEngine(), None, SHAPE)
    for found, expected in zip(cost.target.seconds, whole.target.seconds, strict=True):
        assert found == pytest.approx(expected)
    assert cost.prefill_s(32) == pytest.approx(whole.prefill_s(32))
    assert cost.target.context_s == pytest.approx(0.01)


def test_memory_that_is_written_first_is_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over more rows than any before takes 10 s more. It is long, so it is timed once."""
    monkeypatch.setattr(measuring, "LONG_S", 5.0)
    most = 0

    def slow(rows: int, tokens: int, context_len: int, num_logits: int) -> float:
        nonlocal most
        is_new, most = rows > max(1, most), max(rows, most)
        return by_hand(rows, tokens, context_len, num_logits) + 10.0 * is_new

    cost = measure(CountingEngine(slow), None, SHAPE, 0.0)
    assert cost.target.context_s == pytest.approx(0.01)
    assert cost.target_s(6, 6, 100) == pytest.approx(1.0 + 3.0 + 6.0)


def test_a_disturbed_batch_does_not_make_short_contexts_free() -> None:
    """The largest batch seems to need 1 s for each token of context. A pass of one row takes 2.5 s,
    and at least half of it without context."""

    def disturbed(rows: int, tokens: int, context_len: int, num_logits: int) -> float:
        seconds = by_hand(rows, tokens, context_len, num_logits)
        return seconds + (1.0 * context_len if rows == 6 else 0.0)

    cost = measure(CountingEngine(disturbed), None, SHAPE)
    assert cost.target_s(1, 1, 0) == pytest.approx(1.25)


def test_what_a_row_costs_is_inferred() -> None:
    """0.5 s beside its context and its tokens, as with a recurrent state."""

    def with_states(rows: int, tokens: int, context_len: int, num_logits: int) -> float:
        return by_hand(rows, tokens, context_len, num_logits) + 0.5 * rows

    cost = measure(CountingEngine(with_states), None, SHAPE, 0.0)
    for rows, tokens in ((1, 1), (2, 1), (2, 3), (4, 2), (6, 5)):
        expected = with_states(rows, tokens, 100, tokens)
        assert cost.target_s(rows, rows * tokens, 100) == pytest.approx(expected)


def test_costs_with_a_step_are_inferred_from_passes_of_as_many_tokens() -> None:
    """A pass takes twice as long from 5 tokens on. One row shows that; 2 rows of 3 tokens follow
    it: 2 s without context, as 5 tokens, and 2 s for the context of two rows."""
    clock = VirtualClock()

    def stepped(rows: int, tokens: int, context_len: int, _: int) -> float:
        clock.sleep(1.0)
        return (1.0 if rows * tokens < 5 else 2.0) + 0.01 * rows * context_len

    cost = measure(CountingEngine(stepped), None, SHAPE, 0.0, clock.now)
    assert cost.target_s(2, 2, 100) == pytest.approx(1.0 + 2.0)
    assert cost.target_s(2, 6, 100) == pytest.approx(2.0 + 2.0)
    assert cost.target_s(6, 30, 100) == pytest.approx(2.0 + 6.0)


@pytest.mark.parametrize(("long_s", "most_tokens"), [(15.0, (5, 5, 5, 3)), (11.0, (5, 5, 4, 2))])
def test_passes_that_include_a_long_one_are_inferred(
    monkeypatch: pytest.MonkeyPatch, long_s: float, most_tokens: Sequence[int]
) -> None:
    """With 6 rows, 10 s for one token and 3 s for each further: that line is timed up to 3 tokens,
    or 2. With 4 rows, 7 s and 2 s: all 5, or 4 and the pass of 5 that is always timed. Larger
    prompts are not tried."""
    monkeypatch.setattr(measuring, "LONG_S", long_s)
    engine = CountingEngine()
    cost = measure(engine, None, replace(SHAPE, prefill_chunk=None, max_prompt=4000))
    timed = {(rows, num) for rows, num, context_len in engine.timed if context_len == 100}
    expected = zip((1, 2, 4, 6), most_tokens, strict=True)
    assert timed == {(4, 5)} | {
        (rows, num) for rows, most in expected for num in range(1, most + 1)
    }
    assert cost.target.seconds[-1] == pytest.approx((10, 13, 16, 19, 22))
    assert max(num for _, num, _ in engine.timed) == 128


@pytest.mark.parametrize(
    ("num_steps", "is_timed", "is_kept"),
    [(499, True, False), (500, True, True), (600, False, False)],
)
def test_a_server_that_decoded_enough_stores_what_it_learned(
    tmp_path: Path, num_steps: int, is_timed: bool, is_kept: bool
) -> None:
    """In the file of the profile, which stays. The first token comes with the prompt. Without times
    of passes, the whole of a step would count as the loop's own time."""
    path = tmp_path / "profile-1.json"
    store_cost(COST, path, ["model a"])
    measured = json.loads(path.read_text())
    cost = COST if is_timed else None
    target = FakeTarget(CAPABILITIES, cost=cost, clock=VirtualClock())
    with fake_serving(replace(fake_engine(), target=target, profile_path=path)) as server:
        generate(server, [GenerateParams("Task: qa", 1 + num_steps, policy="none")])
    document = json.loads(path.read_text())
    assert ("learned" in document) is is_kept
    assert {key: document[key] for key in measured} == measured
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("num_logits", "num_computed"), [(None, 10), (1, 2), (0, 0), (9, 10)])
def test_an_engine_computes_the_logits_that_a_timing_wants(
    monkeypatch: pytest.MonkeyPatch, num_logits: int | None, num_computed: int
) -> None:
    """Of 2 rows of 5 tokens: all, the last one of each, none; and no more than there are."""
    import torch

    from smartspec_py.engines.drafts.draft_model import DraftModelProposer
    from smartspec_py.engines.local.target import LocalTarget
    from smartspec_py.engines.runtimes.pytorch.causal import PyTorchRunner, load_runner
    from smartspec_py.engines.runtimes.runner import RunnerConfig

    config = RunnerConfig(PAIR / "draft", torch.device("cpu"), torch.float32, 2, 32, VOCAB_SIZE)
    runner = load_runner(config)
    forward, computed = PyTorchRunner.forward, []

    def spied(self: PyTorchRunner, inputs: Sequence[RowInput]) -> PassOutput:
        out = forward(self, inputs)
        computed.append(len(out.logits))
        return out

    monkeypatch.setattr(PyTorchRunner, "forward", spied)
    for engine in (LocalTarget(runner, CAPABILITIES), DraftModelProposer(runner, 2, 4)):
        engine.time_pass(2, 5, 0, num_logits)
    assert computed == [num_computed] * 2


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt"])
def test_fingerprint_tells_models_apart(tmp_path: Path, suffix: str) -> None:
    """By the configuration, and by names, sizes and numbers of the weight files."""
    found = []
    for number, (config, file, weights) in enumerate(
        [
            ("{}", "m", bytes(8)),
            ("{}", "m", bytes(8)),
            ('{"x": 1}', "m", bytes(8)),
            ("{}", "m", bytes(9)),
            ("{}", "n", bytes(8)),
            ("{}", "m", bytes([1] * 8)),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(config)
        (folder / f"{file}.{suffix}").write_bytes(weights)
        found.append(fingerprint(folder))
    assert found[0] == found[1]
    assert len(set(found)) == 5
