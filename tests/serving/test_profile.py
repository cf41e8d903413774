"""Profiling: the tables of an engine whose passes can be worked by hand, and the cache on disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.serving import profile as module
from smartspec_py.serving.config import LimitsConfig, TorchEngineConfig
from smartspec_py.serving.profile import (
    ProfileShape,
    cached_profile,
    driver_name,
    fingerprint,
    load_cost,
    machine_name,
    profile,
    store_cost,
)

PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
SHAPE = ProfileShape(max_sequences=6, max_draft_len=4, context_len=100)


class CountingEngine:
    """A pass lasts 1 s, and 0.5 s a token, and 0.01 s for each token of context of each row."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.num_passes = 0

    def time_pass(self, num_rows: int, tokens_per_row: int, context_len: int) -> float:
        self.num_passes += 1
        tokens_s = 0.5 * num_rows * tokens_per_row
        return self.factor * (1.0 + tokens_s + 0.01 * num_rows * context_len)


def test_a_profile_tells_what_the_engine_takes() -> None:
    """Rows 1, 2, 4, 6 and 1, 2, 3, 4, 5 tokens each, at a context of 100."""
    cost = profile(CountingEngine(), CountingEngine(0.1), SHAPE)
    assert cost.target.rows == (1, 2, 4, 6)
    assert cost.target.tokens_per_row == (1, 2, 3, 4, 5)
    assert cost.target_s(2, 6, 100) == pytest.approx(1.0 + 3.0 + 2.0)
    # between the points, and at another context
    assert cost.target_s(3, 9, 100) == pytest.approx(1.0 + 4.5 + 3.0)
    assert cost.target_s(6, 6, 50) == pytest.approx(1.0 + 3.0 + 3.0)
    assert cost.draft_s(2) == pytest.approx(0.1 * (1.0 + 1.0 + 2.0))
    # 64 tokens in one pass from nothing: 0.1 * (1 + 32) / 64 each
    assert cost.catch_up_s == pytest.approx(0.1 * 33 / 64)


def test_without_a_draft_model_there_is_no_draft_table() -> None:
    cost = profile(CountingEngine(), None, replace(SHAPE, max_draft_len=0))
    assert cost.draft is None
    assert cost.target.tokens_per_row == (1,)


class NoisyEngine(CountingEngine):
    """The first 30 passes are disturbed and take 100 s: the first of three rounds and a half."""

    def time_pass(self, num_rows: int, tokens_per_row: int, context_len: int) -> float:
        seconds = super().time_pass(num_rows, tokens_per_row, context_len)
        return 100.0 if self.num_passes <= 30 else seconds


def test_a_disturbance_longer_than_a_round_does_not_count() -> None:
    assert profile(NoisyEngine(), None, SHAPE) == profile(CountingEngine(), None, SHAPE)


def test_context_that_costs_nothing_gives_no_negative_slope() -> None:
    class Faster(CountingEngine):
        def time_pass(self, num_rows: int, tokens_per_row: int, context_len: int) -> float:
            return 1.0 - 0.001 * context_len

    assert profile(Faster(), None, SHAPE).target.context_s == 0.0


def cached(engine: CountingEngine, folder: Path | None, *identity: str) -> CostModel:
    return cached_profile(engine, None, SHAPE, folder, identity)


def test_the_same_identity_is_read_and_not_measured(tmp_path: Path) -> None:
    first = cached(CountingEngine(), tmp_path / "cache", "model a", "float32")
    again = CountingEngine(2.0)
    assert cached(again, tmp_path / "cache", "model a", "float32") == first
    assert again.num_passes == 0
    (stored,) = (tmp_path / "cache").iterdir()
    assert "model a" in stored.read_text()


@pytest.mark.parametrize("identity", [("model b", "float32"), ("model a",), ("float32", "model a")])
def test_another_identity_is_measured(tmp_path: Path, identity: tuple[str, ...]) -> None:
    first = cached(CountingEngine(), tmp_path, "model a", "float32")
    engine = CountingEngine(2.0)
    assert cached(engine, tmp_path, *identity) != first
    assert engine.num_passes > 0


def test_another_shape_is_measured(tmp_path: Path) -> None:
    cached(CountingEngine(), tmp_path, "model a")
    engine = CountingEngine()
    cached_profile(engine, None, replace(SHAPE, context_len=101), tmp_path, ["model a"])
    assert engine.num_passes > 0


@pytest.mark.parametrize("part", ["machine_name", "driver_name"])
def test_another_machine_or_driver_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    cached(CountingEngine(), tmp_path, "model a")
    monkeypatch.setattr(module, part, lambda: "another")
    engine = CountingEngine()
    cached(engine, tmp_path, "model a")
    assert engine.num_passes > 0
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    again = CountingEngine()
    cached(again, tmp_path, "model a")
    assert again.num_passes == 0, "the first is still there"


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

    from smartspec_py.serving import build_torch

    kept = tmp_path / "profiles"
    config = TorchEngineConfig(
        model=str(PAIR / "target"),
        draft=str(PAIR / "draft"),
        dtype="float32",
        device="cpu",
        num_threads=1,
        profile_cache=str(kept),
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert build_torch._device_name(torch.device("cuda")) == "NVIDIA H200"
    monkeypatch.setattr(build_torch, "_device_name", lambda device: "NVIDIA H200")
    limits = LimitsConfig(max_sequences=1, max_draft_len=1, max_context_len=64)
    build_torch.build_torch(config, limits, tmp_path)
    (path,) = kept.iterdir()
    identity = "\n".join(json.loads(path.read_text())["identity"])
    for part in (
        fingerprint(PAIR / "target"),
        fingerprint(PAIR / "draft"),
        "NVIDIA H200, torch.float32, 1 threads",
        f"torch {torch.__version__}, transformers {transformers.__version__}",
        driver_name(),
        machine_name(),
    ):
        assert part in identity


def test_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Three rounds of each table, and of reading for the draft."""
    with caplog.at_level("INFO", "smartspec_py.serving.profile"):
        profile(CountingEngine(), CountingEngine(), SHAPE)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "timing target passes: round 1 of 3"
    assert said[-1] == "timing draft passes: round 3 of 3"
    assert len(said) == 9


def test_without_a_folder_nothing_is_kept() -> None:
    engine = CountingEngine()
    cached(engine, None, "model a")
    num_passes = engine.num_passes
    cached(engine, None, "model a")
    assert engine.num_passes == 2 * num_passes > 0


@pytest.mark.parametrize("has_draft", [True, False])
def test_round_trip(tmp_path: Path, has_draft: bool) -> None:
    """Every bit of every number, and types that compare and hash alike."""
    table = PassTable((1, 3), (1, 2), ((0.1, 1 / 3), (1e-9, 123.456)), 77, 1.0000000000000002e-7)
    cost = CostModel(table, table if has_draft else None, 0.1, 0.2, 1 / 7)
    store_cost(cost, tmp_path / "cost.json", ["x"])
    assert load_cost(tmp_path / "cost.json") == cost
    assert hash(load_cost(tmp_path / "cost.json")) == hash(cost)
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]


def test_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    def make(name: str, config: str, weights: dict[str, int]) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        for file, size in weights.items():
            (folder / file).write_bytes(bytes(size))
        return fingerprint(folder)

    same = [make("a", "{}", {"m.safetensors": 8}), make("b", "{}", {"m.safetensors": 8})]
    others = [
        make("c", '{"x": 1}', {"m.safetensors": 8}),
        make("d", "{}", {"m.safetensors": 9}),
        make("e", "{}", {"n.safetensors": 8}),
        make("f", "{}", {}),
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 5


def test_a_damaged_file_is_measured_again(tmp_path: Path) -> None:
    """Half a document, as a full disk leaves it, must not keep a server from starting."""
    engine = CountingEngine()
    first = cached_profile(engine, None, SHAPE, tmp_path, ["model"])
    (path,) = tmp_path.glob("profile-*.json")
    path.write_text(path.read_text()[:40])
    assert cached_profile(CountingEngine(), None, SHAPE, tmp_path, ["model"]) == first
    assert load_cost(path) == first, "and the file is whole again"
