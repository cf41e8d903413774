"""The script's texts come out of the real target, with drafts and under a grammar."""

import json
from pathlib import Path

import pytest

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LimitsConfig, ServerConfig
from smartspec_py.core.types import FinishReason
from smartspec_py.serving.build import build_engine
from smartspec_testing.engines import ScriptedConfig
from smartspec_testing.local import generate, serving
from smartspec_testing.scripted import NO_RULE

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
RULES = [
    {"when": "weather", "write": ["Sunny and warm.", '{"sky": "blue"}']},
    {"when": "18 degrees", "write": ["one two three one two three one two three"]},
]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"sky": {"type": "string"}},
        "required": ["sky"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "rules.json"
    script.write_text(json.dumps(RULES))
    limits = LimitsConfig(max_sequences=2, max_context_len=256)
    engine = ScriptedConfig(kind="scripted", tokenizer=str(TOKENIZER), script=str(script))
    config = ServerConfig(engine=engine, limits=limits)
    with serving(build_engine(config, Path()), config) as server:
        yield server


@pytest.mark.parametrize("policy", ["none", "fixed:4"])
@pytest.mark.parametrize(
    ("prompt", "guide", "text"),
    [
        ("How is the weather?", {}, RULES[0]["write"][0]),
        ("weather: 18 degrees", {}, RULES[1]["write"][0]),
        ("18 degrees. The weather?", {}, RULES[0]["write"][0]),
        ("weather", {"guide_type": "json_schema", "guide": SCHEMA}, RULES[0]["write"][1]),
        ("anything else", {}, NO_RULE),
    ],
)
def test_it_writes_what_the_rule_says(server, policy, prompt, guide, text):
    params = GenerateParams(prompt, 64, policy=policy, temperature=1.0, seed=3, **guide)
    [sink] = generate(server, [params])
    assert (sink.text, sink.finish_reason) == (text, FinishReason.STOP)
