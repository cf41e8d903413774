"""Values for the tensors of the contract, valid and invalid, drawn from its table."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from smartspec_py.api.contract import INPUTS
from smartspec_py.api.tensor_spec import OneOf, Range, TensorSpec, Text
from smartspec_py.constants import GUIDE_FIELDS

SPECS = {spec.name: spec for spec in INPUTS}
OPTIONAL = [spec.name for spec in INPUTS if spec.is_optional]
INT32_MAX = 2**31 - 1
NOT_UTF8 = b"\xff\xfe\xfd"
ALPHABET = "abc XYZ 019 .,\n\t\x00éß漢字🙂\u200d"


def valid_fields(rng: random.Random, names: list[str]) -> dict[str, Any]:
    """A value for each of the names, and for what they cannot be without. Nobody asks for an
    explanation: its answer is another. Prompts are texts, not tokens. There are no grammars."""
    others = ("explain_steps", "health_check", "input_ids", *GUIDE_FIELDS)
    names = [name for name in names if name not in others]
    fields = {name: valid_value(SPECS[name], rng) for name in names}
    if "embedding_bias_words" in fields or "embedding_bias_weights" in fields:
        words = [
            valid_element(SPECS["embedding_bias_words"], rng) for _ in range(rng.randint(1, 3))
        ]
        weights = [valid_element(SPECS["embedding_bias_weights"], rng) for _ in words]
        fields |= {"embedding_bias_words": words, "embedding_bias_weights": weights}
    return fields


def valid_value(spec: TensorSpec, rng: random.Random) -> Any:
    if not spec.is_list:
        return valid_element(spec, rng)
    size = rng.choice([1, 2, spec.max_elements])
    return [valid_element(spec, rng) for _ in range(size)]


def valid_element(spec: TensorSpec, rng: random.Random) -> Any:
    allowed = spec.allowed
    if isinstance(allowed, OneOf):
        return rng.choice(allowed.values)
    if isinstance(allowed, Text):
        return _text(rng, allowed.max_bytes)
    if isinstance(allowed, Range):
        return _number(rng, allowed, is_float=spec.dtype == "FP32")
    return {
        "STRING": lambda: _text(rng, 64),
        "BOOL": lambda: rng.random() < 0.5,
        "INT32": lambda: rng.randint(-INT32_MAX - 1, INT32_MAX),
        "UINT64": lambda: rng.choice([0, 1, 2**64 - 1, rng.getrandbits(64)]),
    }[spec.dtype]()


def _text(rng: random.Random, max_bytes: int) -> str:
    text = rng.choice("ab漢🙂")
    while rng.random() < 0.8:
        text += rng.choice(ALPHABET)
    return text if len(text.encode()) <= max_bytes else "x" * max_bytes


def _number(rng: random.Random, allowed: Range, is_float: bool) -> float:
    high = min(allowed.high, 1e6 if is_float else INT32_MAX)
    if not is_float:
        return rng.choice([int(allowed.low), int(high), rng.randint(int(allowed.low), int(high))])
    drawn = [allowed.low, high, rng.uniform(allowed.low, high), allowed.low + 1e-6]
    number = float(np.float32(rng.choice(drawn)))
    return number if allowed.holds(number) else high


def invalid_values(spec: TensorSpec) -> list[Any]:
    """Each is outside the table's range, and of the right type and number; [] where none is."""
    elements = _invalid_elements(spec)
    if not spec.is_list:
        return elements
    good = {"STRING": "word", "INT32": 1}.get(spec.dtype, 0.5)
    return [[good, bad] for bad in elements] + [[good] * (spec.max_elements + 1)]


def _invalid_elements(spec: TensorSpec) -> list[Any]:
    allowed = spec.allowed
    found: list[Any] = [NOT_UTF8] if spec.dtype == "STRING" else []
    if isinstance(allowed, Text):
        found += ["y" * (allowed.max_bytes + 1), *([] if allowed.may_be_empty else [""])]
    elif isinstance(allowed, OneOf):
        tried = {
            "STRING": ["nonsense", "NONE "],
            "BOOL": [True, False],
            "INT32": [-1, 0, 1, 2],
            "FP32": [-1.0, 0.5, math.nan],
        }
        found += [value for value in tried[spec.dtype] if not allowed.holds(value)]
    elif isinstance(allowed, Range) and spec.dtype == "FP32":
        high = [allowed.high * 1.001] if allowed.high < math.inf else []
        found += [*high, allowed.low - 0.5, math.nan, math.inf, -math.inf]
    elif isinstance(allowed, Range):
        high = [int(allowed.high) + 1, INT32_MAX] if allowed.high < math.inf else []
        found += [*high, int(allowed.low) - 1, -INT32_MAX - 1]
    return found
