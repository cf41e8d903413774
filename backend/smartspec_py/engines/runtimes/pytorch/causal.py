"""Passes that PyTorch runs, and the causal language models of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from smartspec_py.engines.checkpoints.checks import (
    ModelError,
    first_line,
    has_other_names,
    quantization,
)
from smartspec_py.engines.checkpoints.config import key_shape, load_config
from smartspec_py.engines.checkpoints.gguf.folder import INDEX
from smartspec_py.engines.checkpoints.tensors import (
    check_complete,
    check_finite,
    check_shape,
    check_tied,
    check_type,
    check_used,
    file_tensors,
    num_bytes,
    types_of,
)
from smartspec_py.engines.device import on_device
from smartspec_py.engines.phases import READING, Steps
from smartspec_py.engines.runtimes.pytorch.adapters import AdaptedLayers
from smartspec_py.engines.runtimes.pytorch.compiled import merge_products
from smartspec_py.engines.runtimes.pytorch.float8 import use_float8
from smartspec_py.engines.runtimes.pytorch.packed import (
    ATTENTION_NAME,
    NUM_SCRATCH,
    PackedBatch,
    RowCache,
    complete,
    pack,
    wanted_of,
)
from smartspec_py.engines.runtimes.runner import (
    FP8,
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
        """The last hidden states of all packed tokens, [N, hidden_size], from which `logits` are
        computed, and their states as in `PassOutput`, [N, width]. Does not wait for the device."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [M, vocab_size], float32, of some last hidden states [M, hidden_size]."""
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
        cache.slots, cache.write = packed.slots, packed.write
        if self._adapted is not None:
            self._adapted.choose(packed.adapters)
        out = self.model.base_model(
            input_ids=packed.token_ids,
            position_ids=packed.positions,
            past_key_values=cache,
            use_cache=True,
            attention=packed.attention,
            output_hidden_states=bool(self._layers),
        )
        hidden = out.last_hidden_state[0]
        if self._layers:
            states = out.hidden_states  # the input of each layer, and the last one after the norm
            return hidden, torch.cat([states[i][0] for i in self._layers], -1)
        return hidden, hidden if self._gives_hidden else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `PackedModel`."""
        out = self._head(inputs_embeds=hidden[None])
        logits: torch.Tensor = out.logits[0, :, : self._vocab_size].float()
        return logits

    @cached_property
    def _head(self) -> Any:
        """The model without its layers. Its own `forward` knows how the family computes logits."""
        head = copy(self.model)
        head._modules = dict(self.model._modules)
        head._modules[self.model.base_model_prefix] = _GivenHidden()
        return head


class _GivenHidden:
    """Takes the place of a model's layers: its input is the last hidden states."""

    def __call__(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _GivenHidden:
        self.last_hidden_state = inputs_embeds
        return self

    @property
    def decoder(self) -> _GivenHidden:
        """Of OPT."""
        return self

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Its other outputs."""


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

    @property
    def is_asynchronous(self) -> bool:
        return self.config.device.type == "cuda"

    @torch.inference_mode()
    def forward(
        self,
        inputs: Sequence[RowInput],
        token_ids: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> PassOutput:
        """See `Runner`. states: that the model reads with the tokens, [N, width]."""
        packed, firsts = pack(inputs, self.cache, self.config.device, states)
        if token_ids is not None:
            complete(packed.token_ids[0], token_ids, inputs, firsts)
        hidden, given = self._model(packed, self.cache)
        return self._output(hidden, given, inputs, firsts)

    def _output(
        self,
        hidden: torch.Tensor,
        states: torch.Tensor | None,
        inputs: Sequence[RowInput],
        firsts: Sequence[int],
    ) -> PassOutput:
        """The output of a pass. hidden, states: see `PackedModel`. firsts: of each input, the index
        of its first token."""
        wanted = on_device(wanted_of(inputs, firsts), self.config.device)
        logits = self._model.logits(hidden.index_select(0, wanted))
        if states is None:
            return PassOutput(logits)
        if self.config.state_layers:
            pairs = zip(firsts, inputs, strict=True)
            return PassOutput(logits, [states[i : i + len(row.tokens)] for i, row in pairs])
        counts = [row.num_logits for row in inputs]
        return PassOutput(logits, torch.split(states.index_select(0, wanted), counts))

    def move_keys(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        slots = on_device([*sources, *destinations], self.config.device)
        self.cache.move(*slots.view(2, -1))

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
    disable_progress_bar()
    source: Any = config.path
    tensors: Any = None
    model_class: Any = AutoModelForCausalLM

    name = str(config.path)
    is_gguf = (config.path / INDEX).is_file()
    if is_gguf or quantization(name, config.path) or has_other_names(name, config.path):
        source, tensors = None, _all_tensors(config.path)
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
    parameters = dict(model.named_parameters())
    steps = None if tensors is not None else Steps(READING, len(parameters), num_bytes(config.path))
    for name, weight in parameters.items():
        check_finite(name, weight, config.dtype, config.path)
        if steps is not None:  # files that are mapped into memory are read now
            steps.add()
    if config.device.type == "cuda":
        merge_products(model)
    if config.weights == FP8:
        use_float8(model)
    return model


def _all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the language model by its own names, dequantised."""
    files = file_tensors(folder)
    steps = Steps(READING, len(files), num_bytes(folder))
    tensors = {}
    for name, tensor in files.items():
        tensors[name] = tensor
        steps.add()
    return tensors


def _new_storage(hf_config: Any, config: RunnerConfig) -> torch.Tensor:
    num_slots = config.num_rows * config.max_len + NUM_SCRATCH
    shape = (hf_config.num_hidden_layers, 2, num_slots, *key_shape(hf_config))
    dtype = cache_dtype(config.device, config.dtype)
    return torch.zeros(shape, dtype=dtype, device=config.device)
