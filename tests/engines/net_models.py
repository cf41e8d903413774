"""What the tests of models with gated delta nets and of heads share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.constants import HEADS
from smartspec_testing.local import LocalSink, generate

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "pad_token_id": 0,
    "eos_token_id": 0,
}


def tokens_of(sinks: list[LocalSink]) -> list[list[int]]:
    assert [sink.error for sink in sinks] == [None] * len(sinks)
    return [sink.tokens for sink in sinks]


def check_texts(
    server: Any, asked: Sequence[GenerateParams], longest: str, least_accepted: int
) -> None:
    """Texts do not depend on drafts of the heads, most of which are accepted: all at once, and in a
    second turn of the last one, whose first tokens are cached. asked: with the policy none.
    longest: another policy. least_accepted: tokens of the second turn."""
    expected = tokens_of(generate(server, asked))
    for policy, proposer in (("fixed:3", HEADS), (longest, HEADS), ("goodput", None)):
        found = generate(server, [replace(one, policy=policy, proposer=proposer) for one in asked])
        assert tokens_of(found) == expected
        if proposer == HEADS:
            drafted, accepted = (
                sum(getattr(sink.progress, f"num_{what}") for sink in found)
                for what in ("drafted", "accepted")
            )
            assert accepted > 0.5 * drafted > 50
    following = replace(asked[-1], text=asked[-1].text + " And so on.", policy="fixed:3")
    [again] = generate(server, [replace(following, proposer=HEADS)])
    assert again.progress.num_cached > 100
    assert again.progress.num_accepted > least_accepted
    [alone] = generate(server, [replace(following, policy="none", reuse_prefix=False)])
    assert again.tokens == alone.tokens
