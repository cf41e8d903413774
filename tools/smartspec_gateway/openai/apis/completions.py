"""`/v1/completions`. A stream has a chunk for each piece of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from smartspec_gateway.openai.apis.answers import ChoicesWriter
from smartspec_gateway.openai.apis.choices import Choice, Prepared, text_of
from smartspec_gateway.openai.apis.requests import Requests
from smartspec_gateway.openai.apis.route import Route
from smartspec_gateway.openai.apis.schema import CompletionRequest
from smartspec_gateway.openai.logprobs import OfText
from smartspec_gateway.openai.model import Piece


class Echo(NamedTuple):
    """A prompt as text. first: its first token, if the answer has log-probabilities. num_added:
    characters of the tokens that the tokenizer adds before the text."""

    text: str = ""
    first: int | None = None
    num_added: int = 0


class Own(NamedTuple):
    """echoes: of all prompts, if wanted. special: tokens that generated text leaves out."""

    echoes: Sequence[Echo]
    special: frozenset[int]


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
        num_added = len(requests.prompts.begin_text) if texts else 0
        echoes = [Echo(*one, num_added) for one in zip(shown, firsts, strict=True)]
    choices = requests.choices(asked, "prompt", prompts)
    own = Own(echoes, requests.prompts.special_tokens)
    return requests.prepared(asked, choices, list(map(len, prompts)), own=own)


class CompletionWriter(ChoicesWriter):
    """A completion in progress."""

    id_prefix, type, chunk_type = "cmpl-", "text_completion", "text_completion"

    def _new_choice(self, found: Prepared, prompt: int) -> Choice:
        own: Own = found.own
        echo = own.echoes[prompt] if own.echoes else Echo()
        has_logs = found.wanted.num_top_log_probs is not None
        token_bytes, num_added = self._token_bytes, echo.num_added
        logs = OfText(token_bytes, own.special, echo.first, num_added) if has_logs else None
        return Choice.of(found.wanted, echo=echo.text, log_probs=logs)

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
