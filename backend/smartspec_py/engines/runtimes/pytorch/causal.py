"""A causal language model of Hugging Face that PyTorch runs: loading it, and its passes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from smartspec_py.engines.checkpoints.config import key_shape, load_config
from smartspec_py.engines.checkpoints.gguf.folder import INDEX
from smartspec_py.engines.checkpoints.supported import ModelError, first_line, quantization
from smartspec_py.engines.checkpoints.tensors import (
    check_complete,
    check_finite,
    check_tied,
    check_used,
    file_tensors,
)
from smartspec_py.engines.runtimes.pytorch.packed import (
    ATTENTION_NAME,
    NUM_SCRATCH,
    PackedBatch,
    PassAttention,
    RowCache,
    pack,
)
from smartspec_py.engines.runtimes.runner import (
    PassOutput,
    RowInput,
    Runner,
    RunnerConfig,
    cache_dtype,
)


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
        )
    except Exception as error:  # a damaged *.bin can raise any exception of pickle
        reason = first_line(error)
        raise ModelError(f"{config.path} cannot be loaded ({reason}): replace its files") from error
    model, info = loaded
    check_complete(info["missing_keys"], config.path)
    if unexpected := info["unexpected_keys"]:
        check_used(unexpected, file_tensors(config.path), config.path)
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
