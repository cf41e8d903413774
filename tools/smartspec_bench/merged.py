"""Compares texts of LoRA adapters with the model into which the adapter is merged: W + B A.

Transformers computes the merged model in float32, with its own attention and without a cache. So it
shares nothing with the served passes but the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from smartspec_bench.exactness import CheckCase
from smartspec_py.config import LocalEngineConfig
from smartspec_py.engines.checkpoints.adapters import Adapter, linear_layers, load_adapter
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.runtimes.pytorch.causal import load_model
from smartspec_py.engines.runtimes.runner import RunnerConfig


def merged_differences(
    config: LocalEngineConfig, engine: Engine, cases: Sequence[CheckCase]
) -> dict[str, float]:
    """By adapter, the largest difference between the log-probability of a generated token and that
    of the merged model. config: with absolute paths."""
    able = engine.target.capabilities
    cpu, folder = torch.device("cpu"), Path(config.model)
    model = load_model(
        RunnerConfig(folder, cpu, torch.float32, 1, able.max_context_len, able.vocab_size)
    )
    model.set_attn_implementation("eager")
    layers = linear_layers(model.config)
    found = {}
    for name, path in config.lora.items():
        own = [case for case in cases if case.params.adapter == name and case.log_probs]
        with _merged(model, load_adapter(name, Path(path), layers)):
            found[name] = max(
                (_difference(model, engine, case) for case in own),
                default=0.0,
            )
    return found


@contextmanager
def _merged(model: Any, adapter: Adapter) -> Iterator[None]:
    """Change the weights of the model inside the context."""
    kept = {}
    for layer, (a, b) in adapter.pairs.items():
        module = model.get_submodule(layer)
        kept[layer], module.weight.data = module.weight.data, module.weight.data + b @ a
    yield
    for layer, weight in kept.items():
        model.get_submodule(layer).weight.data = weight


@torch.inference_mode()
def _difference(model: Any, engine: Engine, case: CheckCase) -> float:
    prompt, num = engine.tokenizer.encode(case.params.text).ids, len(case.log_probs)
    tokens = torch.tensor([[*prompt, *case.tokens[:num]]])
    vocab_size = engine.target.capabilities.vocab_size
    logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1, :vocab_size]
    expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
    return float((expected - torch.tensor(case.log_probs)).abs().max())
