"""A model with several end tokens, served by the PyTorch engine: any of them ends a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smartspec_bench.workloads import generate as make_document
from smartspec_py.config import DRAFT_MODEL, PROMPT_LOOKUP, ServerConfig
from smartspec_py.core.types import FinishReason, Verification
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_testing.local import LocalSink, generate

PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
VOCABULARY = json.loads((PAIR / "target" / "tokenizer.json").read_text())["model"]["vocab"]
THE = VOCABULARY["Ġthe"]
"""The end token that texts meet first."""

ENDS = (0, 5, THE)
MAX_TOKENS = 48
PROMPTS = [make_document(workload, 6_100_003, 1).prompt for workload in ("qa", "sql", "chat")]
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "repetition_penalty": 1.2}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of the tiny pair, whose target says that it has these end tokens."""
    folder = tmp_path_factory.mktemp("target")
    for path in (PAIR / "target").iterdir():
        if path.name != "generation_config.json":
            (folder / path.name).symlink_to(path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    engine = {"kind": "torch", "model": str(folder), "draft": str(PAIR / "draft")}
    config = ServerConfig.model_validate(
        {
            "engine": {**engine, "dtype": "float32", "num_threads": 1, "device": "cpu"},
            "limits": {"max_sequences": 4, "max_draft_len": 4, "max_context_len": 256},
        }
    )
    server = Server(build_engine(config, folder), config)
    server.start()
    yield server
    server.stop()


def texts_of(server: Server, **fields: Any) -> list[LocalSink]:
    texts = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
    params = [
        GenerateParams(prompt, MAX_TOKENS, seed=7 + i, **sampling, **fields)
        for i, (prompt, sampling) in enumerate(texts)
    ]
    return generate(server, params)


@pytest.fixture(scope="module")
def whole(server: Server) -> list[LocalSink]:
    """Without an end."""
    return texts_of(server, policy="none", end_id=-1)


@pytest.mark.parametrize(
    "how",
    [
        {"policy": "none"},
        {"policy": "fixed:4", "proposer": DRAFT_MODEL},
        {"policy": "goodput", "proposer": PROMPT_LOOKUP},
    ],
)
def test_a_text_ends_at_the_first_of_them(
    server: Server, whole: list[LocalSink], how: dict[str, Any]
) -> None:
    ends = set()
    for sink, expected in zip(texts_of(server, **how), whole, strict=True):
        end = next((i for i, t in enumerate(expected.tokens) if t in ENDS), MAX_TOKENS)
        assert sink.tokens == expected.tokens[:end]
        assert expected.text.startswith(sink.text)
        assert sink.drawn == expected.tokens[: end + 1]
        is_cut = end < MAX_TOKENS
        assert sink.finish_reason is (FinishReason.STOP if is_cut else FinishReason.LENGTH)
        ends |= set(expected.tokens[end : end + 1])
    assert THE in ends, "the last of them was not put to the test"


def test_none_is_drawn_before_min_tokens_and_rejection_ends_at_one_too(server: Server) -> None:
    for sink in texts_of(server, min_tokens=30):
        assert len(sink.tokens) >= 30
        assert set(sink.tokens).isdisjoint(ENDS)
    # Such texts depend on what was drafted, so that they have no reference.
    for sink in texts_of(server, verification=Verification.REJECTION, policy="fixed:4"):
        assert set(sink.tokens).isdisjoint(ENDS)
        assert (sink.finish_reason is FinishReason.STOP) == (sink.drawn[-1] in ENDS)
