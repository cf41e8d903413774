"""One Hugging Face causal language model with its rows: loading it, and a packed pass.

Target and draft model are the same thing here; they differ in who calls `forward`.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from smartspec_py.engines.torch.linears import pack_linears
from smartspec_py.engines.torch.llama import LlamaDecoder, can_write_out
from smartspec_py.engines.torch.packed import (
    ATTENTION_NAME,
    NUM_SCRATCH,
    PackedBatch,
    PassAttention,
    RowCache,
    RowInput,
    pack,
    padded_len,
)


class ModelError(ValueError):
    """The model cannot be served by this engine; the message says why."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """max_len: tokens a row can hold. vocab_size: tokens of the tokenizer; a model's padding
    beyond that is cut off its logits. gives_hidden: keep the last hidden states of each pass.
    batch_invariant: logits do not depend, in any bit, on how many tokens and rows share a pass;
    only on a CPU.
    """

    path: Path
    device: torch.device
    dtype: torch.dtype
    num_rows: int
    max_len: int
    vocab_size: int
    gives_hidden: bool = False
    batch_invariant: bool = False

    @property
    def row_len(self) -> int:
        """Tokens a row of the buffer has room for, padding included."""
        return padded_len(self.max_len) if self.batch_invariant else self.max_len


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Of every position that was asked for, input after input.

    logits: [n, vocab_size], float32. hidden: [n, width], the states from which they were computed;
    None unless the runner gives them.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class RowStore(Protocol):
    """Keys and values by rows."""

    def copy_row(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the keys and values of a row's first tokens."""


class Runner(ABC):
    """A loaded model and its cache. Not thread-safe: the loop owns it."""

    cache: RowStore

    can_draft_greedy = False
    """Whether `draft_greedy` is there, because it spares anything."""

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config
        self.passes_s = 0.0
        """Seconds spent in passes so far; on a GPU only until they are launched."""

    @property
    @abstractmethod
    def about(self) -> str:
        """What computes the model, in words. A profile of the one tells nothing of another."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Of keys and values, for each token of a row."""

    @abstractmethod
    def forward(self, inputs: Sequence[RowInput]) -> PassOutput:
        """One pass over all inputs; writes their keys and values to their rows."""

    def warm(self, max_width: int) -> None:  # noqa: B027
        """Prepare decoding passes of up to so many tokens a row; here there is nothing to prepare.

        Raises ModelError where the model cannot be run as prepared.
        """

    def draft_greedy(
        self, inputs: Sequence[RowInput], draft_lens: Sequence[int]
    ) -> list[list[int]]:
        """The best token after each input, the best one after that, and so on: draft_lens of them,
        at least one each. Every input asks for the logits of its last token alone.

        The keys of all but the last of them are then in the input's row, as far as that reaches.
        """
        raise NotImplementedError("only a runner that says can_draft_greedy drafts ahead")

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Seconds of one pass whose logits reach the host. Overwrites the rows that it uses.

        num_logits: see `Profilable`.
        """
        max_len = self.config.max_len
        tokens_per_row = min(tokens_per_row, max_len)
        position = max(0, min(context_len, max_len - tokens_per_row))
        tokens = [0] * tokens_per_row
        wanted = tokens_per_row if num_logits is None else min(num_logits, tokens_per_row)
        inputs = [RowInput(row, position, tokens, wanted) for row in range(batch_size)]
        start = time.perf_counter()
        self.forward(inputs).logits.argmax(-1).tolist()
        return time.perf_counter() - start


class CausalRunner(Runner):
    """A model that PyTorch computes."""

    cache: RowCache

    def __init__(self, model: Any, config: RunnerConfig) -> None:
        """model: see `prepared`; or one of Transformers, with the engine's attention."""
        super().__init__(config)
        self._model = model
        self.cache = RowCache(_new_storage(model.config, config), config.num_rows)

    @property
    def about(self) -> str:
        invariant = ", batch-invariant" if self.config.batch_invariant else ""
        return f"PyTorch, {type(self._model).__name__}{invariant}"

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> PassOutput:
        start = time.perf_counter()
        config = self.config
        packed = pack(inputs, config.row_len, config.device, config.batch_invariant)
        output = self._run(packed)
        self.passes_s += time.perf_counter() - start
        return output

    def _run(self, packed: PackedBatch) -> PassOutput:
        """The model over tokens that are on the device. Nothing here waits for it."""
        config = self.config
        self.cache.slots = packed.slots
        if isinstance(self._model, LlamaDecoder):
            logits, hidden = self._model(packed, self.cache)
        else:
            logits, hidden = self._transformers_pass(packed)
        logits = logits[:, : config.vocab_size].float()
        return PassOutput(logits, hidden if config.gives_hidden else None)

    def _transformers_pass(self, packed: PackedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `LlamaDecoder.forward`."""
        gives_hidden = self.config.gives_hidden
        out = self._model(
            input_ids=packed.token_ids,
            position_ids=packed.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=packed.wanted,
            attention=PassAttention(packed, self.cache),
            output_hidden_states=gives_hidden,
        )
        hidden = out.hidden_states[-1][0, packed.wanted] if gives_hidden else None
        return out.logits[0], hidden

    @property
    def bytes_per_token(self) -> int:
        buffer = self.cache.buffer
        return buffer.element_size() * buffer[:, :, 0, 0].numel()


def load_runner(
    config: RunnerConfig, runner_class: type[CausalRunner] = CausalRunner
) -> CausalRunner:
    """Load weights from a local directory. Raises ModelError when the engine cannot serve it."""
    return runner_class(prepared(load_model(config), config), config)


def load_config(config: RunnerConfig) -> Any:
    """The model's config, of Transformers. Raises ModelError when the engine cannot serve it."""
    # Nothing is ever fetched, whatever the directory's files refer to.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not (config.path / "config.json").is_file():
        raise ModelError(f"{config.path} has no config.json: give a Hugging Face model directory")
    hf_config = AutoConfig.from_pretrained(
        config.path, local_files_only=True, trust_remote_code=False
    )
    _check_supported(hf_config, config)
    return hf_config


def load_model(config: RunnerConfig, stored: torch.dtype | None = None) -> Any:
    """A model of Transformers from a local directory, whole and on the device.

    stored: the precision that weights are kept in, where that is not the one that they are
    multiplied in. Raises ModelError when the engine cannot serve it.
    """
    load_config(config)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=stored or config.dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # what a damaged *.bin raises is pickle's
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"{config.path} cannot be loaded ({reason}): replace its files") from error
    model, info = loaded
    _check_complete(info["missing_keys"], config)
    model = model.to(config.device).eval()
    _check_finite(model, config)
    return model


def _check_complete(missing: Collection[str], config: RunnerConfig) -> None:
    """Transformers draws weights that no file has at random."""
    if missing:
        raise ModelError(
            f"{config.path}: the weight files lack {len(missing)} tensors, such as {min(missing)}: "
            "copy the whole checkpoint"
        )


def _check_finite(model: Any, config: RunnerConfig) -> None:
    """Logits that are not finite give empty texts, and no error."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or not weight.numel():
            continue
        # By the least and greatest value, which are NaN where any is: one read, and no copy, which
        # `isfinite` makes.
        if not all(math.isfinite(value.to(config.dtype)) for value in weight.detach().aminmax()):
            raise ModelError(
                f"{config.path}: the weights {name} are not all finite in "
                f"{str(config.dtype).removeprefix('torch.')}: replace the file that holds them, or "
                "give another dtype"
            )


def prepared(model: Any, config: RunnerConfig) -> Any:
    """A model of Transformers as it is computed here; the given one is used up: written out where
    that can be, and with packed weights on a CPU. Sums that must not depend on the batch stay as
    Transformers has them."""
    if not config.batch_invariant and can_write_out(model.config):
        model = LlamaDecoder(model, config.row_len)
    if config.device.type == "cpu":
        pack_linears(model, config.batch_invariant)
    return model


def _check_supported(hf_config: Any, config: RunnerConfig) -> None:
    if getattr(hf_config, "attn_logit_softcapping", None):
        if hf_config.model_type != "gemma2":
            raise ModelError(f"{config.path}: models with attn_logit_softcapping are not supported")
        if config.batch_invariant:
            raise ModelError(
                f"{config.path}: models with attn_logit_softcapping are not batch-invariant: leave "
                "out engine.batch_invariant"
            )


def bytes_per_token(hf_config: Any, device: torch.device, dtype: torch.dtype) -> int:
    """Of the keys and values of a model that is computed in dtype."""
    num_heads, head_dim = key_shape(hf_config)
    size = _cache_dtype(device, dtype).itemsize
    return int(hf_config.num_hidden_layers * 2 * num_heads * head_dim * size)


def _new_storage(hf_config: Any, config: RunnerConfig) -> torch.Tensor:
    num_slots = config.num_rows * config.row_len + NUM_SCRATCH
    shape = (hf_config.num_hidden_layers, 2, num_slots, *key_shape(hf_config))
    dtype = _cache_dtype(config.device, config.dtype)
    return torch.zeros(shape, dtype=dtype, device=config.device)


def key_shape(hf_config: Any) -> tuple[int, int]:
    """Of a token's keys in a layer: heads, width of one."""
    num_heads = getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None)
    return num_heads, head_dim or hf_config.hidden_size // hf_config.num_attention_heads


def _cache_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """float32 on a CPU: on some processors PyTorch's attention takes 2 to 4 times as long for one
    query in bfloat16."""
    return torch.float32 if device.type == "cpu" else dtype
