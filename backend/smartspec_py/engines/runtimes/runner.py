"""What all runtimes have in common: a model with its cache rows, and a pass over new tokens.

The target and the draft model both use it. They differ only in the caller of `forward`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from smartspec_py.engines.checkpoints.adapters import NO_ADAPTERS, Adapters
from smartspec_py.engines.checkpoints.config import key_shapes
from smartspec_py.engines.draft import Tree

PYTORCH, OPENVINO = "PyTorch", "OpenVINO"

STORED, FP8 = "stored", "fp8"
"""Weights as in the files, and in float8, of PyTorch on a GPU."""

STRIDE = 7919
"""Between the tokens of timed passes. Equal tokens would have the same experts."""

SCALE_BYTES = 8
"""Of the scale and the zero of a head's key or value in a cache of 8 bits, in float32."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """max_len: tokens that a row can hold. vocab_size: tokens of the tokenizer; logits beyond it
    are removed, because models pad their vocabulary. gives_hidden: return the last hidden states of
    each pass. gives_keys: behind each of them, return what an assistant of Gemma 4 needs: its
    token's keys and values in the last layer of each kind that has its own. state_layers: return
    the inputs of these layers instead, one after another; with OpenVINO, the number behind the last
    layer stands for the states after the last norm. has_mtp: whether the layer of the model that
    drafts is loaded after it, see `drafts.mtp`.
    keeps_weights: whether `OpenVinoRunner.weights` is kept for another model that drafts.
    weights, kv_cache: see `config.LocalEngineConfig`; weights of a loaded runner are not auto.
    has_draft_weights: whether OpenVINO chooses between int8 and int4, for a draft model.
    num_threads: of OpenVINO; PyTorch's own is set elsewhere. adapters: that rows may choose.
    cache_bytes: memory for keys and values of a runner with blocks. keeps_4_bits: use matrices that
    a checkpoint has in 4 bits as they are, unless weights are stored, where the runner can; of a
    loaded runner, whether it does. keeps_experts: the same of the matrices of experts.
    weights_cache_bytes: see `config.LocalEngineConfig`. num_back: tokens that can be taken back,
    of a model with recurrent states. num_kept_states: those behind cached prefixes, of all rows
    together.
    """

    path: Path
    device: torch.device
    dtype: torch.dtype
    num_rows: int
    max_len: int
    vocab_size: int
    gives_hidden: bool = False
    gives_keys: bool = False
    state_layers: tuple[int, ...] = ()
    has_mtp: bool = False
    keeps_weights: bool = False
    weights: str = STORED
    has_draft_weights: bool = False
    kv_cache: str = "auto"
    num_threads: int = 1
    adapters: Adapters = NO_ADAPTERS
    cache_bytes: float = math.inf
    keeps_4_bits: bool = False
    keeps_experts: bool = False
    weights_cache_bytes: int = 0
    num_back: int = 0
    num_kept_states: int = 0

    @property
    def weights_text(self) -> str:
        """What to say of the weights behind the name of the runtime."""
        kept = ", 4 bits as in the file" if self.keeps_4_bits else ""
        kept += ", experts as in the file" if self.keeps_experts else ""
        return "" if self.weights == STORED else f", {self.weights} weights{kept}"

    @property
    def cache_text(self) -> str:
        """What to say of the cache there."""
        return ", 8-bit KV cache" if self.kv_cache == "u8" else ""


@dataclass(frozen=True, slots=True)
class RowInput:
    """New tokens of one row; the first is at `position`. Logits are computed for the last
    `num_logits`. num_prompt: how many of the first tokens are read as a prompt, see
    `runtimes.openvino.runner`. first: the row's first slot with a key, and states: one for each
    token, [tokens, width], that a head reads with it; see `drafts.eagle.head`. adapter: see
    `Adapters`. blocks: that hold the row, of a runner with blocks; None takes those of this number.
    kept_state: the number of tokens of the text, inside a prompt, behind which the state is also
    written to a slot, and that slot; see `StateStore`.

    tree: the tokens are its last nodes: all, or all but node 0, which the row already holds. A
    token sees the row before `position` and, of the new tokens, its ancestors and itself. None for
    a chain. At most 64 tokens; PyTorch only, without sliding windows."""

    row: int
    position: int
    tokens: Sequence[int]
    num_logits: int
    num_prompt: int = 0
    first: int = 0
    states: torch.Tensor | None = None
    tree: Tree | None = None
    adapter: int = 0
    blocks: NDArray[np.int32] | None = None
    kept_state: tuple[int, int] | None = None

    @property
    def slots(self) -> range:
        """Of each token in the row."""
        return range(self.position, self.position + len(self.tokens))

    @property
    def positions(self) -> Sequence[int]:
        """Of each token in its text."""
        if self.tree is None:
            return self.slots
        depths = self.tree.depths[-len(self.tokens) :]
        return [self.position + depth - depths[0] for depth in depths]

    @property
    def seen(self) -> NDArray[np.int64]:
        """Of each token of a tree, which tokens of the input it sees, as bits."""
        assert self.tree is not None, "a token of a chain sees all before it"
        first = len(self.tree.parents) + 1 - len(self.tokens)
        bits = [seen >> first for seen in self.tree.seen[first:]]
        return np.array(bits, np.uint64).view(np.int64)


@dataclass(frozen=True, slots=True)
class PassOutput:
    """The result of a pass.

    logits: [n, vocab_size], float32, of the wanted positions of each input, in the order of the
    inputs. states: of each input [m, width]; empty unless the runner returns them. With
    `RunnerConfig.gives_hidden`, those from which its logits were computed. With `state_layers`, the
    inputs of these layers for each of its tokens.
    """

    logits: torch.Tensor
    states: Sequence[torch.Tensor] = ()


Parts = list[tuple[int, RowInput]]
"""Inputs of one pass, or parts of them, each with the index of its input."""


def joined(passes: Sequence[Parts], outputs: Sequence[PassOutput]) -> PassOutput:
    """The output of one pass over all inputs, of which these passes computed the parts. Parts of
    an input are in the order of its tokens."""
    logits: dict[int, list[torch.Tensor]] = defaultdict(list)
    states: dict[int, list[torch.Tensor]] = defaultdict(list)
    for parts, output in zip(passes, outputs, strict=True):
        indices = [index for index, _ in parts]
        rows = torch.split(output.logits, [part.num_logits for _, part in parts])
        for index, some in zip(indices, rows, strict=True):
            logits[index].append(some)
        for index, some in zip(indices, output.states, strict=False):
            states[index].append(some)
    return PassOutput(
        torch.cat([some for index in sorted(logits) for some in logits[index]]),
        [torch.cat(states[index]) for index in sorted(states)],
    )


class KeyStore(Protocol):
    """Keys and values in blocks, or in rows: blocks that each hold a whole text.

    num_blocks, block_len: blocks, and tokens of each. spreads_nan: whether attention multiplies the
    values that it masks, so that one NaN in a row makes all logits of the row NaN.
    """

    num_blocks: int
    block_len: int
    spreads_nan: bool

    def copy_block(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the keys and values of the block's first num_tokens tokens, or more."""

    def clear(self, blocks: Sequence[int], first: int = 0) -> None:
        """Set the keys and values of these blocks to 0; of the first one, from this token on."""

    def drop(self, blocks: Sequence[int]) -> None:
        """Give the memory of these blocks back, which are sorted. Their contents are lost."""


class StateStore(Protocol):
    """Recurrent states in slots. free_slots: of no row, for states behind cached prefixes. step:
    these have a multiple of so many tokens."""

    free_slots: range
    step: int

    def load(self, slot: int, row: int, num_tokens: int) -> None:
        """Make the state in this slot that of the row, behind so many tokens."""


class Runner(ABC):
    """A loaded model and its cache. Not thread-safe: only the loop may use it."""

    runtime: ClassVar[str]
    """The name of the library that computes the model: PYTORCH or OPENVINO."""

    cache: KeyStore

    states: StateStore | None = None
    """Recurrent states, of a model that has them beside keys."""

    first_key: ClassVar[int] = 0
    """The first token of a text that has a key, which is in slot 0."""

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config

    @property
    def warm_shapes(self) -> Collection[int]:
        """See `Target`."""
        return ()

    @property
    @abstractmethod
    def about(self) -> str:
        """The software that computes the model. A profile is valid for this software only."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token of a row."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether `forward` returns before its results are there."""
        return False

    @abstractmethod
    def forward(
        self, inputs: Sequence[RowInput], token_ids: torch.Tensor | None = None
    ) -> PassOutput:
        """Run one pass over all inputs, and write their keys and values to their rows.

        token_ids: the tokens that only the device knows, [n]. In the inputs, they are NO_TOKEN.
        """

    def move_keys(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy keys and values between slots of the cache, all at once. Slots are numbered row by
        row, `config.max_len` to a row. Needed only by runners that read trees."""
        raise NotImplementedError

    def _by_input(
        self, states: torch.Tensor | None, inputs: Sequence[RowInput]
    ) -> Sequence[torch.Tensor]:
        """`PassOutput.states` of states that follow each other in the order of the inputs."""
        if states is None:
            return ()
        has_all = bool(self.config.state_layers)
        counts = [len(row.tokens) if has_all else row.num_logits for row in inputs]
        return torch.split(states, counts)

    def release(self) -> None:  # noqa: B027
        """Give back memory that only timed passes needed. The contents of all rows are lost."""

    def warm(self) -> None:  # noqa: B027
        """Prepare passes; the default does nothing. No row may be in use."""

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Seconds of one pass, including the copy of the best tokens to the host. The pass
        overwrites the rows that it uses, and has an adapter if there are any.

        num_logits: see `Profilable`.
        """
        max_len = self.config.max_len
        tokens_per_row = min(tokens_per_row, max_len)
        position = max(0, min(context_len, max_len - tokens_per_row))
        wanted = tokens_per_row if num_logits is None else min(num_logits, tokens_per_row)
        num_prompt = 0 if num_logits is None else tokens_per_row
        adapter = min(1, len(self.config.adapters.names))
        tokens = np.arange(batch_size * tokens_per_row) * STRIDE % self.config.vocab_size
        inputs = [
            RowInput(row, position, own, wanted, num_prompt=num_prompt, adapter=adapter)
            for row, own in enumerate(tokens.reshape(batch_size, -1).tolist())
        ]
        start = time.perf_counter()
        self.forward(inputs).logits.argmax(-1).tolist()
        return time.perf_counter() - start


def bytes_per_token(hf_config: Any, dtype: torch.dtype, kv_cache: str = "auto") -> int:
    """Bytes of keys and values per token. dtype: theirs, unless kv_cache is u8."""
    is_u8 = kv_cache == "u8"
    return sum(
        2 * num_heads * (head_dim + SCALE_BYTES if is_u8 else head_dim * dtype.itemsize)
        for num_heads, head_dim in key_shapes(hf_config)
    )


def cache_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Of PyTorch's keys and values. float32 on a CPU: on some processors, PyTorch's attention with
    one query takes 2 to 4 times as long in bfloat16."""
    return torch.float32 if device.type == "cpu" else dtype
