"""Generates text with the served model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smartspec_gateway.fields import body_of, checked
from smartspec_gateway.limits import Refused
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.logprobs import documents
from smartspec_gateway.triton import Triton
from smartspec_py.api.errors import field_of

FIELDS = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "stop_words": "stop",
    "embedding_bias_words": "logit_bias",
    "return_token_log_probs": "logprobs",
    "return_prompt_log_probs": "echo",
    "lora_name": "model",
}
"""Tensors with other names than the fields that they come from."""

ALWAYS = (
    "text_output",
    "finish_reason",
    "num_output_tokens",
    "num_input_tokens",
    "num_cached_tokens",
)
IF_ASKED = {
    "return_output_ids": ("output_ids",),
    "return_token_log_probs": ("token_log_probs",),
    "return_spec_metrics": (
        "metrics",
        "num_steps",
        "total_draft_tokens",
        "total_accepted_draft_tokens",
        "proposer",
    ),
}
"""Outputs to request, by input."""

_OF_PIECE = {*ALWAYS, *itertools.chain.from_iterable(IF_ASKED.values())}

Fields = dict[str, Any]
"""Values by the names of input tensors."""


class PromptTokens(list[int]):
    """The tokens of a prompt, with their JSON, which is made once for all choices."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.json = json.dumps(self, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text: the outputs of one response, with their names and meanings.

    num_input_tokens, num_cached_tokens, metrics: on the last piece only. log_probs: a part of the
    document `token_log_probs`, if asked for.
    """

    text_output: str = ""
    num_output_tokens: int = 0
    finish_reason: str = ""
    num_input_tokens: int = 0
    metrics: str | None = None
    num_cached_tokens: int = 0
    num_steps: int = 0
    total_draft_tokens: int = 0
    total_accepted_draft_tokens: int = 0
    proposer: str = ""
    output_ids: Sequence[int] = ()
    log_probs: Mapping[str, Any] | None = None


Arrival = tuple[int, Piece] | None
"""A piece with the number of its choice. None: see `pieces_of`."""


class Model:
    """A model of a Triton server."""

    def __init__(self, triton: Triton, name: str) -> None:
        self._triton, self._name = triton, name

    async def generate(self, fields: Fields) -> AsyncIterator[Piece | None]:
        """None comes when the request is accepted, and at times when nothing else comes. Closing
        the iterator cancels the request. Raises ApiError."""
        is_over = False
        try:
            wanted = [output for name in IF_ASKED if name in fields for output in IF_ASKED[name]]
            outputs = (*ALWAYS, *wanted)
            answers = self._triton.responses(_body(fields, outputs), self._name)
            async with contextlib.aclosing(answers):
                async for found in answers:
                    if not found:
                        yield None
                    for piece in itertools.chain.from_iterable(map(_pieces, found)):
                        is_over = bool(piece.finish_reason)
                        yield piece
                        if piece.log_probs:
                            await asyncio.sleep(0)  # there may be many
        except Refused as refused:
            raise _of_field(refused) from refused
        if not is_over:
            raise ApiError(503, "the server ended the request: send it again later")

    async def is_ready(self) -> bool:
        return await self._triton.is_ready(self._name)


def _body(fields: Fields, outputs: Sequence[str]) -> bytes:
    others = {name: value for name, value in fields.items() if name != "input_ids"}
    body = body_of(checked(others), outputs)
    tokens = fields.get("input_ids")
    return body if tokens is None else b'%s,"input_ids":%s}' % (body[:-1], tokens.json)


def _pieces(document: bytes) -> Iterator[Piece]:
    """One, or more if there are many log-probabilities. The last one has all other outputs."""
    found = {name: value for name, value in json.loads(document).items() if name in _OF_PIECE}
    if "output_ids" in found:  # Triton writes one element as a bare value
        ids = found["output_ids"]
        found["output_ids"] = ids if isinstance(ids, list) else [ids]
    last = None
    for part in documents(found.pop("token_log_probs", "{}")):
        if last is not None:
            yield Piece(log_probs=last)
        last = part
    yield Piece(**found, log_probs=last)


def _of_field(refused: Refused) -> ApiError:
    """The error with the name that the field has in OpenAI's API."""
    field, reason = field_of(refused.message)
    if not field or refused.status != 400:
        wait_s = 1 if refused.status == 503 else None
        return ApiError(refused.status, refused.message, retry_after_s=wait_s)
    name = FIELDS.get(field, field)
    return ApiError(400, f"{name}: {reason}", name)
