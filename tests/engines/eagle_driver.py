"""Drivers that compare every draft of an EAGLE head with the reference, and what they drive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from eagle_checkpoints import EAGLE, OF_TARGET, VOCAB, own, weights, write
from eagle_reference import Reference
from local_models import MAX_DRAFT_LEN
from step_driver import Driver
from transformers import LlamaForCausalLM

from smartspec_py.engines.base import TargetCapabilities
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.drafts.eagle.head import EagleHead, is_eagle, load_eagle, read_config
from smartspec_py.engines.drafts.eagle.proposer import EagleProposer
from smartspec_py.engines.drafts.eagle.runner import EagleRunner
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.runtimes.pytorch.causal import load_runner
from smartspec_py.engines.runtimes.runner import Runner, RunnerConfig

STATE_LAYERS = (2, 3, 4)


class PaddedEagleRunner(EagleRunner):
    """Its passes are padded, as a GPU would replay them, and read drafts on the device."""

    is_asynchronous = True

    def __init__(self, head: EagleHead, config: RunnerConfig) -> None:
        super().__init__(head, config)
        self.warm()


def runner_of(head: Path, config: RunnerConfig, kind: type[Runner] = EagleRunner) -> Runner:
    """The head in this folder, loaded as the server loads it."""
    assert is_eagle(head)
    target = load_config(config.path, config.max_len)
    return kind(load_eagle(read_config(head, target), config), config)  # type: ignore[call-arg, arg-type]


def target_of(config: RunnerConfig, load: Callable[[RunnerConfig], Runner]) -> LocalTarget:
    """The target, which gives the states that the head reads."""
    runner = load(replace(config, state_layers=STATE_LAYERS))
    capabilities = TargetCapabilities(
        max_sequences=3,
        max_context_len=64,
        max_draft_len=MAX_DRAFT_LEN,
        max_decode_tokens=1,
        max_prefill_tokens=64,
        verifies_sampling=True,
        vocab_size=VOCAB,
    )
    return LocalTarget(runner, capabilities)


class EagleDriver(Driver):
    """Every draft of the head is compared with the reference, which reads the whole text again.
    What is verified are mostly the right tokens, so that any number of drafts is accepted.

    first: by sequence, the first token that the head sees. zeros: by sequence, the token that it
    reads with a state of zeros.
    """

    proposer: EagleProposer

    def __init__(
        self, target: LocalTarget, proposer: EagleProposer, reference: Reference, path: Path
    ) -> None:
        super().__init__(target, proposer, seed=3)
        self.reference = reference
        self.model = LlamaForCausalLM.from_pretrained(path).eval()
        self.first: dict[int, int] = {}
        self.zeros: dict[int, int] = {}
        self.num_drafts = 0

    def seen(self, sequence: int) -> tuple[list[int], torch.Tensor]:
        """The tokens that the head has seen, and the target's states before each."""
        tokens, first = self.tokens[sequence], self.first[sequence]
        found = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        states = torch.cat([found[i][0] for i in STATE_LAYERS], -1)
        if sequence in self.zeros:
            states[self.zeros[sequence] - 1] = 0.0
        return tokens[first:], states[first - 1 : -1]

    @torch.inference_mode()
    def expected(self, sequence: int, num_drafts: int) -> list[int]:
        """The most probable drafts of the reference."""
        tokens, states = self.seen(sequence)
        drafts: list[int] = []
        while len(drafts) < num_drafts:
            logits = self.reference.chain(tokens, states, drafts)
            drafts.append(3 * int(logits[-1].argmax()))
        return drafts

    @torch.inference_mode()
    def right(self, sequence: int, num_tokens: int) -> list[int]:
        """What the target generates next, except that a token is wrong now and then."""
        known = list(self.tokens[sequence])
        for _ in range(num_tokens):
            known.append(int(self.model(torch.tensor([known])).logits[0, -1, :VOCAB].argmax()))
        found = known[-num_tokens:]
        if self.rng.random() < 0.5:
            found[self.rng.randrange(num_tokens)] = self.rng.randrange(VOCAB)
        return found

    def note_zeros(self, tasks: Sequence[DraftTask]) -> None:
        """Of sequences that begin, the token behind those whose keys the head has."""
        for task in tasks:
            if task.sequence not in self.proposer._sequences:
                num = self.proposer.pool.num_found(task.tokens, len(task.tokens))
                if num and len(task.tokens) - self.proposer._states[task.sequence].num == num + 1:
                    self.zeros[task.sequence] = num

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        drafts = []
        self.note_zeros([task for task in tasks if task.draft_len])
        for task, draft in zip(tasks, self.proposer.propose(tasks), strict=True):
            right: list[int] = []
            if task.draft_len:
                self.first[task.sequence] = self.proposer._states[task.sequence].first
                found = draft.tokens if draft.on_device is None else draft.on_device.tolist()
                assert list(found) == self.expected(task.sequence, task.draft_len)
                right = self.right(task.sequence, task.draft_len)
            self.num_drafts += len(draft.tokens)
            drafts.append(Draft(tuple(right)))
        return drafts

    def release(self, sequence: int) -> None:
        self.target.release(sequence)
        self.proposer.release(sequence)


class TreeDriver(EagleDriver):
    """All drafts are trees, compared with those that the reference grows."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        tasks = [
            task._replace(draft_len=self.rng.choice((5, 20, 63)), depth=task.draft_len)
            for task in tasks
        ]
        drafts = self.proposer.propose(tasks)
        for task, draft in zip(tasks, drafts, strict=True):
            if task.depth:
                self.first[task.sequence] = self.proposer._states[task.sequence].first
                paths = [()]
                for token, parent in zip(draft.tokens, draft.tree.parents, strict=True):
                    paths.append((*paths[parent], token))
                assert sorted(paths[1:]) == self.grown(task)
                self.num_drafts += len(draft.tokens)
        return drafts

    @torch.inference_mode()
    def grown(self, task: DraftTask) -> list[tuple[int, ...]]:
        """The most probable paths: each depth follows the eight most probable of that before."""
        tokens, states = self.seen(task.sequence)
        nodes: dict[tuple[int, ...], float] = {}
        ends = {(): 0.0}
        for _ in range(task.depth):
            below = {}
            for path, score in ends.items():
                logits = self.reference.chain(tokens, states, list(path))
                best = logits[-1].log_softmax(-1).topk(8)
                for log_prob, token in zip(*(each.tolist() for each in best), strict=True):
                    below[(*path, 3 * token)] = score + min(log_prob, -1e-4)
            nodes |= below
            ends = dict(sorted(below.items(), key=lambda pair: -pair[1])[:8])
        return sorted(sorted(nodes, key=lambda path: -nodes[path])[: task.draft_len])


def driver_of(
    folder: Path,
    kind: type[EagleDriver] = EagleDriver,
    load: Callable[[RunnerConfig], Runner] = load_runner,
    runner: type[Runner] = EagleRunner,
    max_len: int = 64,
) -> Any:
    """A driver of this kind, of a head and a target that are written to the folder."""
    tensors = weights("midlayer")
    head, config = write(folder, EAGLE, tensors), replace(own(folder), max_len=max_len)
    proposer = EagleProposer(
        runner_of(head, config, runner),
        3,
        MAX_DRAFT_LEN,
        states_width=3 * OF_TARGET,
        tree_context_len=max_len if kind is TreeDriver else None,
    )
    return kind(target_of(config, load), proposer, Reference(tensors, "midlayer"), config.path)
