"""Random small models, made in the test: nothing is loaded from disk."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.engines.base import Event, TargetCapabilities, Work
from smartspec_py.engines.cache.blocks import BlockPool
from smartspec_py.engines.cache.cached_model import CachedModel
from smartspec_py.engines.checkpoints.adapters import NO_ADAPTERS, Adapters
from smartspec_py.engines.drafts.draft_model import DraftModelProposer
from smartspec_py.engines.local.target import LocalTarget
from smartspec_py.engines.runtimes.pytorch.causal import CausalModel, PyTorchRunner
from smartspec_py.engines.runtimes.pytorch.packed import ATTENTION_NAME
from smartspec_py.engines.runtimes.runner import Runner, RunnerConfig

VOCAB_SIZE = 96
MAX_LEN = 96
MAX_SEQUENCES = 5
MAX_DRAFT_LEN = 6

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 8,  # padded, as many models are; the engine must not emit those
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}

CONFIGS = {
    "llama": LlamaConfig(**_COMMON, num_key_value_heads=4),
    "llama, grouped keys": LlamaConfig(**_COMMON, num_key_value_heads=2),
    "qwen2, one key head": Qwen2Config(**_COMMON, num_key_value_heads=1),
    "qwen3": Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=12),
    "gpt-neox": GPTNeoXConfig(**_COMMON),
    "qwen3_moe": Qwen3MoeConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
}
_WINDOW: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 2,
    "use_sliding_window": True,
    "max_window_layers": 1,
}
WINDOWED = {
    "mistral, window 11": MistralConfig(**_COMMON, num_key_value_heads=2, sliding_window=11),
    "qwen2, window 11 above": Qwen2Config(**_WINDOW, sliding_window=11),
    "qwen3, window 1": Qwen3Config(**_WINDOW, head_dim=12, sliding_window=1),
    "gemma2, window 11": Gemma2Config(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=11,
        attn_logit_softcapping=2.0,
    ),
}
"""Models whose layers, all or some, see the last positions alone. Gemma 2 caps scores as well: at
2.0 few are below."""


def make_model(kind: str, seed: int = 0, noise: float = 0.0) -> Any:
    """A random model; noise: a draft is the target with its weights disturbed by so much."""
    torch.manual_seed(seed)
    config = (CONFIGS | WINDOWED)[kind.removeprefix(OPENVINO)]
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return model


OPENVINO = "openvino: "
"""How the kinds begin that OpenVINO computes, and not PyTorch."""


def make_runner(
    model: Any,
    max_sequences: int = MAX_SEQUENCES,
    with_openvino: bool = False,
    kv_cache: str = "auto",
    adapters: Adapters = NO_ADAPTERS,
) -> Runner:
    model.set_attn_implementation(ATTENTION_NAME)
    cpu, dtype = torch.device("cpu"), torch.float32
    config = RunnerConfig(Path(), cpu, dtype, max_sequences, MAX_LEN, VOCAB_SIZE, adapters=adapters)
    if with_openvino:
        from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner

        return OpenVinoRunner(model, replace(config, kv_cache=kv_cache))
    return PyTorchRunner(CausalModel(model, config), config)


def make_target(
    kind: str, *, reuses_prefixes: bool = True, max_sequences: int = MAX_SEQUENCES
) -> LocalTarget:
    runner = make_runner(make_model(kind), max_sequences, kind.startswith(OPENVINO))
    capabilities = TargetCapabilities(
        max_sequences=max_sequences,
        max_context_len=MAX_LEN,
        max_draft_len=MAX_DRAFT_LEN,
        max_decode_tokens=1,
        max_prefill_tokens=64,
        verifies_sampling=True,
        vocab_size=VOCAB_SIZE,
        bytes_per_token=runner.bytes_per_token,
    )
    return LocalTarget(runner, capabilities, reuses_prefixes=reuses_prefixes)


def poll(target: LocalTarget, *work: Work) -> list[Event]:
    """The events of this work, which is one pass."""
    target.submit(work)
    return target.poll(0.0)


def make_proposer(
    kind: str, *, reuses_prefixes: bool = True, max_sequences: int = MAX_SEQUENCES
) -> DraftModelProposer:
    model = make_model(kind, noise=0.02)
    runner = make_runner(model, max_sequences, kind.startswith(OPENVINO))
    return DraftModelProposer(runner, max_sequences, MAX_DRAFT_LEN, reuses_prefixes=reuses_prefixes)


def expected_text(kind: str, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by Transformers alone, without any cache: one full pass a token."""
    model = make_model(kind)
    model.set_attn_implementation("eager")
    tokens = list(prompt)
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1, :VOCAB_SIZE]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def check_cache(model: CachedModel[Any]) -> None:
    """Blocks and sequences agree."""
    check_pool(model.pool)
    tables = {sequence: state.table for sequence, state in model._sequences.items()}
    assert tables == model.pool.tables, "a table without a sequence"


def check_pool(pool: BlockPool) -> None:
    """Each block is free, in the tree, or in one table alone; the counts of users are right."""
    nodes = [node for root in pool._roots.values() for node in behind(root)]
    users: dict[int, int] = {}
    own: list[int] = []
    for table in pool.tables.values():
        own += table.blocks[len(table.nodes) : table.num_blocks].tolist()
        for place, node in enumerate(table.nodes):
            assert table.blocks[place] == node.block
            users[id(node)] = users.get(id(node), 0) + 1
            if node.is_lost:
                own += [node.block] * (users[id(node)] == 1)
    held = [node.block for node in nodes] + own
    assert sorted([*held, *pool._free]) == list(range(pool._num_blocks)), "a block has no owner"
    assert all(node.num_users == users.get(id(node), 0) for node in nodes), "users are wrong"
    assert pool.num_shared == sum(num - 1 for num in users.values())
    if (states := pool._states) is not None:
        slots = [node.state for node in states._prefixes]
        assert set(states._prefixes) == {node for node in nodes if node.state is not None}
        slots += [slot for table in pool.tables.values() for slot in table.states.values()]
        assert len({*slots, *states._free}) == len([*slots, *states._free]), "a slot is used twice"
    rows = [table.row for table in pool.tables.values()]
    assert len(set(rows)) == len(rows), "two sequences have one row"


def behind(root: Any) -> list[Any]:
    """All nodes below this one."""
    assert root.keys == sorted(root.children)
    return [node for child in root.children.values() for node in (child, *behind(child))]
