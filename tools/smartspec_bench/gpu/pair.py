"""The pair under test, with the loop's interfaces, and a server for it in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from smartspec_bench.gpu.document import PairInfo
from smartspec_bench.gpu.models import (
    ExpandedModel,
    batch_size_that_fits,
    check_memory,
    expanded_model,
)
from smartspec_bench.gpu.plan import MAX_CONTEXT_LEN, MAX_DRAFT_LEN, Plan
from smartspec_py.core.cost import CostModel
from smartspec_py.engines.base import SHORT_LAG
from smartspec_py.engines.torch.graphs import GraphRunner
from smartspec_py.engines.torch.runner import CausalRunner, ModelError, RunnerConfig
from smartspec_py.engines.torch.target import TorchTarget
from smartspec_py.proposers.draft_model import DraftModelProposer
from smartspec_py.serving.config import DRAFT_MODEL, LimitsConfig, ServerConfig, TorchEngineConfig
from smartspec_py.serving.intake import Engine
from smartspec_py.serving.model_files import (
    end_tokens,
    load_tokenizer,
    num_token_ids,
    stepwise_capabilities,
)
from smartspec_py.serving.profile import ProfileShape, profile
from smartspec_py.serving.server import Server

SHIPPED_PAIR = Path(__file__).parents[3] / "engines_build" / "tiny"
TARGET_FOLDER, DRAFT_FOLDER = SHIPPED_PAIR / "target", SHIPPED_PAIR / "draft"

MAX_QUEUE = 4096
"""Requests that may wait, so that a load above saturation is not refused."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """plain: the target for one sequence, launched kernel by kernel, with the same weights. None if
    it is served in this way, or if weights cannot be shared."""

    engine: Engine
    config: ServerConfig
    target: TorchTarget
    draft: DraftModelProposer
    plain: CausalRunner | None
    info: PairInfo

    @property
    def max_sequences(self) -> int:
        return self.info.max_sequences


@dataclass(frozen=True)
class _Built:
    """A runner. graph_error: why it uses no CUDA graphs; empty if it does."""

    runner: CausalRunner
    graph_error: str


def build_pair(plan: Plan, device: torch.device, say: Say) -> Pair:
    """Expand, load and profile. Raises DeviceError if there is not enough memory."""
    start_s = time.perf_counter()
    dtype: torch.dtype = getattr(torch, plan.dtype)
    check_memory((plan.target, plan.draft), device, dtype)
    say("expanding the target and the draft on the device")
    models = (
        expanded_model(TARGET_FOLDER, plan.target, device, dtype),
        expanded_model(DRAFT_FOLDER, plan.draft, device, dtype),
    )
    batch_size = batch_size_that_fits(plan.batches, device, [one.info for one in models])
    tokenizer = load_tokenizer("engine.model", TARGET_FOLDER)
    vocab_size = num_token_ids(tokenizer)
    shape = RunnerConfig(Path(), device, dtype, batch_size, MAX_CONTEXT_LEN, vocab_size)
    say(f"preparing passes of up to {batch_size} sequences")
    checking = _built(models[0], shape, MAX_DRAFT_LEN + 1, say)
    drafting = _built(models[1], shape, SHORT_LAG + 1, say)
    limits = _limits(plan, batch_size)
    bytes_per_token = checking.runner.bytes_per_token
    target = TorchTarget(
        checking.runner, stepwise_capabilities(limits, vocab_size, bytes_per_token)
    )
    draft = DraftModelProposer(drafting.runner, batch_size, MAX_DRAFT_LEN)
    built_s = time.perf_counter()
    say("timing them")
    cost = _cost(target, draft, limits)
    graph_error = checking.graph_error or drafting.graph_error
    return Pair(
        engine=Engine(
            tokenizer,
            end_tokens(TARGET_FOLDER, vocab_size, tokenizer),
            target,
            {DRAFT_MODEL: draft},
            cost,
        ),
        config=_config(limits),
        target=target,
        draft=draft,
        plain=None if checking.graph_error else _plain(models[0], shape),
        info=PairInfo(
            dtype=plan.dtype,
            target=models[0].info,
            draft=models[1].info,
            max_sequences=batch_size,
            uses_graphs=device.type == "cuda" and not graph_error,
            graph_error=graph_error,
            build_s=built_s - start_s,
            profile_s=time.perf_counter() - built_s,
        ),
    )


def _limits(plan: Plan, batch_size: int) -> LimitsConfig:
    return LimitsConfig(
        max_sequences=batch_size,
        max_queue=MAX_QUEUE,
        max_context_len=MAX_CONTEXT_LEN,
        max_draft_len=MAX_DRAFT_LEN,
        prefill_chunk=plan.prefill_chunk,
    )


def _config(limits: LimitsConfig) -> ServerConfig:
    engine = TorchEngineConfig(model=str(TARGET_FOLDER), draft=str(DRAFT_FOLDER))
    return ServerConfig(engine=engine, limits=limits)


def _cost(target: TorchTarget, draft: DraftModelProposer, limits: LimitsConfig) -> CostModel:
    rows, context_len = limits.max_sequences, limits.context_len
    draft_len, chunk = limits.max_draft_len, limits.prefill_chunk
    return profile(
        target, draft, ProfileShape(rows, draft_len, context_len // 2, chunk, context_len)
    )


def _built(one: ExpandedModel, shape: RunnerConfig, max_width: int, say: Say) -> _Built:
    """As the engine serves on a GPU, with CUDA graphs; a dry run uses the same code. If a model
    cannot be captured, kernel by kernel. max_width: tokens per row of decoding passes."""
    config = replace(shape, path=one.folder)
    try:
        return _Built(_captured(one, config, max_width), "")
    except ModelError as error:
        reason = str(error)
    # Only here, where nothing holds on to the first runner's cache any more.
    say(f"without CUDA graphs: {reason}")
    return _Built(CausalRunner(one.model, config), reason)


def _captured(one: ExpandedModel, config: RunnerConfig, max_width: int) -> CausalRunner:
    runner = GraphRunner(one.model, config)
    runner.warm(max_width)
    return runner


def _plain(one: ExpandedModel, shape: RunnerConfig) -> CausalRunner:
    return CausalRunner(one.model, replace(shape, path=one.folder, num_rows=1))


@contextmanager
def serving(pair: Pair) -> Iterator[Server]:
    """A separate server for each part, so that no part begins with what another one has learned.
    All requests must have ended at the end; the models can then be served again."""
    server = Server(pair.engine, pair.config)
    server.start()
    try:
        yield server
    finally:
        server.stop()
