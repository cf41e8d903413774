"""The kinds of drafts that need a model of their own: what the target must give them, and how they
are loaded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tokenizers import Tokenizer

from smartspec_py.constants import DRAFT_MODEL, HEADS
from smartspec_py.core.plan.trees import MAX_NODES
from smartspec_py.engines.cache.blocks import Memory
from smartspec_py.engines.checkpoints.adapters import NO_ADAPTERS
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.pair import has_window, positions_of
from smartspec_py.engines.drafts.assistant.model import AssistantConfig
from smartspec_py.engines.drafts.draft_model import DraftModelProposer
from smartspec_py.engines.drafts.eagle.head import EagleConfig, EagleHead, load_eagle
from smartspec_py.engines.drafts.eagle.proposer import EagleProposer
from smartspec_py.engines.drafts.eagle.runner import EagleRunner
from smartspec_py.engines.drafts.medusa.heads import MedusaHeads
from smartspec_py.engines.drafts.medusa.proposer import MedusaProposer
from smartspec_py.engines.local.load import load, named, uses_graphs
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.proposer import Proposer
from smartspec_py.engines.runtimes.pytorch.compiled import merge_products
from smartspec_py.engines.runtimes.pytorch.float8 import use_float8
from smartspec_py.engines.runtimes.runner import FP8, PYTORCH, Runner, RunnerConfig

if TYPE_CHECKING:
    from smartspec_py.config import LimitsConfig, LocalEngineConfig


@dataclass(frozen=True, slots=True)
class Setup:
    """What is known before models are loaded.

    run_config: how the target runs. memory: of its cache and those of its proposers. runtime: of
    the target.
    """

    config: LocalEngineConfig
    limits: LimitsConfig
    tokenizer: Tokenizer
    run_config: RunnerConfig
    memory: Memory
    runtime: str

    @property
    def has_blocks(self) -> bool:
        """Whether all caches are of blocks: OpenVINO computes all models."""
        return not math.isinf(self.memory.num_bytes)

    @property
    def own_config(self) -> RunnerConfig:
        """How a draft model runs, with weights that are rounded as the target's are."""
        return replace(
            self.run_config,
            gives_hidden=False,
            gives_keys=False,
            state_layers=(),
            keeps_weights=False,
            adapters=NO_ADAPTERS,
        )

    @property
    def tree_context_len(self) -> int | None:
        """`ProposerCapabilities.tree_context_len`, for the kinds that draft trees."""
        max_len = self.run_config.max_len
        windows = has_window(load_config(self.run_config.path, max_len), max_len)
        has_room = self.limits.max_draft_len > 0 and max_len > MAX_NODES
        return max_len if self.runtime == PYTORCH and has_room and not windows else None


class DraftKind(ABC):
    """name: that requests use. gives_hidden, gives_keys, state_layers, keeps_weights: what the
    target must give, see `RunnerConfig`. folder: its files."""

    name: ClassVar[str]
    gives_hidden: bool = False
    gives_keys: bool = False
    state_layers: tuple[int, ...] = ()
    keeps_weights: bool = False
    folder: Path

    def load(self, setup: Setup) -> Runner | None:
        """Load its model. None if it has no passes of its own."""
        return None

    @abstractmethod
    def proposer(self, setup: Setup, runner: Any, target: LocalTarget) -> Proposer:
        """The proposer with the model that `load` returned. It is made after the target: the cache
        that was made last is the first to give memory back, see `Memory`."""


class DraftModelKind(DraftKind):
    name = DRAFT_MODEL

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, setup: Setup) -> Runner:
        run_config = setup.own_config
        # The draft model may have fewer positions than the served context.
        hf_config = load_config(self.folder, run_config.max_len)
        positions = positions_of(hf_config.to_dict()) or math.inf
        run_config = replace(
            run_config,
            path=self.folder,
            max_len=int(min(run_config.max_len, positions)),
            has_draft_weights=setup.config.weights == "auto" and run_config.weights == "int8",
        )
        return load("engine.draft", run_config, setup.config)

    def proposer(self, setup: Setup, runner: Runner, _: LocalTarget) -> DraftModelProposer:
        limits = setup.limits
        return DraftModelProposer(
            runner,
            limits.max_sequences,
            limits.max_draft_len,
            reuses_prefixes=limits.reuse_prefixes,
            max_context_len=runner.config.max_len,
            memory=setup.memory,
        )


class MedusaKind(DraftKind):
    name = HEADS
    gives_hidden = True

    def __init__(self, folder: Path, heads: MedusaHeads) -> None:
        self.folder, self._heads = folder, heads

    def proposer(self, setup: Setup, runner: None, _: LocalTarget) -> MedusaProposer:
        return MedusaProposer(self._heads, setup.limits.max_draft_len, setup.tree_context_len)


class EagleKind(DraftKind):
    name = HEADS

    def __init__(self, config: EagleConfig) -> None:
        self._config = config
        self.folder, self.state_layers = config.folder, config.layer_ids

    def load(self, setup: Setup) -> Runner:
        run_config = setup.own_config
        with named("engine.heads"):
            runner = _runner(load_eagle(self._config, run_config), run_config, setup.runtime)
        if uses_graphs(setup.config, run_config.device):
            runner.warm()
        return runner

    def proposer(self, setup: Setup, runner: Runner, _: LocalTarget) -> EagleProposer:
        return _reading_states(setup, runner, self._config.states_width)


class MtpKind(DraftKind):
    """The layer of the target that drafts. It is loaded after the target, of the same weights."""

    name = HEADS

    def __init__(self, target: Path, hf_config: Any) -> None:
        self.folder, self._width = target, hf_config.hidden_size
        self.state_layers = (hf_config.num_hidden_layers,)  # after the last norm

    def proposer(self, setup: Setup, runner: None, target: LocalTarget) -> EagleProposer:
        from smartspec_py.engines.drafts.mtp import OpenVinoMtpRunner

        made = OpenVinoMtpRunner(_by_openvino(target))
        made.warm()
        return _reading_states(setup, made, self._width)


class AssistantKind(DraftKind):
    """A model that attends to the target's keys. It is loaded after the target."""

    name = HEADS
    gives_hidden = gives_keys = keeps_weights = True

    def __init__(self, config: AssistantConfig) -> None:
        self._config, self.folder = config, config.folder

    def proposer(self, setup: Setup, runner: None, target: LocalTarget) -> Proposer:
        from smartspec_py.engines.drafts.assistant.proposer import AssistantProposer
        from smartspec_py.engines.drafts.assistant.runner import AssistantRunner

        with named("engine.heads"):
            made = AssistantRunner(self._config, _by_openvino(target))
        made.time_pass(1, 1, 0)
        return AssistantProposer(made, target.table, setup.limits.max_draft_len)


def _by_openvino(target: LocalTarget) -> Any:
    """The target's runner."""
    from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner

    assert isinstance(target.runner, OpenVinoRunner)
    return target.runner


def _reading_states(setup: Setup, runner: Runner, states_width: int) -> EagleProposer:
    limits = setup.limits
    return EagleProposer(
        runner,
        limits.max_sequences,
        limits.max_draft_len,
        reuses_prefixes=limits.reuse_prefixes,
        states_width=states_width,
        tree_context_len=setup.tree_context_len,
        memory=setup.memory,
    )


def _runner(head: EagleHead, run_config: RunnerConfig, runtime: str) -> Runner:
    if runtime == PYTORCH:
        if run_config.device.type == "cuda":
            merge_products(head.parts)
        if run_config.weights == FP8:
            use_float8(head.parts)
        return EagleRunner(head, run_config)
    from smartspec_py.engines.drafts.eagle.openvino import OpenVinoEagleRunner

    return OpenVinoEagleRunner(head, run_config)
