"""The local engine against Transformers itself, token by token.

The reference computes every token by a full pass without cache and with Transformers' own
attention, so it shares neither the packing, nor the rows, nor the mask with what is tested.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from local_models import (
    MAX_LEN,
    OPENVINO,
    VOCAB_SIZE,
    check_cache,
    expected_text,
    make_model,
    make_proposer,
    make_runner,
    make_target,
    poll,
)
from step_driver import GREEDY, NUM_TOKENS, Driver, prompts
from transformers import AutoModelForCausalLM, LlamaConfig

from smartspec_py.engines.base import Prefill, SequenceStart, Verify
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.runtimes.pytorch.causal import PyTorchRunner
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig

pytestmark = pytest.mark.slow  # so that they run beside the others

KINDS = [
    *("llama, grouped keys", "qwen2, one key head", "gemma2, window 11"),
    *(OPENVINO + kind for kind in ("qwen2, one key head", "mistral, window 11")),
]
"""Different layouts. `test_model_types` has all types."""


@pytest.mark.parametrize(
    ("kind", "is_asynchronous"), [*((kind, False) for kind in KINDS), (KINDS[0], True)]
)
def test_text_is_that_of_transformers(
    kind: str, is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine sequences through five rows, joining and leaving between steps, drafts of 0 to 6. If
    passes are asynchronous, drafts stay on the device until they are verified."""
    monkeypatch.setattr(PyTorchRunner, "is_asynchronous", is_asynchronous)
    todo = list(enumerate(prompts(9, seed=1)))
    texts = dict(todo)
    driver = Driver(make_target(kind), make_proposer(kind), seed=2)
    done = {}
    while todo or driver.tokens:
        while todo and len(driver.tokens) < 5:
            driver.begin(*todo.pop(0))
        driver.step()
        for sequence in list(driver.tokens):
            if len(driver.tokens[sequence]) >= len(texts[sequence]) + NUM_TOKENS:
                done[sequence] = driver.end(sequence)
    for sequence, prompt in texts.items():
        generated = done[sequence][len(prompt) :][:NUM_TOKENS]
        assert generated == expected_text(kind, prompt, NUM_TOKENS), f"sequence {sequence}"
    assert driver.num_accepted > 20, "the draft must be right often enough to test acceptance"
    check_cache(driver.target)
    check_cache(driver.proposer)


def test_a_pass_can_be_timed_in_any_room() -> None:
    """Rows of 96 tokens: asked for more, the pass is as long as the row."""
    target = make_target("llama")
    for tokens, context_len in ((1, 0), (64, 90), (96, 96), (200, 10)):
        assert target.time_pass(2, tokens, context_len) > 0


@pytest.mark.parametrize("kv_cache", ["auto", "u8"])
def test_timed_passes_write_the_memory_that_they_read(kv_cache: str) -> None:
    """Pages that were never written are one page, which would be in the processor's caches."""
    runner = make_runner(make_model("llama"), with_openvino=True, kv_cache=kv_cache)
    tensors = [tensor.data for tensor in runner.cache.tensors.values()]
    for data in tensors:
        data[:] = 1
    runner.time_pass(2, 1, 40)  # of the four blocks of 32 tokens of each row, it reads two
    for data in tensors:
        assert [bool(block.any()) for block in data[[0, 2, 4, 6]]] == [False, True, False, True]
    runner.release()
    assert not any(data.any() for data in tensors)
    for data in tensors:
        data[6:9] = 1
    runner.cache.copy_block(7, 1, 20)
    runner.cache.clear([6, 8])
    for data in tensors:
        assert [bool(block.all()) for block in data[:3]] == [False, True, False]
        assert [bool(block.any()) for block in data[6:9]] == [False, True, False]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_openvino_in_bfloat16_with_any_number_of_threads(num_threads: int) -> None:
    """Where the processor has AMX the MLP is one operator, which one thread cannot compute: it ends
    the process. Hidden layers are of the sizes that it takes."""
    from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB_SIZE,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = [(7 * i) % VOCAB_SIZE for i in range(70)]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]

    own = RunnerConfig(Path(), torch.device("cpu"), torch.bfloat16, 2, 128, VOCAB_SIZE)
    made = OpenVinoRunner(model, replace(own, num_threads=num_threads))
    found = made.forward([RowInput(1, 0, tokens, 1)]).logits[0]
    torch.testing.assert_close(found, expected, atol=0.05 * float(expected.abs().max()), rtol=0.0)


def test_drafts_may_fill_the_row() -> None:
    target = make_target("llama")
    prompt = [5] * (MAX_LEN - 6)
    first, *drafts = expected_text("llama", prompt, 6)
    target.begin(SequenceStart(1, prompt, len(prompt), GREEDY))
    [event] = poll(target, Prefill(1, tuple(prompt), 0, True))
    assert event.tokens == (first,)
    [event] = poll(target, Verify(1, Draft(tuple(drafts))))
    assert event.tokens[:-1] == tuple(drafts)
