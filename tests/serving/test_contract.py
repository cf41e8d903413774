"""config.pbtxt and docs/reference/tensors.md are written from the contract's table: those in the
repository are that, ranges word what they check, and refusals say what would do instead."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from smartspec_cli.reference import inputs, outputs
from smartspec_launch.pbtxt import config_pbtxt
from smartspec_py.api.contract import INPUTS, MODEL_NAME, OUTPUTS
from smartspec_py.api.inputs import FIELDS
from smartspec_py.api.refused import RENAMED, UNSUPPORTED, asks_for_nothing, why_refused
from smartspec_py.api.tensor_spec import NUMPY_TYPES, Allowed, Choice, Range, TensorSpec, Text
from smartspec_py.config import CONFIG_NAME, TorchEngineConfig, read_config
from smartspec_py.serving.request import GenerateParams

REPOSITORY = Path(__file__).parents[2]
CONFIG_FILE = REPOSITORY / "model_repository/smartspec/config.pbtxt"
NAMES = tuple(spec.name for spec in INPUTS)

TENSOR = re.compile(
    r'\{ name: "(?P<name>\w+)", data_type: TYPE_(?P<dtype>\w+), dims: \[ (?P<dims>[-\d, ]+) \]'
    r"(?P<optional>, optional: true)? \}"
)


def tensors(heading: str) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """(name, type, dims, is optional) of every tensor under the heading."""
    section = re.search(rf"^{heading} \[\n(.*?)\n\]$", config_pbtxt(), re.DOTALL | re.MULTILINE)
    assert section is not None
    lines = section[1].split(",\n")
    found = [TENSOR.fullmatch(line.strip()) for line in lines]
    assert None not in found, lines
    return [
        (m["name"], m["dtype"], tuple(map(int, m["dims"].split(","))), bool(m["optional"]))
        for m in found
        if m
    ]


def table(
    specs: tuple[TensorSpec, ...], is_input: bool
) -> list[tuple[str, str, tuple[int, ...], bool]]:
    return [(s.name, s.dtype, s.dims, is_input and s.is_optional) for s in specs]


def test_every_tensor_of_the_table_is_there_in_order() -> None:
    assert tensors("input") == table(INPUTS, is_input=True)
    assert tensors("output") == table(OUTPUTS, is_input=False)


def test_names_are_those_of_tensorrt_llm_clients() -> None:
    inputs = {spec.name: spec for spec in INPUTS}
    required = {name for name, spec in inputs.items() if not spec.is_optional}
    assert required == {"text_input", "max_tokens"}
    assert {"stream", "temperature", "top_k", "top_p", "random_seed", "stop_words"} <= set(inputs)
    assert inputs["stop_words"].dims == (-1,)
    assert OUTPUTS[0].name == "text_output"


def test_names_are_unique_and_explained() -> None:
    for specs in (INPUTS, OUTPUTS):
        assert len({spec.name for spec in specs}) == len(specs)
        assert all(spec.meaning and spec.dtype in NUMPY_TYPES for spec in specs)
    assert not {*UNSUPPORTED, *RENAMED} & set(NAMES)
    assert not set(UNSUPPORTED) & set(RENAMED)
    assert set(RENAMED.values()) <= set(NAMES)


def test_every_field_of_a_request_has_its_tensor_and_default() -> None:
    """Only the two seeds share a field; what has no default of its own says one in words."""
    fields = {field.name: field.default for field in dataclasses.fields(GenerateParams)}
    assert set(FIELDS.values()) == set(fields)
    assert len(FIELDS) == len(fields) + 1
    for spec in INPUTS:
        if spec.is_optional and spec.name in FIELDS:
            assert bool(spec.default) == (fields[FIELDS[spec.name]] is None), spec.name


def test_lists_have_a_limit() -> None:
    assert all(spec.max_elements for spec in INPUTS if spec.is_list)


RANGES: list[tuple[Allowed, str, list[Any], list[Any]]] = [
    (Range(1), "at least 1", [1, 2**31 - 1], [0, -5]),
    (Range(0, note="0: off"), "at least 0 (0: off)", [0], [-1]),
    (Range(-100, 100), "in -100..100", [-100, 100], [-101, 101]),
    (Range(0.0), "finite and at least 0", [0.0, 1e30], [-1e-9, math.inf, math.nan]),
    (Range(0.0, 1.0), "in [0, 1]", [0.0, 1.0], [1.0001, -0.1, math.nan]),
    (Choice((1,), "no more"), "1 (no more)", [1], [0, 2]),
    (Choice((0.0, 1.0)), "0 or 1", [0.0, 1.0], [0.5, math.nan]),
    (Choice((False,)), "false", [False], [True]),
    (Choice(("",)), "empty", [""], ["a"]),
    (Choice(("a", "b", "c")), "a, b or c", ["b"], ["d", "A"]),
    (Text(), "at least one character", ["a" * 9999], [""]),
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
    ("lora_task_id", "lora_task_id: LoRA is not supported"),
    ("early_stopping", "early_stopping: beam search is not supported"),
    ("max_new_tokens", "max_new_tokens: unknown; use max_tokens"),
    ("top_k", "top_k: send it as a tensor (in JSON: a top-level key), not as a parameter"),
    ("temprature", "unknown parameter 'temprature': did you mean temperature?"),
    ("zzz", f"unknown parameter 'zzz': see the {len(NAMES)} input tensors"),
    ("x" * 10**6, "unknown parameter 'xxxx"),
]


@pytest.mark.parametrize(("name", "start"), REFUSALS, ids=lambda text: text[:20])
def test_refusals_say_why_or_what_instead(name: str, start: str) -> None:
    message = why_refused(name, NAMES)
    assert message.startswith(start)
    assert len(message) < 300


def test_false_asks_for_nothing() -> None:
    """But 0 is the number of a LoRA, and an unknown name is refused whatever it says."""
    assert asks_for_nothing("early_stopping", False)
    assert not asks_for_nothing("early_stopping", True)
    assert not asks_for_nothing("lora_task_id", 0)
    assert not asks_for_nothing("best_of", False)


def test_one_decoupled_instance_with_batches_of_one() -> None:
    text = config_pbtxt("another")
    assert text.startswith('name: "another"\nbackend: "smartspec_py"\nmax_batch_size: 1\n')
    assert "model_transaction_policy { decoupled: true }" in text
    assert "instance_group [ { count: 1, kind: KIND_CPU } ]" in text


def test_brackets_are_balanced() -> None:
    text = config_pbtxt()
    for opening, closing in ("[]", "{}"):
        assert text.count(opening) == text.count(closing)


def test_the_file_in_the_repository_is_this_one() -> None:
    """Names and shapes only: the lines in between that start with # may say what they like."""
    lines = CONFIG_FILE.read_text(encoding="utf-8").splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("#")) == config_pbtxt()


def test_the_page_has_every_tensor_with_range_and_default() -> None:
    rows = [line for line in (inputs() + outputs()).splitlines() if line.startswith("| `")]
    for spec in INPUTS:
        row = next(row for row in rows if row.startswith(f"| `{spec.name}` | {spec.dtype} "))
        assert spec.allowed.text in row
        assert spec.default in row
    for spec in OUTPUTS:
        assert any(row.startswith(f"| `{spec.name}` | {spec.dtype} ") for row in rows)
    inputs = [row.split(" | ") for row in rows if row.count(" | ") == 5]
    defaults = {name.strip("| `"): default for name, _, _, _, default, _ in inputs}
    assert defaults["top_k"] == "0"
    assert defaults["top_p"] == "1"
    assert defaults["bad_words"] == "none"
    assert defaults["verification"] == "coupled"
    assert defaults["max_tokens"] == "required"


def test_the_shipped_engine_json_is_valid_and_its_models_are_there() -> None:
    """Paths in it are relative to its own folder."""
    folder = REPOSITORY / "model_repository" / MODEL_NAME / "1"
    config = read_config(folder / CONFIG_NAME)
    assert isinstance(config.engine, TorchEngineConfig)
    assert config.engine.draft is not None
    for model in (config.engine.model, config.engine.draft):
        assert (folder / model / "model.safetensors").is_file()
