"""Runs a model with OpenVINO on a CPU: the same passes as `CausalRunner`, with other kernels.

Whole passes are faster than separate calls of PyTorch operators, most of all with many sequences
of one token (docs/research/performance.md). It supports the same models as `llama`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from safetensors import safe_open

from smartspec_py.engines.torch.openvino_graph import (
    BLOCK_LEN,
    INPUTS,
    LONGEST,
    cache_names,
    make_graph,
)
from smartspec_py.engines.torch.packed import RowInput
from smartspec_py.engines.torch.runner import (
    PassOutput,
    Runner,
    RunnerConfig,
    key_shape,
    load_model,
)
from smartspec_py.engines.torch.tree import visibility

MAX_SPLIT = 4
"""Up to this many new tokens of a row are attended as separate sequences of one token each, which
share the row's blocks. OpenVINO's kernel for one token is faster than its kernel for several. With
more tokens it is slower, because it reads the keys once per token. A pass writes all its keys
before it reads any."""

NO_MASK = np.zeros(0, dtype=bool)

PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}


class OpenVinoRunner(Runner):
    """A model that OpenVINO compiled. config.dtype: the precision of the products."""

    cache: BlockCache

    def __init__(self, model: Any, config: RunnerConfig) -> None:
        """model: of Transformers; it is not used after this call."""
        super().__init__(config)
        precision = PRECISIONS[config.dtype]
        num_threads = torch.get_num_threads()
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": num_threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
        }
        graph, self._memory = make_graph(
            model,
            config.max_len,
            config.vocab_size,
            config.gives_hidden,
            num_threads,
            config.state_layers,
        )
        compiled = ov.Core().compile_model(graph, "CPU", settings)
        self._request = compiled.create_infer_request()
        self._hidden_size: int = model.config.hidden_size
        self.cache = BlockCache(compiled, model.config, config)
        for name, tensor in self.cache.tensors.items():
            self._request.set_tensor(name, tensor)

    @property
    def about(self) -> str:
        return f"OpenVINO {ov.get_version().split('-')[0]}"

    @property
    def bytes_per_token(self) -> int:
        num_bytes = sum(int(tensor.byte_size) for tensor in self.cache.tensors.values())
        return num_bytes // (self.cache.num_blocks * BLOCK_LEN)

    def forward(self, inputs: Sequence[RowInput]) -> PassOutput:
        start = time.perf_counter()
        inputs = [part for one in inputs for part in _parts(one)]
        ends = [one.position + len(one.tokens) for one in inputs]
        begins = np.cumsum([0, *(len(one.tokens) for one in inputs)])
        wanted = [
            end - one.num_logits + i
            for one, end in zip(inputs, begins[1:], strict=True)
            for i in range(one.num_logits)
        ]
        blocks = [self.cache.blocks(one.row, end) for one, end in zip(inputs, ends, strict=True)]
        given: dict[str, Any] = {
            "token_ids": [token for one in inputs for token in one.tokens],
            "positions": [position for one in inputs for position in one.positions],
            "wanted": wanted or [0],  # some operators fail with no rows
            "past_lens": [one.position for one in inputs],
            "subsequence_begins": begins,
            "block_indices": [block for found in blocks for block in found],
            "block_indices_begins": np.cumsum([0, *map(len, blocks)]),
            **_tree_masks(inputs),
        }
        for name, dtype in INPUTS.items():
            self._request.set_tensor(name, ov.Tensor(np.asarray(given[name], dtype)))
        self._request.set_tensor(LONGEST, ov.Tensor(np.asarray(max(ends), np.int32)))
        num_results = len(given["wanted"])
        # Each pass gets its own output memory; the next pass would overwrite OpenVINO's buffer.
        logits = torch.empty(num_results, self.config.vocab_size)
        self._request.set_output_tensor(0, ov.Tensor(logits.numpy(), shared_memory=True))
        hidden = None
        layers, num_wanted = self.config.state_layers, len(wanted)
        if self.config.gives_hidden or layers:
            num_states = int(begins[-1]) if layers else num_results
            hidden = torch.empty(num_states, self._hidden_size * max(1, len(layers)))
            self._request.set_output_tensor(1, ov.Tensor(hidden.numpy(), shared_memory=True))
        self._request.infer()
        self.passes_s += time.perf_counter() - start
        if hidden is not None and not layers:
            hidden = hidden[:num_wanted]
        return PassOutput(logits[:num_wanted], hidden)


def _parts(one: RowInput) -> list[RowInput]:
    """The input, or one input per token (see MAX_SPLIT). Only the last num_logits have logits."""
    num_tokens = len(one.tokens)
    if one.parents or not 1 < num_tokens <= MAX_SPLIT:
        return [one]
    first = num_tokens - one.num_logits
    return [
        RowInput(one.row, one.position + i, [token], int(i >= first))
        for i, token in enumerate(one.tokens)
    ]


def _tree_masks(inputs: Sequence[RowInput]) -> dict[str, Any]:
    if not any(one.parents for one in inputs):
        return {"tree_masks": (), "tree_mask_begins": ()}
    masks = [visibility(one.parents).ravel() if one.parents else NO_MASK for one in inputs]
    begins = np.cumsum([0, *map(len, masks)])
    return {"tree_masks": np.concatenate(masks), "tree_mask_begins": begins}


def load_openvino_runner(config: RunnerConfig) -> OpenVinoRunner:
    """Load weights from a local directory, in the precision of its files.

    bfloat16 weights are read in half the time of float32, with exact results even if the products
    use float32. Raises ModelError.
    """
    return OpenVinoRunner(load_model(config, _stored_dtype(config.path)), config)


def _stored_dtype(folder: Path) -> torch.dtype:
    """The precision of all weights in the files; float32 if they differ."""
    found = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    stored = {"BF16": torch.bfloat16, "F16": torch.float16}
    return stored.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32


class BlockCache:
    """Keys and values in blocks of BLOCK_LEN tokens. Each row owns as many adjacent blocks as its
    maximum length needs."""

    def __init__(self, compiled: ov.CompiledModel, hf_config: Any, config: RunnerConfig) -> None:
        self._per_row = -(-config.max_len // BLOCK_LEN)
        self.num_blocks = config.num_rows * self._per_row
        num_heads, head_dim = key_shape(hf_config)
        shape = ov.Shape([self.num_blocks, num_heads, BLOCK_LEN, head_dim])
        self.tensors = {
            name: ov.Tensor(compiled.input(name).element_type, shape)
            for name in cache_names(hf_config.num_hidden_layers)
        }
        for tensor in self.tensors.values():
            _bytes(tensor)[...] = 0

    def blocks(self, row: int, num_tokens: int) -> range:
        """The blocks of the row's first num_tokens tokens."""
        first = row * self._per_row
        return range(first, first + -(-num_tokens // BLOCK_LEN))

    def copy_row(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the keys and values of the row's first num_tokens tokens, in whole blocks."""
        read, written = self.blocks(source, num_tokens), self.blocks(destination, num_tokens)
        for tensor in self.tensors.values():
            by_block = _bytes(tensor)
            by_block[written.start : written.stop] = by_block[read.start : read.stop]

    def move_tokens(self, row: int, slots: Sequence[int], first: int) -> None:
        """See `RowStore`."""
        read = [(row * self._per_row + slot // BLOCK_LEN, slot % BLOCK_LEN) for slot in slots]
        start = row * self._per_row * BLOCK_LEN + first
        for tensor in self.tensors.values():
            num_blocks, num_heads = tensor.shape[0], tensor.shape[1]
            by_token = _bytes(tensor).reshape(num_blocks, num_heads, BLOCK_LEN, -1)
            kept = [by_token[block, :, place].copy() for block, place in read]
            for slot, token in enumerate(kept, start=start):
                by_token[slot // BLOCK_LEN, :, slot % BLOCK_LEN] = token


def _bytes(tensor: ov.Tensor) -> Any:
    """View [blocks, bytes] of the tensor's memory."""
    return tensor.data.view(np.uint8).reshape(tensor.shape[0], -1)
