"""Executors and requests for the experiments of `smartspec doctor`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from smartspec_trtllm.doctor_finding import UnsettledError

TIMEOUT_S = 120.0
"""Time limit for the responses of one experiment."""

CACHE_TOKENS = 32_768
"""KV cache size of each executor: small, so that two executors fit on one GPU."""

MEMORY_FRACTION = 0.4


@dataclass
class Bench:
    """bindings: the module. draft_dir: if None, experiments with two executors use the target."""

    bindings: Any
    target_dir: Path
    draft_dir: Path | None = None
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _executor: Any = None
    _next_seed: int = 1

    @property
    def build(self) -> dict[str, Any]:
        """`build_config` of the target's config.json."""
        return dict(self._config()["build_config"])

    @property
    def vocab_size(self) -> int:
        return int(self._config()["pretrained_config"]["vocab_size"])

    @property
    def logits_dtype(self) -> str:
        return str(self._config()["pretrained_config"].get("logits_dtype", "float32"))

    def _config(self) -> dict[str, Any]:
        text = (self.target_dir / "config.json").read_text(encoding="utf-8")
        document: dict[str, Any] = json.loads(text)
        return document

    @property
    def max_draft_len(self) -> int:
        """Raises UnsettledError if the target does not support drafts."""
        if not self.build.get("max_draft_len"):
            raise UnsettledError(
                "the target does not support drafts: build it with "
                "--speculative_decoding_mode draft_tokens_external and --max_draft_len"
            )
        return int(self.build["max_draft_len"])

    def open(self, engine_dir: Path, **options: Any) -> Any:
        """A new executor; options are those of `ExecutorConfig`."""
        kv_cache = self.bindings.KvCacheConfig(enable_block_reuse=True, max_tokens=CACHE_TOKENS)
        kv_cache.free_gpu_memory_fraction = MEMORY_FRACTION
        config = self.bindings.ExecutorConfig(kv_cache_config=kv_cache, **options)
        kind = self.bindings.ModelType.DECODER_ONLY
        return self.bindings.Executor(str(engine_dir), kind, config)

    @property
    def executor(self) -> Any:
        """An executor of the target, shared by the experiments that need no other."""
        if self._executor is None:
            self._executor = self.open(self.target_dir)
        return self._executor

    def close(self) -> None:
        """Free the executor's memory; the next experiment opens a new executor."""
        executor, self._executor = self._executor, None
        if executor is not None and executor.can_enqueue_requests():
            executor.shutdown()

    def forget(self) -> None:
        """Drop an executor that cannot be closed."""
        self._executor = None

    def next_seed(self, num_seeds: int) -> int:
        """The first of num_seeds consecutive seeds that no other call returns."""
        first, self._next_seed = self._next_seed, self._next_seed + num_seeds
        return first

    def prompt(self, length: int, key: int) -> list[int]:
        """Tokens below 1,000, different for each key."""
        highest = min(self.vocab_size, 1000) - 2
        return [
            1 + (key * 97 + index * index * 13 + index * 7) % highest for index in range(length)
        ]

    def request(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        drafts: Sequence[int] = (),
        *,
        draft_logits: Any = None,
        metrics: bool = False,
        **options: Any,
    ) -> Any:
        """A request, greedy unless options say otherwise; its output excludes the prompt."""
        b = self.bindings
        if drafts:
            config = b.ExternalDraftTokensConfig(list(drafts), logits=draft_logits)
            options["external_draft_tokens_config"] = config
        output = b.OutputConfig(exclude_input_from_output=True, return_perf_metrics=metrics)
        options.setdefault("sampling_config", b.SamplingConfig(top_k=1))
        return b.Request(list(tokens), max_tokens, output_config=output, **options)

    def ask(self, requests: Sequence[Any], executor: Any = None) -> list[Any]:
        """The final result of each, in order. Raises UnsettledError on an error or a timeout."""
        executor = executor or self.executor
        ids = list(executor.enqueue_requests(list(requests)))
        results = self.finals(set(ids), executor)
        return [results[number] for number in ids]

    def finals(self, ids: set[int], executor: Any) -> dict[int, Any]:
        """The final results of these requests, by id; other responses are dropped."""
        found: dict[int, Any] = {}
        deadline_s = self.now() + TIMEOUT_S
        while ids - found.keys():
            if self.now() >= deadline_s:
                raise UnsettledError(f"no answer within {TIMEOUT_S:.0f} s")
            for response in executor.await_responses(timedelta(seconds=1)):
                if response.has_error():
                    raise UnsettledError(f"a request failed: {response.error_msg}")
                if response.result.is_final:
                    found[response.request_id] = response.result
        return found

    def text(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """The target's greedy continuation. Raises UnsettledError if it is too short."""
        (result,) = self.ask([self.request(tokens, num_tokens)])
        text = list(result.output_token_ids[0])
        if len(text) < num_tokens:
            raise UnsettledError(f"the text ended after {len(text)} of {num_tokens} tokens")
        return text
