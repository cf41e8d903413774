"""What is used of TensorRT-LLM, name by name, and whether it was recorded.

Run by `scripts/study contract`: the arguments that the adapter gives to the bindings' classes, the
members that a run over checked fakes touches, the flags of the four examples' commands, and the
keys of config.json that are read; each looked up in smartspec_trtllm/signatures.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import smartspec_trtllm
from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Decode, DraftTask, Prefill, TargetCapabilities, Verify
from smartspec_py.engines.trtllm.build import capabilities_of, executor_config
from smartspec_py.engines.trtllm.draft import TrtllmDraftProposer
from smartspec_py.engines.trtllm.engine_config import Engine, Role
from smartspec_py.engines.trtllm.engine_dir import Load, faults_of
from smartspec_py.engines.trtllm.memory import (
    activation_bytes,
    bytes_per_token,
    loaded_cache_tokens,
)
from smartspec_py.engines.trtllm.target import TrtllmTarget
from smartspec_py.serving.config import LimitsConfig, TrtllmEngineConfig
from smartspec_testing import fake_executor
from smartspec_testing.fake_executor import EngineLimits, Executor
from smartspec_trtllm.contract import ContractBindings, load_contract
from smartspec_trtllm.doctor_uses import adapter_uses
from studies.document import publish, table

GOLDEN = Path(__file__).parents[2] / "tests" / "trtllm" / "golden"
SIGNATURES = Path(smartspec_trtllm.__path__[0], "signatures.json")

TOOL = re.compile(r"(convert_checkpoint\.py|quantize\.py|trtllm-build)")


@dataclass(frozen=True)
class Use:
    """place: of what it is a part. name: as it is used."""

    place: str
    name: str
    is_recorded: bool


def main() -> None:
    document = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    uses = [*bindings(), *flags(document["cli"]), *keys(document["engine_dir"])]
    recorded = sum(use.is_recorded for use in uses)
    places = list(dict.fromkeys(use.place for use in uses))
    summary = [
        [place, len(of_place), sum(use.is_recorded for use in of_place)]
        for place in places
        if (of_place := [use for use in uses if use.place == place])
    ]
    lists = [
        f"**{place}**: "
        + ", ".join(
            f"`{use.name}`" + ("" if use.is_recorded else " (**not recorded**)")
            for use in uses
            if use.place == place
        )
        for place in places
    ]
    publish(
        Path(sys.argv[1]),
        "contract",
        "What is used of TensorRT-LLM, and whether it was recorded",
        [
            f"**{recorded} of {len(uses)} names are recorded: {recorded / len(uses):.0%}.** "
            "The record is `tools/smartspec_trtllm/signatures.json`, with the source of each "
            f"entry; it is of TensorRT-LLM {load_contract().version} as far as documents tell. "
            "`smartspec doctor` compares it with the real bindings.",
            table(["of", "used", "recorded"], summary),
            *lists,
        ],
        {"uses": [vars(use) for use in uses]},
    )


def bindings() -> list[Use]:
    known = load_contract().names
    used = touched() | adapter_uses().arguments
    return [Use("bindings", name, name in known) for name in sorted(used)]


def touched() -> frozenset[str]:
    """Of a run in which an executor is configured, the cache's size is asked for, prompts are read,
    drafts are verified and a burst is cancelled."""
    found = ContractBindings(fake_executor)
    config = TrtllmEngineConfig(kind="trtllm", target="", tokenizer="")
    executor_config(found, Engine(Role.DRAFT, Path(), {}, {}), 512, config)
    limits = EngineLimits()
    engine = Engine(Role.TARGET, Path(), {}, {})
    loaded_cache_tokens(found.checked(Executor(limits)), found, engine, limits.max_seq_len)
    target = TrtllmTarget(
        found.checked(Executor(limits)),
        found,
        TargetCapabilities(8, 512, 4, 8, None, False, vocab_size=limits.vocab_size),
    )
    draft = TrtllmDraftProposer(
        found.checked(Executor(limits)),
        found,
        max_draft_len=4,
        max_context_len=512,
        vocab_size=limits.vocab_size,
    )
    prompt, greedy = (3, 4), SamplingParams()
    target.begin(1, prompt, 2, greedy)
    target.submit([Prefill(1, prompt, 0, True)])
    (first,) = target.poll(1.0)
    (made,) = draft.propose([DraftTask(1, (*prompt, *first.tokens), 2, 3, greedy)])
    target.submit([Verify(1, made.tokens)])
    target.poll(1.0)
    target.submit([Decode(1, 8)])
    target.cancel(1)
    while not any(event.is_last for event in target.poll(1.0)):
        continue
    shaped = SamplingParams(
        temperature=0.7,
        presence_penalty=0.5,
        logit_bias=((5, 1.0),),
        bad_words=((6, 7),),
        log_probs=True,
    )
    target.begin(2, prompt, 2, shaped, reuses_prefix=False)
    target.submit([Prefill(2, prompt, 0, True)])
    target.poll(1.0)
    target.close()
    draft.close()
    return found.used()


def flags(cli: Mapping[str, Any]) -> list[Use]:
    """Of the commands of the four examples."""
    found = set()
    for path in sorted(GOLDEN.glob("*.txt")):
        for command in path.read_text(encoding="utf-8").split("# ")[1:]:
            name = TOOL.search(command)
            if name is None:
                continue
            family = "llama" if "llama" in command else "qwen"
            tool = name[1] if name[1] != "convert_checkpoint.py" else f"{name[1]} ({family})"
            found |= {(tool, flag) for flag in re.findall(r"^\s+(--\w+)", command, re.MULTILINE)}
    known = {tool: {flag["name"] for flag in entry["flags"]} for tool, entry in cli.items()}
    return [Use(tool, flag, flag in known.get(tool, ())) for tool, flag in sorted(found)]


def keys(engine_dir: Mapping[str, Any]) -> list[Use]:
    """That are read of an engine's config.json."""
    config = engine_dir["config_json"]
    pretrained, build = config["pretrained_config"], config["build_config"]
    known = {f"pretrained_config.{n}" for n in (*pretrained["required"], *pretrained["optional"])}
    known |= {f"build_config.{n}" for n in build["keys"]} | {"version"}
    plugins = build["plugin_config_keys_read_by_runtime"]
    known |= {f"build_config.plugin_config.{name}" for name in plugins}
    return [Use("config.json", name, name in known) for name in sorted(read_keys())]


class ReadEngine(Engine):
    """Keeps the keys that are read of its config.json."""

    keys: ClassVar[set[str]] = {"version"}

    def get(self, key: str) -> Any:
        self.keys.add(key)
        return super().get(key)


def read_keys() -> Iterable[str]:
    """Of two engines that are checked and whose memory is divided."""
    engines = {role: ReadEngine(role, Path(), {}, {}) for role in Role}
    list(faults_of(engines, Load(4, 8, 512, uses_logits=True)))
    for engine in engines.values():
        bytes_per_token(engine)
        activation_bytes(engine)
        capabilities_of(engine, LimitsConfig(), 16)
    return ReadEngine.keys


if __name__ == "__main__":
    main()
