"""The file of compressed weights, which later starts map into memory."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from io import BufferedWriter
from pathlib import Path
from typing import Any

import pytest
import torch
from local_models import VOCAB_SIZE
from test_same_bits import CONFIGS
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.engines.checkpoints import tensors
from smartspec_py.engines.runtimes.openvino import weights as weights_module
from smartspec_py.engines.runtimes.openvino.load import load_openvino_runner
from smartspec_py.engines.runtimes.openvino.weights_file import ABANDONED_S, WeightsFile
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig

MATRIX = torch.arange(-6, 6, dtype=torch.int8).reshape(3, 4)
SCALE, ZERO = torch.rand(3, 1), torch.zeros((), dtype=torch.uint8)
PROMPT = [RowInput(0, 0, [5, 6, 7], 3, 3)]
ROOM = 1_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


def opened(model: Path, num_bytes: int = 100, most_bytes: int = ROOM) -> WeightsFile:
    return WeightsFile(model.parent / "kept", [model], "int8", num_bytes, most_bytes)


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "smartspec-weights":
            thread.join(60)


def used(file: WeightsFile) -> bool:
    """Whether the tensors were made, and not found. They are right in both cases."""
    made = []

    def make() -> list[torch.Tensor]:
        made.append(1)
        return [MATRIX, SCALE, ZERO]

    found = file.get("one", make)
    for tensor, expected in zip(found, (MATRIX, SCALE, ZERO), strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    file.finish()
    wait()
    return bool(made)


def left(model: Path) -> set[str]:
    """Suffixes of the files that are left."""
    folder = model.parent / "kept"
    return {path.suffix for path in folder.iterdir()} if folder.exists() else set()


def test_a_later_start_finds_the_tensors(model: Path) -> None:
    assert used(opened(model))
    assert left(model) == {".json", ".weights"}
    assert not used(opened(model))


@pytest.mark.parametrize("keeps_time", [False, True])
def test_another_content_is_converted_again(model: Path, keeps_time: bool) -> None:
    """Of the same size too, and if a program sets back the time of the change."""
    used(opened(model))
    before = model.stat()
    model.write_bytes(b"WEIGHTS")
    if keeps_time:
        os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert used(opened(model))
    assert not used(opened(model))
    assert len(list((model.parent / "kept").iterdir())) == 2


def test_a_damaged_or_unfinished_file_is_not_used(model: Path) -> None:
    used(opened(model))
    [data] = (model.parent / "kept").glob("*.weights")
    os.truncate(data, 10)
    assert used(opened(model))
    [index] = (model.parent / "kept").glob("*.json")
    index.write_text("{")
    assert used(opened(model))
    assert not used(opened(model))


@pytest.mark.parametrize(
    "changed",
    [
        {"data": 5},
        {"size": "5"},
        {"sources": []},
        {"places": 5},
        {"places": {"one": 5}},
        {"places": {"one": [5]}},
        {"places": {"one": [["0", "|i1", [3, 4]]]}},
    ],
)
def test_an_index_with_a_wrong_type_is_not_used(model: Path, changed: dict[str, Any]) -> None:
    """Of this model, and of another one, whose files are tidied."""
    used(opened(model))
    [index] = (model.parent / "kept").glob("*.json")
    document = json.loads(index.read_text())
    index.with_name("other.json").write_text(json.dumps(document | changed))
    index.write_text(json.dumps(document | changed))
    assert used(opened(model))
    assert not used(opened(model))


def test_a_start_that_failed_leaves_nothing_for_long(model: Path) -> None:
    file = opened(model)
    file.get("one", lambda: [MATRIX])
    file._in.close()  # type: ignore[union-attr]
    file._out.close()  # type: ignore[union-attr]
    used(opened(model))
    folder = model.parent / "kept"
    assert len(list(folder.glob("*.weights"))) == 2
    long_ago = time.time() - 2 * ABANDONED_S
    for path in folder.glob("*.weights"):
        os.utime(path, (long_ago, long_ago))
    other = model.with_name("other.safetensors")
    other.write_bytes(b"others")
    used(opened(other))
    assert len(list(folder.glob("*.weights"))) == 2  # one for each model
    assert not used(opened(model))


def test_two_servers_may_convert_at_once(model: Path) -> None:
    first, second = opened(model), opened(model)
    assert used(first)
    assert used(second)
    assert len(list((model.parent / "kept").iterdir())) == 2
    assert not used(opened(model))


def test_files_go_with_their_models_and_beyond_the_bound(model: Path) -> None:
    others = [model.with_name(f"{i}.safetensors") for i in range(3)]
    for number, other in enumerate(others):
        other.write_bytes(b"others")
        used(opened(other))
        for index in (model.parent / "kept").glob("*.json"):
            if str(other) in index.read_text():
                os.utime(index, (number, number))
    others[2].unlink()
    size = max(path.stat().st_size for path in (model.parent / "kept").glob("*.weights"))
    used(opened(model, size, most_bytes=2 * size))  # room for one more, the last used
    assert [used(opened(other)) for other in (others[1], others[0])] == [False, True]
    assert len(list((model.parent / "kept").glob("*.weights"))) == 3


def test_what_is_larger_than_the_bound_is_not_kept(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And does not remove what is kept of others."""
    other = model.with_name("other.safetensors")
    other.write_bytes(b"other")
    used(opened(other))
    with caplog.at_level("INFO"):
        assert used(opened(model, num_bytes=ROOM + 1))
    assert not used(opened(other))
    assert len(list((model.parent / "kept").iterdir())) == 2
    assert "engine.weights_cache_bytes is 1 MB" in caplog.text


def test_a_full_disk_ends_the_keeping_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = opened(model)
    file.get("first", lambda: [MATRIX])

    class Full(BufferedWriter):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file._out = Full(file._out.detach())  # type: ignore[union-attr]
    assert torch.equal(file.get("second", lambda: [SCALE])[0], SCALE)
    assert torch.equal(file.get("first", list)[0], MATRIX)  # its file has no name any more
    file.finish()
    assert not left(model)
    assert "(No space left on device): every start converts them again" in caplog.text


def test_a_file_that_another_start_removes_meanwhile(model: Path) -> None:
    """A link to nothing is like it: it is in the list of files, and cannot be looked at."""
    (model.parent / "kept").mkdir()
    (model.parent / "kept" / "gone.weights").symlink_to("nowhere")
    assert used(opened(model))
    assert not used(opened(model))


def test_a_folder_that_cannot_be_written_keeps_nothing(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model.parent / "kept").write_text("a file")
    assert used(opened(model))
    assert "every start converts them again" in caplog.text


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunnerConfig]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = RunnerConfig(tmp_path / "m", torch.device("cpu"), torch.float32, 2, 64, VOCAB_SIZE)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(config.path)
    yield replace(config, weights_cache_bytes=1 << 40)
    wait()


@pytest.mark.parametrize(("weights", "most_width"), [("int8", 2048), ("int4", 64)])
def test_a_model_from_the_file_gives_the_same_bits(
    config: RunnerConfig, weights: str, most_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if products are computed in parts. The second start reads and rounds no matrix."""
    monkeypatch.setattr("smartspec_py.engines.runtimes.openvino.runner.MOST_WIDTH", most_width)
    monkeypatch.setattr("smartspec_py.engines.runtimes.openvino.precision.has_vnni", lambda: False)
    config = replace(config, weights=weights)
    without = load_openvino_runner(replace(config, weights_cache_bytes=0)).forward(PROMPT).logits
    first = load_openvino_runner(config)
    assert torch.equal(first.forward(PROMPT).logits, without)
    wait()
    for name in ("to_int8", "to_int4"):
        monkeypatch.delattr(weights_module, name)
    read = []
    monkeypatch.setattr(tensors, "check_finite", lambda _, weight, *__: read.append(weight.ndim))
    assert torch.equal(load_openvino_runner(config).forward(PROMPT).logits, without)
    assert set(read) == {1}


def test_other_weights_give_other_logits(config: RunnerConfig) -> None:
    """A fine-tuned model is saved at the same place, with the same sizes."""
    config = replace(config, weights="int8")
    before = load_openvino_runner(config).forward(PROMPT).logits
    wait()
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(config.path)
    after = load_openvino_runner(config).forward(PROMPT).logits
    expected = load_openvino_runner(replace(config, weights_cache_bytes=0)).forward(PROMPT).logits
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)
