"""Experiments of `smartspec doctor` on a real executor. Never run; tested with a fake executor.

Each answers a question that decides a setting. An experiment takes a `Bench` and returns a
`Finding`. Any exception becomes a finding too, so the next experiment still runs.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

TIMEOUT_S = 120.0
CACHE_TOKENS = 32_768
"""KV cache size of each executor: small, so that two executors fit on one GPU."""


class Finding(NamedTuple):
    """answer: one of a few values. evidence: what was measured. meaning: what to do."""

    name: str
    answer: str
    evidence: str
    meaning: str


class UnsettledError(Exception):
    """An experiment could not decide; the message says why."""


@dataclass
class Bench:
    """Makes executors and requests. bindings: the module. draft_dir: None uses the target."""

    bindings: Any
    target_dir: Path
    draft_dir: Path | None = None
    now: Callable[[], float] = time.monotonic
    _executor: Any = None

    def __post_init__(self) -> None:
        document = json.loads((self.target_dir / "config.json").read_text(encoding="utf-8"))
        self.max_draft_len = int(document["build_config"].get("max_draft_len") or 0)
        self.vocab_size = int(document["pretrained_config"]["vocab_size"])

    @property
    def executor(self) -> Any:
        """An executor of the target, shared by the experiments."""
        if self._executor is None:
            self._executor = self.open(self.target_dir)
        return self._executor

    def open(self, folder: Path) -> Any:
        b = self.bindings
        cache = b.KvCacheConfig(
            enable_block_reuse=True, max_tokens=CACHE_TOKENS, free_gpu_memory_fraction=0.4
        )
        config = b.ExecutorConfig(kv_cache_config=cache)
        return b.Executor(str(folder), b.ModelType.DECODER_ONLY, config)

    def close(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None and executor.can_enqueue_requests():
            executor.shutdown()

    def prompt(self, length: int, key: int) -> list[int]:
        """Tokens below 1,000, different for each key."""
        return random.Random(key).choices(range(1, min(self.vocab_size, 1000)), k=length)

    def request(self, tokens: Sequence[int], max_tokens: int, drafts: Sequence[int] = ()) -> Any:
        """A greedy request."""
        b = self.bindings
        config = b.ExternalDraftTokensConfig(list(drafts)) if drafts else None
        return b.Request(
            list(tokens),
            max_tokens,
            sampling_config=b.SamplingConfig(top_k=1),
            output_config=b.OutputConfig(exclude_input_from_output=True),
            external_draft_tokens_config=config,
        )

    def ask(self, request: Any, executor: Any = None) -> Any:
        """The final result of a request."""
        executor = executor or self.executor
        executor.enqueue_requests([request])
        deadline_s = self.now() + TIMEOUT_S
        while self.now() < deadline_s:
            for response in executor.await_responses(timedelta(seconds=1)):
                if response.has_error():
                    raise UnsettledError(f"a request failed: {response.error_msg}")
                if response.result.is_final:
                    return response.result
        raise UnsettledError(f"no answer within {TIMEOUT_S:.0f} s")

    def text(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """The target's greedy continuation."""
        text = list(self.ask(self.request(tokens, num_tokens)).output_token_ids[0])
        if len(text) < num_tokens:
            raise UnsettledError(f"the text ended after {len(text)} of {num_tokens} tokens")
        return text

    def seconds(self, request: Any) -> float:
        start_s = self.now()
        self.ask(request)
        return self.now() - start_s


def drafts_accepted(bench: Bench) -> Finding:
    """Verify drafts that are the target's own text."""
    k = min(bench.max_draft_len, 4)
    prompt = bench.prompt(16, 2)
    text = bench.text(prompt, k + 1)
    result = bench.ask(bench.request(prompt, k + 1, text[:k]))
    found, reason = list(result.output_token_ids[0]), result.finish_reasons[0]
    name = str(getattr(reason, "name", reason))
    is_right = found == text and name in ("LENGTH", "NOT_FINISHED")
    return Finding(
        "drafts_accepted",
        "yes" if is_right else "no",
        f"{len(found)} of {k + 1} tokens, finish reason {name}",
        "no: drafts do not work, or texts would end early. Do not serve, and report it.",
    )


def cost_of_verification(bench: Bench) -> Finding:
    """For one sequence: compare a verification after cached text with a generated token."""
    k, num_tokens = bench.max_draft_len, 16
    prompt = bench.prompt(256, 8)
    drafts = bench.text(prompt, max(k, num_tokens))[:k]
    requests = [
        bench.request(prompt, num_tokens),
        bench.request(prompt, 1),
        bench.request(prompt, k + 1, drafts),
    ]
    whole_s, first_s, verify_s = (median(bench.seconds(r) for _ in range(9)) for r in requests)
    token_s = (whole_s - first_s) / (num_tokens - 1)
    return Finding(
        "cost_of_verification",
        f"{verify_s / token_s if token_s > 0 else math.inf:.1f}",
        f"{verify_s * 1e3:.2f} ms for {k} drafts, {token_s * 1e3:.2f} ms for a generated token",
        "A verification must generate more tokens than this. Above about 3, raise --max-num-tokens "
        "or lower limits.max_draft_len.",
    )


def two_executors(bench: Bench) -> Finding:
    """Start a second executor in this process, and send one request to each."""
    request = bench.request(bench.prompt(8, 1), 2)
    second = bench.open(bench.draft_dir or bench.target_dir)
    for executor in (bench.executor, second):
        bench.ask(request, executor)
    second.shutdown()
    meaning = "not settled: remove engine.draft from engine.json; prompt lookup drafts instead."
    return Finding("two_executors", "works", "both answered", meaning)


Experiment = Callable[[Bench], Finding]
EXPERIMENTS: tuple[Experiment, ...] = (drafts_accepted, cost_of_verification, two_executors)
"""The last one is the most likely to end the process in C++ code."""


def finding_of(bench: Bench, experiment: Experiment) -> Finding:
    """Run an experiment. After an exception, the next one gets a new executor."""
    try:
        return experiment(bench)
    except Exception as error:
        bench.close()
        reason = str(error) if isinstance(error, UnsettledError) else repr(error)
        return Finding(experiment.__name__, "not settled", reason, experiment.__doc__ or "")
