"""One Hugging Face causal language model with its rows: loading it, and a packed pass.

Target and draft model are the same thing here; they differ in who calls `forward`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from smartspec_py.engines.packed import ATTENTION_NAME, RowCache, RowInput, pack


class ModelError(ValueError):
    """The model cannot be served by this engine; the message says why."""


class RowTable:
    """Which sequence owns which row. Rows in use are 0..n-1 without gaps, so that a batch reads a
    view of the cache and never a copy; a freed row is filled by the last."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._owners: list[int] = []
        self._rows: dict[int, int] = {}

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._rows

    def __len__(self) -> int:
        return len(self._owners)

    def row(self, sequence: int) -> int:
        return self._rows[sequence]

    def owner(self, row: int) -> int:
        return self._owners[row]

    def allocate(self, sequence: int) -> None:
        assert sequence not in self._rows, f"sequence {sequence} has a row already"
        assert len(self._owners) < self._num_rows, "no row is free: admission must prevent this"
        self._rows[sequence] = len(self._owners)
        self._owners.append(sequence)

    def release(self, sequence: int) -> tuple[int, int] | None:
        """Free the row. Returns (source, destination) of the row that has to be moved, if any."""
        hole = self._rows.pop(sequence)
        last_owner = self._owners.pop()
        if last_owner == sequence:
            return None
        self._owners[hole] = last_owner
        source, self._rows[last_owner] = self._rows[last_owner], hole
        return source, hole


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """max_len: tokens a row can hold. vocab_size: tokens of the tokenizer; a model's padding
    beyond that is cut off its logits."""

    path: Path
    device: torch.device
    dtype: torch.dtype
    num_rows: int
    max_len: int
    vocab_size: int


class CausalRunner:
    """A loaded model and its cache. Not thread-safe: the loop owns it."""

    def __init__(self, model: Any, config: RunnerConfig) -> None:
        self._model = model
        self._config = config
        self.cache = RowCache(_new_buffer(model.config, config))
        self.passes_s = 0.0
        """Seconds spent in passes so far; on a GPU only until they are launched."""

    @property
    def device(self) -> torch.device:
        return self._config.device

    @property
    def max_len(self) -> int:
        return self._config.max_len

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """Logits [sum of num_logits, vocab_size] in float32, input after input."""
        start = time.perf_counter()
        packed = pack(inputs, self.max_len, self.device)
        self.cache.slots = packed.slots
        out = self._model(
            input_ids=packed.token_ids,
            position_ids=packed.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=packed.wanted,
            packed=packed,
        )
        logits: torch.Tensor = out.logits[0, :, : self._config.vocab_size].float()
        self.passes_s += time.perf_counter() - start
        return logits

    def time_pass(self, num_rows: int, tokens_per_row: int, context_len: int) -> float:
        """Seconds of one pass whose logits reach the host. Overwrites the rows that it uses."""
        tokens_per_row = min(tokens_per_row, self.max_len)
        position = max(0, min(context_len, self.max_len - tokens_per_row))
        tokens = [0] * tokens_per_row
        inputs = [RowInput(row, position, tokens, tokens_per_row) for row in range(num_rows)]
        start = time.perf_counter()
        self.forward(inputs).argmax(-1).tolist()
        return time.perf_counter() - start


def load_runner(config: RunnerConfig) -> CausalRunner:
    """Load weights from a local directory. Raises ModelError when the engine cannot serve it."""
    # Nothing is ever fetched, whatever the directory's files refer to.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not (config.path / "config.json").is_file():
        raise ModelError(f"{config.path} has no config.json: give a Hugging Face model directory")
    hf_config = AutoConfig.from_pretrained(config.path, local_files_only=True)
    _check_supported(hf_config, config)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        config.path,
        dtype=config.dtype,
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
    )
    return CausalRunner(model.to(config.device).eval(), config)


def _check_supported(hf_config: Any, config: RunnerConfig) -> None:
    window = getattr(hf_config, "sliding_window", None)
    is_used = getattr(hf_config, "use_sliding_window", True)
    if is_used and window is not None and window < config.max_len:
        raise ModelError(
            f"{config.path}: sliding-window attention ({window} tokens) is not supported beyond "
            f"its window; set limits.max_context_len below {window}"
        )
    for name in ("attn_logit_softcapping", "is_encoder_decoder"):
        if getattr(hf_config, name, None):
            raise ModelError(f"{config.path}: models with {name} are not supported")
    longest = getattr(hf_config, "max_position_embeddings", None)
    if longest is not None and config.max_len > longest:
        raise ModelError(
            f"{config.path} reaches {longest} positions and {config.max_len} are needed: lower "
            "limits.max_context_len"
        )


def _new_buffer(hf_config: Any, config: RunnerConfig) -> torch.Tensor:
    num_heads = getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None)
    head_dim = head_dim or hf_config.hidden_size // hf_config.num_attention_heads
    shape = (hf_config.num_hidden_layers, 2, config.num_rows, config.max_len, num_heads, head_dim)
    return torch.zeros(shape, dtype=_cache_dtype(config), device=config.device)


def _cache_dtype(config: RunnerConfig) -> torch.dtype:
    """float32 on a CPU: its attention kernel takes 2 to 4 times as long for one bfloat16 query
    (8 rows, 32 heads of 16, context 256: 2.5 ms against 0.7 ms a layer)."""
    return torch.float32 if config.device.type == "cpu" else config.dtype
