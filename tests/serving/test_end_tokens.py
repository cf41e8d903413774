"""A model with several end tokens, served by the local engine: any of them ends a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from heads_served import MODEL, TINY, config_of

from smartspec_bench import texts
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.core.types import FinishReason, Verification
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.server import Server
from smartspec_testing.local import LocalSink, generate, serving

VOCABULARY = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
ENDS = (0, 5, VOCABULARY["Ġthe"])
"""The last is the token that texts meet first."""

MAX_TOKENS = 48
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "repetition_penalty": 1.2}]
TEXTS = [
    {"text": texts.prompt(workload, 1), "seed": 7, **sampling}
    for workload in ("tiny-qa", "tiny-sql", "tiny-chat")
    for sampling in SAMPLINGS
]


def texts_of(server: Server, **fields: Any) -> list[LocalSink]:
    return generate(server, [GenerateParams(**t, max_tokens=MAX_TOKENS, **fields) for t in TEXTS])


def test_a_text_ends_at_the_first_of_them(tmp_path: Path) -> None:
    """With each policy; texts by rejection depend on what was drafted. None is drawn before
    min_tokens."""
    for path in (MODEL).iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    engine = {"model": str(tmp_path), "draft": str(TINY / "draft"), "dtype": "auto"}
    config = config_of({"max_draft_len": 4}, device="cpu", **engine)
    policies = ("none", "fixed:4", "goodput")
    with serving(build_engine(config, tmp_path), config) as server:
        whole = texts_of(server, policy="none", end_id=-1)
        found = {policy: texts_of(server, policy=policy) for policy in policies}
        late = texts_of(server, min_tokens=30)
        rejected = texts_of(server, verification=Verification.REJECTION, policy="fixed:4")
    ends = set()
    for sinks in found.values():
        for sink, expected in zip(sinks, whole, strict=True):
            end = next((i for i, t in enumerate(expected.tokens) if t in ENDS), MAX_TOKENS)
            assert sink.tokens == expected.tokens[:end]
            assert sink.drawn == expected.tokens[: end + 1]
            ends |= set(expected.tokens[end : end + 1])
    assert ENDS[2] in ends, "the last of them was not put to the test"
    assert all(len(sink.tokens) >= 30 for sink in late)
    for sink in (*late, *rejected, *found["goodput"]):
        assert set(sink.tokens).isdisjoint(ENDS)
        assert (sink.finish_reason is FinishReason.STOP) == (sink.drawn[-1] in ENDS)
