"""Kinds of engine for tests, which a server finds by entry points: see ENGINE_GROUP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from smartspec_py.config import EngineConfig, LimitsConfig, LocalPath
from smartspec_py.constants import DRAFT_MODEL
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.engines.base import TargetCapabilities
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.model_files import load_tokenizer, stepwise_capabilities
from smartspec_py.engines.tokenizer_file import num_token_ids
from smartspec_py.engines.trtllm.build import UNSUPPORTED
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_testing import fake_executor as bindings
from smartspec_testing.fake_engine import FakeTarget
from smartspec_testing.fake_proposer import FakeProposer

MAX_NUM_TOKENS = 2048
"""Tokens of an iteration of the fake executors, so at most these in a text with its drafts."""


class FakeEngineConfig(EngineConfig):
    """The engine of tests: tokens computable by hand, acceptance as told, no model.

    step_s: seconds that a step really takes.
    """

    kind: Literal["fake"]
    tokenizer: LocalPath
    accept_prob: Annotated[float, Field(ge=0.0, le=1.0)] = 0.7
    step_s: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    fail_at_step: Annotated[int, Field(ge=0)] | None = None

    def builder(self) -> Callable[[Any, LimitsConfig, Path], Engine]:
        return build_fake


class FakeTrtllmConfig(EngineConfig):
    """The adapter of TensorRT-LLM over a fake of its executor: for tests, without a GPU.

    accept_prob: probability that a token of the draft's fake is the target's.
    error_prob: probability that a request to the target's fake fails. step_s: seconds that an
        iteration really takes.
    """

    kind: Literal["fake_trtllm"]
    tokenizer: LocalPath
    accept_prob: Annotated[float, Field(ge=0.0, le=1.0)] = 0.7
    error_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    step_s: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0

    def builder(self) -> Callable[[Any, LimitsConfig, Path], Engine]:
        return build_fake_trtllm


class ScriptedConfig(EngineConfig):
    """Writes the texts of a script, with the tokenizer of a model: see `scripted`."""

    kind: Literal["scripted"]
    tokenizer: LocalPath
    script: LocalPath

    def builder(self) -> Callable[[Any, LimitsConfig, Path], Engine]:
        def build(config: ScriptedConfig, limits: LimitsConfig, folder: Path) -> Engine:
            from smartspec_testing.scripted import build_scripted  # imports PyTorch

            return build_scripted(folder / config.tokenizer, folder / config.script, limits)

        return build


def build_fake(config: FakeEngineConfig, limits: LimitsConfig, folder: Path) -> Engine:
    tokenizer = load_tokenizer("engine.tokenizer", folder / config.tokenizer)
    step = PassTable((1,), (1,), ((config.step_s,),))
    cost = CostModel(target=step, draft=PassTable((1,), (1,), ((config.step_s / 20,),)))
    vocab_size = num_token_ids(tokenizer)
    capabilities = stepwise_capabilities(limits, vocab_size)
    return Engine(
        tokenizer=tokenizer,
        end_tokens=(),
        target=FakeTarget(capabilities, cost=cost, fail_at_step=config.fail_at_step),
        proposers={
            DRAFT_MODEL: FakeProposer(
                config.accept_prob,
                vocab_size=vocab_size,
                max_draft_len=limits.max_draft_len,
                cost=cost,
            )
        },
        cost=cost,
    )


def build_fake_trtllm(config: FakeTrtllmConfig, limits: LimitsConfig, folder: Path) -> Engine:
    """Fakes of both executors under the adapter. Their text can be computed by hand."""
    tokenizer = load_tokenizer("engine.tokenizer", folder / config.tokenizer)
    vocab_size = num_token_ids(tokenizer)
    length = min(limits.context_len + limits.max_draft_len, MAX_NUM_TOKENS)
    built = bindings.EngineLimits(
        max_batch_size=limits.max_sequences,
        max_num_tokens=MAX_NUM_TOKENS,
        max_seq_len=length,
        max_draft_len=limits.max_draft_len,
        vocab_size=vocab_size,
    )
    step = PassTable((1,), (1,), ((config.step_s,),))
    draft_step = PassTable((1,), (1,), ((config.step_s / 20,),))
    cost = CostModel(step, draft=draft_step)
    executor = bindings.Executor(built, cost=cost, error_prob=config.error_prob)
    target = TrtllmTarget(
        executor,
        bindings,
        TargetCapabilities(
            max_sequences=limits.max_sequences,
            max_context_len=length - limits.max_draft_len,
            max_draft_len=limits.max_draft_len,
            max_decode_tokens=16,
            max_prefill_tokens=None,
            verifies_sampling=False,
            vocab_size=vocab_size,
            bytes_per_token=1,
            max_cache_tokens=65_536,
            unsupported=UNSUPPORTED,
        ),
    )
    drafting = bindings.DraftExecutor(
        replace(built, max_draft_len=0),
        cost=CostModel(draft_step),
        accept_prob=config.accept_prob,
        texts=executor.texts,
    )
    draft = TrtllmDraftProposer(
        drafting,
        bindings,
        max_draft_len=limits.max_draft_len,
        max_context_len=length,
        vocab_size=vocab_size,
    )
    return Engine(tokenizer, (), target, {DRAFT_MODEL: draft}, cost)
