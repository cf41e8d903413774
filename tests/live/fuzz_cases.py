"""One request of the fuzz client: what is sent, by which way, and what must come back."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from fuzz_values import (
    INT32_MAX,
    NOT_UTF8,
    OPTIONAL,
    SERVED,
    SPECS,
    invalid_values,
    valid_fields,
    valid_value,
)

from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.api.refused import RENAMED, UNSUPPORTED

REQUIRED = ["text_input", "max_tokens"]
UNKNOWN = ["no_such_name", "temprature", "漢字", "k" * 5000]
HUGE = 500_000
TOO_LARGE = {"body", "RESOURCE_EXHAUSTED"}
"""Words of the errors for a request that is too large."""

RESERVED = ("priority", "timeout")
"""Of these gRPC clients make fields of Triton's own, which the backend never sees."""


class Way(StrEnum):
    GENERATE = "generate"
    STREAM = "generate_stream"
    GRPC = "grpc"


class Kind(StrEnum):
    VALID = "valid"
    LEAVES = "leaves"  # valid, but the client goes away after the first response
    OUT_OF_RANGE = "out_of_range"
    TOGETHER = "together"  # each field is valid, but not with the other
    HUGE = "huge"
    NAME = "name"  # unknown, or not supported
    MISSING = "missing"  # without one required tensor, or without both
    WRONG_TYPE = "wrong_type"  # refused by Triton itself
    WRONG_COUNT = "wrong_count"  # refused by Triton itself
    MALFORMED = "malformed"  # JSON that is none; refused by Triton itself


WEIGHTS = {
    Kind.VALID: 40,
    Kind.LEAVES: 5,
    Kind.OUT_OF_RANGE: 25,
    Kind.TOGETHER: 4,
    Kind.HUGE: 1,
    Kind.NAME: 8,
    Kind.MISSING: 8,
    Kind.WRONG_TYPE: 8,
    Kind.WRONG_COUNT: 6,
    Kind.MALFORMED: 3,
}

PARSER_KINDS = (Kind.WRONG_TYPE, Kind.MALFORMED)
"""Over HTTP Triton 2.51 may answer 500 to these, and does not name the field."""


@dataclass(frozen=True)
class Case:
    """named: what the error must say; empty where any error will do.

    dtypes: of gRPC tensors that are not of the table's type. parameters: over gRPC.
    body: over HTTP instead of the fields. model: by which of its names the model is asked.
    """

    way: Way
    kind: Kind
    fields: dict[str, Any]
    named: str = ""
    dtypes: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    model: str = MODEL_NAME

    @property
    def is_served(self) -> bool:
        return self.kind in (Kind.VALID, Kind.LEAVES)

    def json_body(self) -> bytes:
        if self.body is not None:
            return self.body
        # Bytes that are no UTF-8 go into the body as they are.
        text = json.dumps(_escaped(self.fields), ensure_ascii=False)
        return text.encode("utf-8", "surrogateescape")


@dataclass
class Answer:
    """status: of HTTP; 0 over gRPC. pieces: of each response, its finish_reason."""

    status: int = 0
    reasons: list[str] = field(default_factory=list)
    error: str = ""


def find_problem(case: Case, answer: Answer) -> str:
    """What is wrong with the answer; empty where nothing is."""
    if case.kind is Kind.LEAVES:
        return "" if answer.reasons else f"no first response (status {answer.status})"
    if case.is_served:
        return _problem_of_served(answer)
    if not answer.error:
        return f"was served: {answer.reasons[-1:]}"
    if any(answer.reasons):
        return "an error and a last response"
    if TOO_LARGE & set(re.findall(r"\w+", answer.error)) and "must be at most" in answer.error:
        return ""  # the gateway refused it whole, before it looked at fields
    if answer.status >= 500 and case.kind not in PARSER_KINDS:
        return f"status {answer.status}"
    if case.named and case.named not in answer.error:
        return "the error does not name the field"
    return ""


def _problem_of_served(answer: Answer) -> str:
    if answer.error:
        return f"refused, status {answer.status}"
    num_last = sum(bool(reason) for reason in answer.reasons)
    if num_last != 1:
        return f"{num_last} last responses"
    return "" if answer.reasons[-1] else "responses after the last"


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def make_case(rng: random.Random, models: Sequence[str] = (MODEL_NAME,)) -> Case:
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    ways = [Way.STREAM, Way.GRPC] if kind is Kind.LEAVES else list(Way)
    if kind is Kind.MALFORMED:
        ways = [Way.GENERATE, Way.STREAM]
    way = rng.choice(ways)
    names = rng.sample(OPTIONAL, rng.choice([0, 1, 3, 8, len(OPTIONAL)]))
    fields = valid_fields(rng, [*REQUIRED, *names], SERVED)
    if way is Way.GENERATE:
        fields.pop("stream", None)
    return replace(_MAKERS[kind](rng, way, fields), model=rng.choice(models))


def _valid(rng: random.Random, way: Way, fields: dict[str, Any]) -> Case:
    return Case(way, Kind.VALID, fields)


def _leaves(rng: random.Random, way: Way, fields: dict[str, Any]) -> Case:
    fields |= {"stream": True, "max_tokens": 200, "end_id": -1}
    fields |= {"stop_words": [], "stop_token_ids": []}
    return Case(way, Kind.LEAVES, fields)


def _out_of_range(rng: random.Random, way: Way, fields: dict[str, Any]) -> Case:
    name = rng.choice([name for name in SPECS if invalid_values(SPECS[name])])
    values = invalid_values(SPECS[name])
    beyond_model = {
        "max_tokens": [100_000, INT32_MAX],
        "min_tokens": [17, INT32_MAX],
        "end_id": [10**6, INT32_MAX],
        "speculation_policy": ["magic", "fixed:0", "fixed:x", "fixed:1000"],
    }
    fields[name] = rng.choice(values + beyond_model.get(name, []))
    return Case(way, Kind.OUT_OF_RANGE, fields, named=name)


def _together(rng: random.Random, way: Way, fields: dict[str, Any]) -> Case:
    if rng.random() < 0.5:
        return Case(way, Kind.TOGETHER, fields | {"seed": 1, "random_seed": 2}, "random_seed")
    words = {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]}
    return Case(way, Kind.TOGETHER, fields | words, "embedding_bias_weights")


def _huge(rng: random.Random, way: Way, fields: dict[str, Any]) -> Case:
    name = rng.choice(["text_input", "proposer", "verification", "stop_words"])
    text = rng.choice(["x", "🙂", " "]) * HUGE
    fields[name] = [text] if SPECS[name].is_list else text
    return Case(way, Kind.HUGE, fields, named=name)


def _name(rng: random.Random, way: Way, fields: dict[str, Any]) -> Case:
    name = rng.choice([*UNKNOWN, *UNSUPPORTED, *RENAMED])
    value = rng.choice([1, True, "text"])
    named = name if name.isascii() and len(name) < 64 else ""
    if way is Way.GRPC and name not in RESERVED:
        return Case(way, Kind.NAME, fields, named, parameters={name: value})
    http = Way.STREAM if way is Way.GRPC else way
    return Case(http, Kind.NAME, fields | {name: rng.choice([value, 0.5, None, [1]])}, named)


def _missing(rng: random.Random, way: Way, fields: dict[str, Any]) -> Case:
    gone = rng.sample(REQUIRED, rng.randint(1, len(REQUIRED)))
    left = {name: value for name, value in fields.items() if name not in gone}
    return Case(way, Kind.MISSING, left, named=rng.choice(gone))


def _wrong_type(rng: random.Random, way: Way, fields: dict[str, Any]) -> Case:
    name = rng.choice(list(SPECS))
    dtype = SPECS[name].dtype
    if way is Way.GRPC:
        wrong = "FP32" if dtype != "FP32" else "INT32"
        fields[name] = [1] if SPECS[name].is_list else 1
        return Case(way, Kind.WRONG_TYPE, fields, name, dtypes={name: wrong})
    values = {"STRING": [5, True], "BOOL": [1, "true"], "FP32": ["0.5", True]}
    wrong_values = [*values.get(dtype, [2.5, "5"]), None, {"a": 1}]
    fields[name] = rng.choice(wrong_values)
    return Case(way, Kind.WRONG_TYPE, fields)


def _wrong_count(rng: random.Random, way: Way, fields: dict[str, Any]) -> Case:
    name = rng.choice([name for name in SPECS if not SPECS[name].is_list])
    good = valid_value(SPECS[name], rng, SERVED)
    fields[name] = rng.choice([[good, good], [], [good] * 100])
    return Case(way, Kind.WRONG_COUNT, fields, named=name if way is Way.GRPC else "")


def _malformed(rng: random.Random, way: Way, fields: dict[str, Any]) -> Case:
    body = Case(way, Kind.MALFORMED, fields).json_body()
    cut = body[: rng.randrange(len(body))]
    return Case(
        way, Kind.MALFORMED, fields, body=rng.choice([cut, b"", b"[]", b"5", NOT_UTF8, b"{}"])
    )


_MAKERS = {
    Kind.VALID: _valid,
    Kind.LEAVES: _leaves,
    Kind.OUT_OF_RANGE: _out_of_range,
    Kind.TOGETHER: _together,
    Kind.HUGE: _huge,
    Kind.NAME: _name,
    Kind.MISSING: _missing,
    Kind.WRONG_TYPE: _wrong_type,
    Kind.WRONG_COUNT: _wrong_count,
    Kind.MALFORMED: _malformed,
}
