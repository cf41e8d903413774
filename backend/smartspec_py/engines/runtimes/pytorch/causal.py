"""Passes that PyTorch runs, and the causal language models of Hugging Face."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from smartspec_py.engines.checkpoints.config import key_shape, load_config
from smartspec_py.engines.checkpoints.gguf.folder import INDEX
from smartspec_py.engines.checkpoints.supported import ModelError, first_line, quantization
from smartspec_py.engines.checkpoints.tensors import (
    check_complete,
    check_finite,
    check_shape,
    check_tied,
    check_type,
    check_used,
    file_tensors,
    types_of,
)
from smartspec_py.engines.runtimes.pytorch.adapters import AdaptedLayers
from smartspec_py.engines.runtimes.pytorch.packed import (
    ATTENTION_NAME,
    NUM_SCRATCH,
    PackedBatch,
    PassAttention,
    RowCache,
    pack,
)
from smartspec_py.engines.runtimes.runner import (
    PYTORCH,
    PassOutput,
    RowInput,
    Runner,
    RunnerConfig,
    cache_dtype,
)


class PackedModel(Protocol):
    """What a pass of PyTorch computes: a `torch.nn.Module`.

    config: a Transformers config, which describes its cache, its states and its logits.
    reads_states: whether it reads `PackedBatch.states`, of the width of its own states.
    """

    config: Any
    reads_states: bool

    def __call__(
        self, packed: PackedBatch, cache: RowCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [M, vocab_size] of the wanted tokens, and states as in `PassOutput`, in the order
        of the packed tokens. Does not wait for the device."""
        ...


class CausalModel(torch.nn.Module):
    """A causal language model of Transformers, with the engine's attention."""

    reads_states = False

    def __init__(self, model: Any, config: RunnerConfig) -> None:
        super().__init__()
        self.config, self.model = model.config, model
        self._vocab_size, self._layers = config.vocab_size, config.state_layers
        self._gives_hidden = config.gives_hidden or bool(config.state_layers)
        self._adapted = AdaptedLayers(model, config) if config.adapters.names else None

    def forward(
        self, packed: PackedBatch, cache: RowCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `PackedModel`."""
        cache.slots = packed.slots
        if self._adapted is not None:
            self._adapted.choose(packed.adapters)
        out = self.model(
            input_ids=packed.token_ids,
            position_ids=packed.positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=packed.wanted,
            attention=PassAttention(packed, cache),
            output_hidden_states=self._gives_hidden,
        )
        logits = out.logits[0, :, : self._vocab_size].float()
        if not self._gives_hidden:
            return logits, None
        states = out.hidden_states  # the input of each layer, and the last one after the norm
        if self._layers:
            return logits, torch.cat([states[i][0] for i in self._layers], -1)
        return logits, states[-1][0, packed.wanted]


class PyTorchRunner(Runner):
    """A model that PyTorch runs, kernel by kernel."""

    runtime = PYTORCH
    cache: RowCache

    def __init__(self, model: PackedModel, config: RunnerConfig) -> None:
        super().__init__(config)
        self._model = model
        self.cache = RowCache(_new_storage(model.config, config), config.num_rows)

    @property
    def about(self) -> str:
        return f"{PYTORCH}, {type(getattr(self._model, 'model', self._model)).__name__}"

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> PassOutput:
        start = time.perf_counter()
        packed = pack(inputs, self.config.max_len, self.config.device)
        logits, states = self._model(packed, self.cache)
        by_input = self._by_input(states, inputs)
        if states is not None and self.config.state_layers:
            by_input = [states[packed.tokens_of(row)] for row in inputs]
        self.passes_s += time.perf_counter() - start
        return PassOutput(logits, by_input)

    @property
    def bytes_per_token(self) -> int:
        buffer = self.cache.buffer
        return buffer.element_size() * buffer[:, :, 0, 0].numel()


def load_runner(
    config: RunnerConfig, runner_class: type[PyTorchRunner] = PyTorchRunner
) -> PyTorchRunner:
    """Load weights from a local directory. Raises ModelError if the engine cannot serve them."""
    return runner_class(CausalModel(load_model(config), config), config)


def load_model(config: RunnerConfig) -> Any:
    """A Transformers model from a local directory, loaded completely and moved to the device.

    Raises ModelError if the engine cannot serve the model.
    """
    hf_config = load_config(config.path, config.max_len)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    source: Any = config.path
    tensors: Any = None
    model_class: Any = AutoModelForCausalLM

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
    check_complete(info["missing_keys"], config.path)
    for name, shape, wanted in sorted(info["mismatched_keys"]):
        check_shape(name, shape, wanted, config.path)
    files = file_tensors(config.path) if tensors is None else tensors
    check_used(info["unexpected_keys"], files, config.path)
    for name, dtype in types_of(files).items():
        check_type(name, dtype, config.path)
    if hf_config.tie_word_embeddings and getattr(model, "_tied_weights_keys", None):
        pair = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        check_tied(pair[0] is pair[1], config.path)
    model = model.to(config.device).eval()
    for name, weight in model.named_parameters():
        check_finite(name, weight, config.dtype, config.path)
    return model


def _new_storage(hf_config: Any, config: RunnerConfig) -> torch.Tensor:
    num_slots = config.num_rows * config.max_len + NUM_SCRATCH
    shape = (hf_config.num_hidden_layers, 2, num_slots, *key_shape(hf_config))
    dtype = cache_dtype(config.device, config.dtype)
    return torch.zeros(shape, dtype=dtype, device=config.device)
