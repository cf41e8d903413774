"""One Hugging Face causal language model with its cache rows: loading it, and running a pass.

The target and the draft model both use this code. They differ only in the caller of `forward`.
"""

from __future__ import annotations

import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from smartspec_py.engines.torch.checkpoint import ModelError, first_line, quantization
from smartspec_py.engines.torch.gguf_folder import INDEX
from smartspec_py.engines.torch.packed import (
    ATTENTION_NAME,
    NUM_SCRATCH,
    PackedBatch,
    PassAttention,
    RowCache,
    RowInput,
    pack,
)
from smartspec_py.engines.torch.rope import IS_OLD, fix_longrope, use_new_rope

CONSTANTS = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)(position_ids|version)$|\.(attn|attention)\.(masked_)?bias$"
)
"""Names of tensors that old checkpoints have although they follow from the configuration."""

WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

SCALE_BYTES = 8
"""Of the scale and the zero of a head's key or value in a cache of 8 bits, in float32."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """max_len: tokens that a row can hold. vocab_size: tokens of the tokenizer; logits beyond it
    are removed, because models pad their vocabulary. gives_hidden: return the last hidden states of
    each pass. state_layers: return the inputs of these layers instead, one after another.
    weights, kv_cache: see `config.TorchEngineConfig`; weights of a loaded runner are not auto.
    num_threads: of OpenVINO; PyTorch's own is set elsewhere.
    """

    path: Path
    device: torch.device
    dtype: torch.dtype
    num_rows: int
    max_len: int
    vocab_size: int
    gives_hidden: bool = False
    state_layers: tuple[int, ...] = ()
    weights: str = "stored"
    kv_cache: str = "auto"
    num_threads: int = 1

    @property
    def cache_text(self) -> str:
        """What to say of the cache behind the name of the runtime."""
        return ", 8-bit KV cache" if self.kv_cache == "u8" else ""


@dataclass(frozen=True, slots=True)
class PassOutput:
    """The result of a pass, for each requested position, in the order of the inputs.

    logits: [n, vocab_size], float32. hidden: [n, width], the states from which the logits were
    computed; None unless the runner returns them. With `RunnerConfig.state_layers`, hidden has the
    inputs of these layers for every token of the inputs.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class RowStore(Protocol):
    """Keys and values, organised by rows. free_bytes: what rows without a sequence may keep."""

    free_bytes: float

    def copy_row(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the keys and values of the row's first num_tokens tokens."""

    def clear_row(self, row: int) -> None:
        """Set the keys and values of the row to 0."""

    def drop_row(self, row: int, num_kept: int = 0) -> None:
        """Give memory back that the row does not need for its first num_kept tokens."""


class Runner(ABC):
    """A loaded model and its cache. Not thread-safe: only the loop may use it."""

    cache: RowStore

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config
        self.passes_s = 0.0
        """Seconds spent in passes so far; on a GPU, only the time until they are launched."""

    @property
    def ready_sizes(self) -> Collection[int]:
        """See `Target`."""
        return ()

    @property
    def is_padded(self) -> bool:
        """See `PassTable`."""
        return False

    @property
    @abstractmethod
    def about(self) -> str:
        """The software that computes the model. A profile is valid for this software only."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token of a row."""

    @abstractmethod
    def forward(self, inputs: Sequence[RowInput]) -> PassOutput:
        """Run one pass over all inputs, and write their keys and values to their rows."""

    def release(self) -> None:  # noqa: B027
        """Give back memory that only timed passes needed. The contents of all rows are lost."""

    def warm(self, max_width: int) -> None:  # noqa: B027
        """Prepare decoding passes of up to max_width tokens per row; the default does nothing."""

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Seconds of one pass, including the copy of the best tokens to the host. The pass
        overwrites the rows that it uses.

        num_logits: see `Profilable`.
        """
        max_len = self.config.max_len
        tokens_per_row = min(tokens_per_row, max_len)
        position = max(0, min(context_len, max_len - tokens_per_row))
        tokens = [0] * tokens_per_row
        wanted = tokens_per_row if num_logits is None else min(num_logits, tokens_per_row)
        num_prompt = 0 if num_logits is None else tokens_per_row
        inputs = [RowInput(row, position, tokens, wanted, num_prompt) for row in range(batch_size)]
        start = time.perf_counter()
        self.forward(inputs).logits.argmax(-1).tolist()
        return time.perf_counter() - start


class CausalRunner(Runner):
    """A model that PyTorch runs."""

    cache: RowCache

    def __init__(self, model: Any, config: RunnerConfig) -> None:
        """model: of Transformers, with the engine's attention."""
        super().__init__(config)
        self._model = model
        self.cache = RowCache(_new_storage(model.config, config), config.num_rows)

    @property
    def about(self) -> str:
        return f"PyTorch, {type(self._model).__name__}"

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> PassOutput:
        start = time.perf_counter()
        config = self.config
        packed = pack(inputs, config.max_len, config.device)
        output = self._launched(inputs, packed)
        if output.hidden is not None and config.state_layers:
            states = [output.hidden[packed.tokens_of(one)] for one in inputs]
            output = replace(output, hidden=torch.cat(states))
        self.passes_s += time.perf_counter() - start
        return output

    def _launched(self, inputs: Sequence[RowInput], packed: PackedBatch) -> PassOutput:
        """Launch the pass over the packed inputs kernel by kernel."""
        return self._run(packed)

    def _run(self, packed: PackedBatch) -> PassOutput:
        """Run the model on tokens that are on the device, without waiting for the result. States
        for every token are in the order of the packed tokens."""
        layers = self.config.state_layers
        gives_hidden = self.config.gives_hidden or bool(layers)
        self.cache.slots = packed.slots
        out = self._model(
            input_ids=packed.token_ids,
            position_ids=packed.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=packed.wanted,
            attention=PassAttention(packed, self.cache),
            output_hidden_states=gives_hidden,
        )
        logits = out.logits[0, :, : self.config.vocab_size].float()
        if not gives_hidden:
            return PassOutput(logits)
        states = out.hidden_states  # the input of each layer, and the last one after the norm
        if layers:
            return PassOutput(logits, torch.cat([states[i][0] for i in layers], -1))
        return PassOutput(logits, states[-1][0, packed.wanted])

    @property
    def bytes_per_token(self) -> int:
        buffer = self.cache.buffer
        return buffer.element_size() * buffer[:, :, 0, 0].numel()


def load_runner(
    config: RunnerConfig, runner_class: type[CausalRunner] = CausalRunner
) -> CausalRunner:
    """Load weights from a local directory. Raises ModelError if the engine cannot serve them."""
    return runner_class(load_model(config), config)


def load_config(config: RunnerConfig) -> Any:
    """The model's Transformers config. Raises ModelError if the engine cannot serve the model."""
    # Never download anything, whatever the files in the directory refer to.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not (config.path / "config.json").is_file():
        raise ModelError(f"{config.path} has no config.json: give a Hugging Face model directory")
    hf_config = AutoConfig.from_pretrained(
        config.path, local_files_only=True, trust_remote_code=False
    )
    hf_config.__dict__.pop("quantization_config", None)  # `file_tensors` dequantises
    if IS_OLD:
        use_new_rope(hf_config, config.path)
    fix_longrope(hf_config, config.max_len)
    return hf_config


def load_model(config: RunnerConfig) -> Any:
    """A Transformers model from a local directory, loaded completely and moved to the device.

    Raises ModelError if the engine cannot serve the model.
    """
    hf_config = load_config(config)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    source: Any = config.path
    tensors: Any = None
    model_class: Any = AutoModelForCausalLM
    from smartspec_py.engines.torch.weights import file_tensors, types_of  # it imports this

    if (config.path / INDEX).is_file() or quantization(str(config.path), config.path):
        source, tensors = None, dict(file_tensors(config.path))
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    try:
        loaded: Any = model_class.from_pretrained(
            source,
            config=hf_config,
            state_dict=tensors,
            dtype=config.dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_shape` names them
        )
    except Exception as error:  # a damaged *.bin can raise any exception of pickle
        reason = first_line(error)
        raise ModelError(f"{config.path} cannot be loaded ({reason}): replace its files") from error
    model, info = loaded
    check_complete(info["missing_keys"], config)
    for name, found, wanted in sorted(info["mismatched_keys"]):
        check_shape(name, found, wanted, config)
    files = file_tensors(config.path) if tensors is None else tensors
    check_used(info["unexpected_keys"], files, config)
    for name, dtype in types_of(files).items():
        check_type(name, dtype, config)
    if hf_config.tie_word_embeddings and getattr(model, "_tied_weights_keys", None):
        pair = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        check_tied(pair[0] is pair[1], config)
    model = model.to(config.device).eval()
    for name, weight in model.named_parameters():
        check_finite(name, weight, config)
    return model


def check_complete(missing: Collection[str], config: RunnerConfig) -> None:
    """Transformers initialises missing weights at random, so they must be an error here."""
    if missing:
        raise ModelError(
            f"{config.path}: the weight files lack {len(missing)} tensors, such as {min(missing)}: "
            "copy the whole checkpoint"
        )


def check_used(
    unexpected: Collection[str], tensors: Mapping[str, torch.Tensor], config: RunnerConfig
) -> None:
    """A tensor that the model does not have would be left out, so it must be an error here. Biases
    of 0, which some quantised checkpoints have everywhere, and constants change nothing.

    unexpected: names in the files. tensors: the files.
    """
    for name in sorted(unexpected):
        is_zero = name.endswith(".bias") and name in tensors and not tensors[name].any()
        if not is_zero and not CONSTANTS.search(name):
            raise ModelError(
                f"{config.path}: the weight files have the tensor {name}, which the model of "
                "config.json has not: use the config.json of this checkpoint, or another model"
            )


def check_tied(is_tied: bool, config: RunnerConfig) -> None:
    """is_tied: whether the output layer of a model with tie_word_embeddings is its embedding."""
    if not is_tied:
        raise ModelError(
            f"{config.path}: the weight files have an output layer that is not the embedding: set "
            "tie_word_embeddings in config.json to false"
        )


def check_type(name: str, dtype: torch.dtype, config: RunnerConfig) -> None:
    """Numbers of other types stand for others, with scales that the files do not have."""
    if dtype not in WEIGHT_TYPES and not CONSTANTS.search(name):
        found, *known = (str(one).removeprefix("torch.") for one in (dtype, *WEIGHT_TYPES))
        raise ModelError(
            f"{config.path}: the weight files have the tensor {name} of the type {found}, which "
            f"must be one of {', '.join(known)}: use another checkpoint"
        )


def check_shape(
    name: str, found: Sequence[int], wanted: Sequence[int], config: RunnerConfig
) -> None:
    """found: of the tensor in the files. wanted: of the model of config.json."""
    if tuple(found) != tuple(wanted):
        raise ModelError(
            f"{config.path}: the weight files have the tensor {name} of the shape {tuple(found)}, "
            f"but its config.json says {tuple(wanted)}: use the config.json of this checkpoint"
        )


def check_finite(name: str, weight: torch.Tensor, config: RunnerConfig) -> None:
    """Non-finite logits would give empty texts without an error, so reject such weights."""
    if not weight.is_floating_point() or not weight.numel():
        return
    # The minimum and maximum are NaN if any weight is. This reads the weights once and makes no
    # copy, unlike `isfinite`.
    if not all(math.isfinite(value.to(config.dtype)) for value in weight.detach().aminmax()):
        raise ModelError(
            f"{config.path}: the weights {name} are not all finite in "
            f"{str(config.dtype).removeprefix('torch.')}: replace the file that holds them, or "
            "set another dtype"
        )


def bytes_per_token(
    hf_config: Any, device: torch.device, dtype: torch.dtype, kv_cache: str = "auto"
) -> int:
    """Bytes of keys and values per token, for a model that is computed in dtype."""
    num_heads, head_dim = key_shape(hf_config)
    head_bytes = head_dim * _cache_dtype(device, dtype).itemsize
    if kv_cache == "u8":
        head_bytes = head_dim + SCALE_BYTES
    return int(hf_config.num_hidden_layers * 2 * num_heads * head_bytes)


def _new_storage(hf_config: Any, config: RunnerConfig) -> torch.Tensor:
    num_slots = config.num_rows * config.max_len + NUM_SCRATCH
    shape = (hf_config.num_hidden_layers, 2, num_slots, *key_shape(hf_config))
    dtype = _cache_dtype(config.device, config.dtype)
    return torch.zeros(shape, dtype=dtype, device=config.device)


def key_shape(hf_config: Any) -> tuple[int, int]:
    """Shape of a token's keys in one layer: number of heads, width of a head."""
    num_heads = getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None)
    return num_heads, head_dim or hf_config.hidden_size // hf_config.num_attention_heads


def _cache_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """float32 on a CPU: on some processors, PyTorch's attention with one query takes 2 to 4 times
    as long in bfloat16."""
    return torch.float32 if device.type == "cpu" else dtype
