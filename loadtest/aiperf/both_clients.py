"""Runs the same requests with each client and reads the results of both.

Both clients send the body of request.jinja to `generate_stream`. Each run uses the prompts of one
file in order, from the start. The clients send no other requests.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from summary import read_timings

from smartspec_bench.open_loop import Bounds, OpenLoop
from smartspec_bench.prompts import MIXED, Prompt, generated, read_prompts, repeated
from smartspec_bench.streams import HttpStreams
from smartspec_py.api.contract import MODEL_NAME
from smartspec_sim.arrivals import arrival_times, constant_gaps, steady
from smartspec_sim.latency import RequestTiming, summarise

HERE = Path(__file__).parent
LOCUSTFILE = HERE.parent / "locustfile.py"
TEMPLATE = HERE / "request.jinja"
TOKENIZER = HERE.parents[1] / "engines_build" / "tiny" / "target"

MAX_TOKENS = 16
FIELDS = {
    "max_tokens": MAX_TOKENS,
    "temperature": 0.0,
    "ignore_eos": True,
    "speculation_policy": "none",
    "stream": True,
}
"""The same fields as in request.jinja."""

PLAIN = {"return_spec_metrics": "none", "return_perf_metrics": False}
"""Removes the fields that the Locust users add to the request."""

RUN_LIMIT_S = 300
STATISTICS = ("mean", "p50", "p99")


class ClientError(RuntimeError):
    """A client failed or did not finish its run."""


@dataclass(frozen=True)
class Case:
    """One case: either `concurrency` streams at once, or `rate` requests/s, evenly spaced."""

    name: str
    num_requests: int
    concurrency: int = 0
    rate: float = 0.0


@dataclass(frozen=True)
class Files:
    """The prompt files of one comparison. prompts: for our clients. inputs: for AIPerf."""

    prompts: Path
    inputs: Path


Figures = dict[str, float]
"""ttft_mean, e2e_p99, ..: milliseconds; requests_per_s."""


def write_prompts(folder: Path, count: int) -> Files:
    files = Files(folder / "prompts.jsonl", folder / "inputs.jsonl")
    texts = [prompt.text for prompt in islice(generated(MIXED), count)]
    files.prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    files.inputs.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return files


def run_ours(case: Case, url: str, files: Files, folder: Path) -> Figures:
    """Run the case with our clients. Raises ClientError.

    A case with a rate uses the open loop of `smartspec load`. Other cases use the Locust users.
    """
    if case.rate:
        timings = asyncio.run(_open_loop(case, url, read_prompts(files.prompts)))
    else:
        timings = _closed_loop(case, url, files, folder)
    summary = summarise(timings)
    if summary["num_finished"] != case.num_requests:
        raise ClientError(
            f"{case.name}: {summary['num_finished']} of {case.num_requests} requests finished"
        )
    found = {
        f"{name}_{statistic}": summary["from_sent"][f"{name}_ms"][statistic]
        for name in ("ttft", "e2e")
        for statistic in STATISTICS
    }
    return found | {"requests_per_s": summary["requests_per_s"]}


async def _open_loop(case: Case, url: str, prompts: Sequence[Prompt]) -> list[RequestTiming]:
    bounds = Bounds(case.num_requests, max_s=RUN_LIMIT_S)
    times = arrival_times(constant_gaps(), steady(case.rate))
    async with HttpStreams(url) as streams:
        exchanges = await OpenLoop(streams, bounds, FIELDS).run(times, repeated(prompts))
    return [exchange.timing for exchange in exchanges]


def _closed_loop(case: Case, url: str, files: Files, folder: Path) -> list[RequestTiming]:
    lines = folder / "requests.jsonl"
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "SseUser", "--headless"]
    command += [f"--host={url}", f"--users={case.concurrency}", f"--run-time={RUN_LIMIT_S}"]
    command += [f"--max-requests={case.num_requests}", f"--prompts={files.prompts}"]
    command += [f"--fields={json.dumps(FIELDS | PLAIN)}", f"--jsonl={lines}", "--only-summary"]
    _call(command, folder / "locust.log")
    return read_timings(lines)


def run_aiperf(aiperf: Path, case: Case, url: str, files: Files, folder: Path) -> Figures:
    """Run the case with AIPerf. Raises ClientError."""
    command = [str(aiperf), "profile", "--model", MODEL_NAME, "--url", url, "--streaming"]
    command += ["--endpoint-type", "template", "--tokenizer", str(TOKENIZER)]
    command += ["--custom-endpoint", f"/v2/models/{MODEL_NAME}/generate_stream"]
    command += ["--extra-inputs", f"payload_template:{TEMPLATE}", "response_field:text_output"]
    command += ["--input-file", str(files.inputs), "--custom-dataset-type", "single-turn"]
    command += ["--dataset-sampling-strategy", "sequential", "--random-seed", "1"]
    command += ["--request-count", str(case.num_requests), "--artifact-dir", str(folder)]
    # Triton's metrics port answers a HEAD request with a body, which AIPerf does not accept.
    command += ["--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"]
    if case.rate:
        command += ["--request-rate", str(case.rate), "--arrival-pattern", "constant"]
    else:
        command += ["--concurrency", str(case.concurrency)]
    _call(command, folder / "aiperf.log")
    document = json.loads((folder / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    if document["request_count"]["avg"] != case.num_requests:
        raise ClientError(
            f"{case.name}: AIPerf counted {document['request_count']['avg']} requests, "
            f"expected {case.num_requests}"
        )
    return aiperf_figures(document)


def aiperf_figures(document: Mapping[str, Any]) -> Figures:
    names = {"ttft": "time_to_first_token", "e2e": "request_latency"}
    found = {
        f"{name}_{statistic}": document[theirs]["avg" if statistic == "mean" else statistic]
        for name, theirs in names.items()
        for statistic in STATISTICS
    }
    return found | {"requests_per_s": document["request_throughput"]["avg"]}


def _call(command: Sequence[str], log: Path) -> None:
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                command, stdout=output, stderr=output, timeout=RUN_LIMIT_S + 60, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise ClientError(f"{Path(command[0]).name} did not end; see {log}") from None
    if code:
        raise ClientError(f"{Path(command[0]).name} ended with exit code {code}; see {log}")
