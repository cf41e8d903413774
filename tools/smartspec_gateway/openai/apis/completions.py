"""`/v1/completions`. A stream has a chunk for each piece of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smartspec_gateway.openai.apis.answers import ChoicesWriter
from smartspec_gateway.openai.apis.choices import Choice, Prepared, text_of
from smartspec_gateway.openai.apis.requests import Requests
from smartspec_gateway.openai.apis.route import Route
from smartspec_gateway.openai.apis.schema import CompletionRequest
from smartspec_gateway.openai.logprobs import OfText
from smartspec_gateway.openai.model import Piece

Echo = tuple[str, int | None]
"""A prompt as text, and its first token if the answer has log-probabilities."""


def _prepared(requests: Requests, asked: CompletionRequest) -> Prepared:
    texts = [text for text in asked.prompts if isinstance(text, str)]
    for text in texts:
        requests.check_bytes("prompt", text)
    encode, decode = requests.prompts.encode, requests.prompts.decode
    prompts = [encode(one) if isinstance(one, str) else one for one in asked.prompts]
    echoes: list[Echo] = []
    if asked.echo and all(prompts):
        shown = texts or [decode(tokens, "prompt") for tokens in prompts]
        firsts = [None if asked.logprobs is None else tokens[0] for tokens in prompts]
        echoes = list(zip(shown, firsts, strict=True))
    choices = requests.choices(asked, "prompt", prompts)
    return requests.prepared(asked, choices, list(map(len, prompts)), own=echoes)


class CompletionWriter(ChoicesWriter):
    """A completion in progress."""

    id_prefix, type, chunk_type = "cmpl-", "text_completion", "text_completion"

    def _new_choice(self, found: Prepared, prompt: int) -> Choice:
        echoes: Sequence[Echo] = found.own
        echo, first = echoes[prompt] if echoes else ("", None)
        has_logs = found.wanted.num_top_log_probs is not None
        logs = OfText(self._token_bytes, first) if has_logs else None
        return Choice.of(found.wanted, echo=echo, log_probs=logs)

    def _add(self, number: int, piece: Piece) -> Choice:
        if self._asked.token_limit == 0:  # the model has generated one token
            logs = piece.log_probs and {"prompt": piece.log_probs.get("prompt", [])}
            reason = piece.finish_reason and "length"
            piece = replace(
                piece, text_output="", num_output_tokens=0, log_probs=logs, finish_reason=reason
            )
        return super()._add(number, piece)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        _, parts = choice.take()
        echo, choice.echo = choice.echo, ""
        return {
            "text": echo + text_of(parts),
            "logprobs": choice.log_probs and choice.log_probs.take(),
            "finish_reason": choice.finish_reason,
        }

    def _chunks(self, choice: Choice) -> list[dict[str, Any]]:
        return [self._whole(choice)]


ROUTE = Route(CompletionRequest.route, CompletionRequest, _prepared, CompletionWriter)
