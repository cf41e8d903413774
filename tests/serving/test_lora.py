"""LoRA adapters served: the shipped pair with random ones, all in one batch, with drafts and
without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapter_files import random_adapter, random_adapters, write_adapter
from heads_served import MODEL, TINY, config_of, serving

from smartspec_bench import texts
from smartspec_bench.exactness import force_drafting, reference
from smartspec_bench.merged import merged_differences
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LocalEngineConfig, ServerConfig
from smartspec_py.engines.checkpoints.adapters import Adapters, linear_layers
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.faults import ConfigError
from smartspec_py.serving.build import build_engine
from smartspec_testing.local import LocalSink, generate

pytestmark = pytest.mark.slow  # so that they run beside the others

RUNTIMES = ("openvino", "torch")
NAMES = ("a", "b", "c", "d")


def adapters() -> Adapters:
    return random_adapters(linear_layers(load_config(MODEL, 256)), (8, 16, 32, 64))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, found = tmp_path_factory.mktemp("adapters"), adapters()._adapters
    return {one.name: str(write_adapter(folder / one.name, one)) for one in found}


def requests(names: Sequence[str | None] = (None, *NAMES), **fields: Any) -> list[GenerateParams]:
    """Each prompt with each adapter, so that prompts begin alike."""
    return [
        GenerateParams(
            texts.prompt(workload, 3), 16, seed=9, temperature=temperature, adapter=name, **fields
        )
        for workload in texts.TINY[:2]
        for temperature in (0.0, 0.8)
        for name in names
    ]


def tokens_of(sinks: Sequence[LocalSink]) -> list[list[int]]:
    return [sink.tokens for sink in sinks]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_texts_depend_on_their_own_adapter_only(folders: dict[str, str], runtime: str) -> None:
    """Alone and without drafts, and all together with drafts, some of them accepted."""
    config = config_of(lora=folders, draft=str(TINY / "draft"), runtime=runtime)
    asked = requests()[:10]
    with serving(config) as server:
        force_drafting(server, config)
        alone = [generate(server, [replace(one, policy="none")])[0] for one in asked]
        mixed = {policy: generate(server, asked_for(asked, policy)) for policy in POLICIES}
    for sinks in (alone, *mixed.values()):
        assert [sink.error for sink in sinks] == [None] * len(asked)
    for sinks in mixed.values():
        assert tokens_of(sinks) == tokens_of(alone)
    drafted = [sink for sink in mixed["fixed:3"] if sink.progress.num_accepted]
    assert drafted, "drafts of the model without adapters are accepted now and then"
    texts_of_first = {tuple(tokens) for tokens in tokens_of(alone[:5])}
    assert len(texts_of_first) == 5, "each adapter changes the text"


def test_a_prefix_is_reused_for_the_same_adapter_only(folders: dict[str, str]) -> None:
    """One after the other. All of a repeated prompt but its last token is reused, also after others
    with other adapters."""
    config = config_of(lora=folders)
    asked = requests()
    with serving(config) as server:
        found = [generate(server, [asked[i]])[0] for i in (0, 0, 1, 1, 2, 0, 1)]
        num_prompt = found[0].last.num_input_tokens
    assert [sink.progress.num_cached for sink in found] == [
        *(0, num_prompt - 1, 0, num_prompt - 1, 0, num_prompt - 1, num_prompt - 1)
    ]
    assert found[1].tokens == found[0].tokens == found[5].tokens
    assert found[3].tokens == found[2].tokens == found[6].tokens


POLICIES = ("none", "fixed:3", "goodput")


def asked_for(asked: Sequence[GenerateParams], policy: str) -> list[GenerateParams]:
    return [replace(one, policy=policy) for one in asked]


def test_the_check_compares_with_the_merged_model(tmp_path: Path, folders: dict[str, str]) -> None:
    """Here the adapter b is also compared with a merged model of twice its scale."""
    twice = write_adapter(tmp_path / "twice", adapters()._adapters[1], lora_alpha=32)
    config = config_of(lora=folders)
    with serving(config, engine := build_engine(config, Path.cwd())) as server:
        cases = reference(server, requests(["b"], return_log_probs=True))
    for folder, least, most in ((folders["b"], 0.0, 1e-3), (str(twice), 0.1, 100.0)):
        asked = LocalEngineConfig(model=str(MODEL), lora={"b": folder})
        [difference] = merged_differences(asked, engine, cases).values()
        assert least < difference < most


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights(folders: dict[str, str], weights: str) -> None:
    """Texts do not depend on the batch, and adapters change them."""
    config = config_of(lora=folders, weights=weights)
    asked = requests((None, "a", "d"), return_log_probs=True)[:6]
    with serving(config) as server:
        alone = [generate(server, [one])[0] for one in asked]
        together = generate(server, asked)
    assert [sink.log_probs for sink in together] == [sink.log_probs for sink in alone]
    assert len({tuple(tokens) for tokens in tokens_of(alone[:3])}) == 3


def test_heads_draft_for_adapters(folders: dict[str, str]) -> None:
    """And their acceptance is learned for each adapter."""
    config = config_of(lora=folders, heads=str(TINY / "heads"))
    asked = requests((None, "a", "d"))
    with serving(config) as server:
        plain = generate(server, asked_for(asked, "none"))
        drafted = generate(server, asked_for(asked, "fixed:3"))
    assert tokens_of(drafted) == tokens_of(plain)
    assert sum(sink.progress.num_accepted for sink in drafted) > 0
    learned = server.loop.state()["speculation"]["acceptance"]["heads"]["groups"]
    assert {"greedy", "adapter a, greedy"} <= set(learned)


def test_the_profile_belongs_to_the_adapters(tmp_path: Path, folders: dict[str, str]) -> None:
    """It has the costs of passes with them, and their acceptance."""
    paths = []
    of_a = folders["a"]
    for lora in ({"a": of_a}, {"other": of_a}, {"a": folders["b"]}):
        config = config_of(lora=lora, profile_cache=str(tmp_path / "profiles"))
        engine = build_engine(config, Path.cwd())
        engine.target.close()
        paths.append(engine.profile_path)
    assert len(set(paths)) == 3


def test_a_wrong_adapter_is_named(tmp_path: Path, folders: dict[str, str]) -> None:
    shapes = {"model.layers.0.self_attn.q_proj": (4, 4)}
    wrong = write_adapter(tmp_path / "wrong", random_adapter("x", shapes, 2))
    config = config_of(lora={"ok": folders["a"], "sql": str(wrong)})
    with pytest.raises(ConfigError, match=r"engine\.json: engine\.lora\.sql: .*wrong has the tens"):
        build_engine(config, Path.cwd())
    many = [random_adapter(f"{i}", linear_layers(load_config(MODEL, 256)), 200) for i in range(3)]
    lora = {f"a{one.name}": str(write_adapter(tmp_path / one.name, one)) for one in many}
    with pytest.raises(ConfigError, match=r"engine\.json: engine\.lora: the LoRA adapters have"):
        build_engine(config_of(lora=lora), Path.cwd())


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"smartspec": "x"}, "the name 'smartspec' must be 1 to 64 letters, .* not be smartspec"),
        ({"a/b": "x"}, "the name 'a/b' must be"),
        ({f"a{i}": "x" for i in range(17)}, "at most 16 items"),
        ({"a": 3}, "valid string"),
    ],
)
def test_names_of_adapters(lora: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerConfig.model_validate({"engine": {"kind": "local", "model": "m", "lora": lora}})
