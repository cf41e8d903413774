"""Required calls of a model whose tokenizer has `<tool_call>` as one token, with every policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from heads_served import MODEL, config_of, serving
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from smartspec_gateway.openai.apis.choices import text_of
from smartspec_gateway.openai.formats.call_grammar import CallFormat, call_grammar
from smartspec_gateway.openai.formats.reasoning import THINK, Start
from smartspec_gateway.openai.formats.reasoning_grammar import behind_reasoning
from smartspec_gateway.openai.formats.tools import ToolParser
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.core.types import GuideType
from smartspec_py.engines.tokenizer_file import MARKS
from smartspec_py.serving.server import Server
from smartspec_testing.local import generate

pytestmark = pytest.mark.slow

PLACE = {"type": "string", "enum": ["here", "there", "</tool_call>"]}
SCHEMA = {
    "type": "object",
    "properties": {"where": PLACE, "number": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["where", "number"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped target, with tokens for the marks: two special ones, two others."""
    folder = tmp_path_factory.mktemp("marks") / "target"
    shutil.copytree(MODEL, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS[:2]])
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS[2:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    tensors = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name][100 : 100 + len(MARKS)]])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] += len(MARKS)
    (folder / "config.json").write_text(json.dumps(config))
    with serving(config_of(model=str(folder), runtime="torch")) as found:
        yield found


def check_call(text: str) -> None:
    """It is one call that fits SCHEMA, and no other text."""
    parser = ToolParser({"find": {"where": ("string",), "number": ("integer",)}})
    found = parser.feed(text) + parser.finish()
    [call] = [part for part in found if not isinstance(part, str)]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["where"] in PLACE["enum"]
    assert 0 <= arguments["number"] <= 99
    assert not text_of(found).strip()


@pytest.mark.parametrize(
    ("call_format", "is_behind_thought"),
    [(CallFormat.HERMES, False), (CallFormat.PYTHON, False), (CallFormat.LLAMA, True)],
)
def test_required_calls_are_the_same_with_every_policy(
    server: Server, call_format: CallFormat, is_behind_thought: bool
) -> None:
    grammar = call_grammar([("find", SCHEMA)], call_format, may_repeat=False)
    if is_behind_thought:
        start = Start(THINK, "before")
        grammar = behind_reasoning("ebnf_grammar", grammar, "tools", start, end_is_token=True)[1]
    guide = {"guide_type": GuideType.EBNF_GRAMMAR, "guide": grammar}
    first = GenerateParams("Call it:", 120, temperature=0.9, **guide)
    texts = []
    for policy, proposer in (("none", None), ("fixed:5", "grammar"), ("goodput", None)):
        asked = replace(first, policy=policy, proposer=proposer)
        sinks = generate(server, [replace(asked, seed=seed) for seed in range(1, 5)], 60.0)
        assert [sink.error for sink in sinks] == [None] * 4
        texts.append([(sink.tokens, sink.text) for sink in sinks])
    assert texts[0] == texts[1] == texts[2]
    finished = [sink.text for sink in sinks if sink.finish_reason == "stop"]
    assert len(finished) >= 2
    for text in finished:
        assert text.startswith("<think>") <= is_behind_thought
        check_call(text.rpartition("</think>")[2].lstrip())
    if call_format is CallFormat.HERMES:
        number = server.intake._engine.tokenizer.token_to_id("<tool_call>")
        assert all(number in sink.tokens for sink in sinks if sink.finish_reason == "stop")
