"""config.pbtxt and docs/reference/tensors.md are written from the contract's table: those in the
repository are that, ranges word what they check, and refusals say what would do instead."""

import math
from pathlib import Path
from typing import Any

import pytest

from smartspec_launch.pbtxt import config_pbtxt
from smartspec_py.api.contract import INPUTS, MODEL_NAME, OUTPUTS
from smartspec_py.api.errors import field_of, field_text
from smartspec_py.api.refused import REFUSED, why_refused
from smartspec_py.api.tensor_spec import NUMPY_TYPES, Allowed, OneOf, Range, Text
from smartspec_py.config import CONFIG_NAME, LocalEngineConfig, read_config

REPOSITORY = Path(__file__).parents[2]
CONFIG_FILE = REPOSITORY / "model_repository/smartspec/config.pbtxt"
NAMES = tuple(spec.name for spec in INPUTS)


def test_names_are_unique_and_explained() -> None:
    for specs in (INPUTS, OUTPUTS):
        assert len({spec.name for spec in specs}) == len(specs)
        assert all(spec.meaning and spec.dtype in NUMPY_TYPES for spec in specs)
    assert not set(REFUSED) & set(NAMES)
    renamed = [why for why in REFUSED.values() if why.startswith("unknown; use ")]
    assert {why.removeprefix("unknown; use ") for why in renamed} <= set(NAMES)
    assert all(spec.max_elements for spec in INPUTS if spec.is_list)
    assert [spec.name for spec in INPUTS if not spec.is_optional] == ["text_input", "max_tokens"]


@pytest.mark.parametrize(
    ("name", "dtype", "dims", "text"),
    [
        ("text_input", "STRING", (1,), ""),
        ("input_ids", "INT32", (-1,), "at least 0"),
        ("stream", "BOOL", (1,), ""),
        ("tpot_slo_ms", "FP32", (1,), "in [0.001, 3.6e+06]"),
        ("seed", "UINT64", (1,), ""),
        ("bad_words", "STRING", (-1,), "at least one character and at most 1024 bytes"),
        ("verification", "STRING", (1,), "coupled or rejection"),
    ],
)
def test_tensors_follow_from_the_types_of_fields(
    name: str, dtype: str, dims: tuple[int, ...], text: str
) -> None:
    (spec,) = [spec for spec in INPUTS if spec.name == name]
    assert (spec.dtype, spec.dims, spec.allowed.text) == (dtype, dims, text)


RANGES: list[tuple[Allowed, str, list[Any], list[Any]]] = [
    (Range(1), "at least 1", [1, 2**31 - 1], [0, -5]),
    (Range(0, note="0: off"), "at least 0 (0: off)", [0], [-1]),
    (Range(-100, 100), "in -100..100", [-100, 100], [-101, 101]),
    (Range(0.0), "finite and at least 0", [0.0, 1e30], [-1e-9, math.inf, math.nan]),
    (Range(0.0, 1.0), "in [0, 1]", [0.0, 1.0], [1.0001, -0.1, math.nan]),
    (OneOf((1,), "no more"), "1 (no more)", [1], [0, 2]),
    (OneOf((0.0, 1.0)), "0 or 1", [0.0, 1.0], [0.5, math.nan]),
    (OneOf((False,)), "false", [False], [True]),
    (OneOf(("",)), "empty", [""], ["a"]),
    (OneOf(("a", "b", "c")), "a or b or c", ["b"], ["d", "A"]),
    (Allowed(), "", ["", "a", 0], []),
    (Text(3), "at least one character and at most 3 bytes", ["abc", "漢"], ["", "abcd", "é漢"]),
]


@pytest.mark.parametrize(
    ("allowed", "text", "good", "bad"), RANGES, ids=lambda item: str(item)[:24]
)
def test_ranges_word_what_they_check(
    allowed: Allowed, text: str, good: list[Any], bad: list[Any]
) -> None:
    """In UTF-8 漢 has three bytes and é two."""
    assert allowed.text == text
    assert all(allowed.holds(value) for value in good)
    assert not any(allowed.holds(value) for value in bad)


REFUSALS = [
    ("lora_weights", "lora_weights: not supported"),
    ("lora_task_id", "lora_task_id: unknown; use lora_name"),
    ("max_new_tokens", "max_new_tokens: unknown; use max_tokens"),
    ("top_k", "top_k: send it as a tensor (in JSON: a top-level key), not as a parameter"),
    ("temprature", "unknown parameter 'temprature': did you mean temperature?"),
    ("zzz", f"unknown parameter 'zzz': see the {len(NAMES)} input tensors"),
    ("x" * 10**6, "unknown parameter 'xxxx"),
]


@pytest.mark.parametrize(("name", "start"), REFUSALS, ids=lambda text: text[:20])
def test_refusals_say_why_or_what_instead(name: str, start: str) -> None:
    message = why_refused(name, 0, NAMES)
    assert message is not None
    assert message.startswith(start)
    assert len(message) < 300


def test_false_turns_off_what_is_not_supported() -> None:
    assert why_refused("early_stopping", False, NAMES) is None
    assert why_refused("best_of", False, NAMES), "an unknown name"


def test_the_file_in_the_repository_is_this_one() -> None:
    """Names and shapes only: the lines in between that start with # may say what they like."""
    lines = CONFIG_FILE.read_text(encoding="utf-8").splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("#")) == config_pbtxt()


def test_the_shipped_engine_json_is_valid_and_its_models_are_there() -> None:
    """Paths in it are relative to its own folder."""
    folder = REPOSITORY / "model_repository" / MODEL_NAME / "1"
    config = read_config(folder / CONFIG_NAME)
    assert isinstance(config.engine, LocalEngineConfig)
    assert config.engine.draft is not None
    for model in (config.engine.model, config.engine.draft):
        assert (folder / model / "model.safetensors").is_file()


def test_the_field_of_an_error_is_found_again() -> None:
    """The reason may have any text, also one that looks like another field."""
    text = field_text("max_tokens", "must be left out: seed: 1")
    assert field_of(text) == ("max_tokens", "must be left out: seed: 1")
    for other in ("the queue is full", "RuntimeError: seed: 1", "max_tokens"):
        assert field_of(other) == ("", other)
