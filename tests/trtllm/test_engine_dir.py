"""Engine directories that break one rule: the fault is found, and no other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from smartspec_py.config import LimitsConfig
from smartspec_py.engines.trtllm.engine_dir import EngineFiles, Role, faults_of, read_engine
from smartspec_py.faults import ConfigError

LIMITS = LimitsConfig(max_draft_len=7, max_sequences=64, max_context_len=1000)
NUM_TOKENS = 128_000
ABSENT = object()
BUILD = "build_config"
PLUGINS = f"{BUILD}.plugin_config"
MODE = f"{BUILD}.speculative_decoding_mode"
VOCAB = "pretrained_config.vocab_size"


def engine_config(role: str) -> dict[str, Any]:
    """As trtllm-build writes it, for 64 sequences of 1000 tokens and drafts of 7."""
    is_target = role == "target"
    length = 1007 if is_target else 1000
    return {
        "pretrained_config": {"vocab_size": 128_256},
        BUILD: {
            "max_input_len": length,
            "max_seq_len": length,
            "max_batch_size": 64,
            "max_num_tokens": 8192,
            "gather_context_logits": False,
            "max_draft_len": 7 if is_target else 0,
            "speculative_decoding_mode": 2 if is_target else 1,
            "plugin_config": {"use_paged_context_fmha": True},
        },
    }


def make_engine(role: str, changes: Mapping[str, Any]) -> EngineFiles:
    """changes: values by dotted key."""
    config = engine_config(role)
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = config
        for section in sections:
            place = place[section]
        place[name] = value
        if value is ABSENT:
            del place[name]
    return EngineFiles(Role(role), Path(), config)


def faults(
    target: Mapping[str, Any] = {},
    draft: Mapping[str, Any] = {},
    limits: LimitsConfig = LIMITS,
) -> list[str]:
    made = (make_engine("target", target), make_engine("draft", draft))
    engines = {engine.role: engine for engine in made}
    return list(faults_of(engines, limits, NUM_TOKENS))


VIOLATIONS = [
    ("target", MODE, 1, "--speculative_decoding_mode draft_tokens_external"),
    ("target", MODE, ABSENT, "--speculative_decoding_mode draft_tokens_external"),
    ("target", f"{BUILD}.max_draft_len", 6, "build_engines.sh --max-draft-len 7"),
    ("target", f"{BUILD}.max_draft_len", ABSENT, "--max-draft-len 7"),
    ("target", f"{BUILD}.max_input_len", 1006, "at least 1007"),
    ("target", f"{BUILD}.max_seq_len", 1006, "build_engines.sh --max-context-len 1000"),
    ("draft", f"{BUILD}.max_input_len", 999, "at least 1000"),
    ("draft", f"{BUILD}.max_seq_len", "1000", "at least 1000"),
    ("target", f"{BUILD}.max_num_tokens", 1006, "build_engines.sh --max-num-tokens 1007"),
    ("draft", f"{BUILD}.max_num_tokens", 999, "--max-num-tokens 1000"),
    *[
        (role, key, value, words)
        for role in ("target", "draft")
        for key, value, words in (
            (f"{BUILD}.max_batch_size", 63, "--max-batch-size 64"),
            (f"{BUILD}.gather_context_logits", True, "must be false"),
            (f"{PLUGINS}.use_paged_context_fmha", False, "must be true"),
        )
    ],
]


@pytest.mark.parametrize(("role", "key", "value", "words"), VIOLATIONS)
def test_each_violation_is_found_alone(role: str, key: str, value: Any, words: str) -> None:
    [found] = faults(**{role: {key: value}})
    assert found.startswith(f"engine.{role}: {key} ")
    assert words in found


def test_the_vocabularies_of_both_engines() -> None:
    assert faults() == []
    assert faults({VOCAB: 152_064}, {VOCAB: 151_936}) == []  # both have room for the tokenizer
    [found] = faults({VOCAB: 127_999})
    assert "vocab_size is 128256, must be 127999" in found


def test_the_draft_length_of_the_build_is_reserved() -> None:
    """1000 + 10: a request without drafts reserves all of max_draft_len. Without a limit, the
    longest sequence has 1007 - 7 tokens."""
    found = faults({f"{BUILD}.max_draft_len": 10})
    assert ["at least 1010" in one for one in found] == [True, True]
    unlimited = LIMITS.model_copy(update={"max_context_len": None})
    [short] = faults(draft={f"{BUILD}.max_seq_len": 999}, limits=unlimited)
    assert "at least 1000" in short


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ('{"model_type": "llama"}', "Hugging Face checkpoint (llama)"),
        ("{}", "has no rank0.engine"),
    ],
)
def test_a_directory_that_is_no_engine(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as raised:
        read_engine(Role.DRAFT, tmp_path)
    assert words in str(raised.value)


def test_a_config_of_other_types_has_faults(tmp_path: Path) -> None:
    text = json.dumps({"version": "1.2.1", "pretrained_config": [], BUILD: "x"})
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "rank0.engine").touch()
    engine = read_engine(Role.TARGET, tmp_path)
    assert list(faults_of({Role.TARGET: engine}, LIMITS, NUM_TOKENS))
