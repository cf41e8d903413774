"""Writes chats and completions in OpenAI's formats.

In chats, the role, each part of a tool call and `finish_reason` have chunks of their own, as in
OpenAI's streams. Completions have one chunk for each piece.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from smartspec_gateway.openai.choices import Choice, Prepared
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.logprobs import LogProbs, OfChat, OfText, TokenBytes
from smartspec_gateway.openai.model import Piece
from smartspec_gateway.openai.writer import DONE, Count, Event, Writer, new_id


class AnswerWriter(Writer):
    """A chat or a completion in progress."""

    after_last = DONE

    def __init__(self, found: Prepared, token_bytes: TokenBytes, count: Count) -> None:
        """token_bytes: of a token in the middle of a text. Choice i belongs to prompt i // n."""
        asked = found.wanted
        self._asked, self._token_bytes = asked, token_bytes
        choices = [
            Choice.of(asked, found.is_in_reasoning, echo, self._log_probs(first))
            for echo, first in (found.echoes or [("", None)] * len(found.num_prompt))
            for _ in range(asked.n)
        ]
        super().__init__(found, choices, count)
        kind = "chat.completion" if asked.is_chat else "text_completion"
        self._head = {
            "id": new_id("chatcmpl-" if asked.is_chat else "cmpl-"),
            "object": kind,
            "created": int(time.time()),
            "model": found.model,
        }
        chunk = self._head | {"object": f"{kind}.chunk" if asked.is_chat else kind}
        self._chunk_head = f"data: {json.dumps(chunk)[:-1]}, "

    def _hold(self, number: int, piece: Piece) -> None:
        self._add(number, piece)

    def _add(self, number: int, piece: Piece) -> Choice:
        if self._asked.token_limit == 0:  # the model has generated one token
            logs = piece.log_probs and {"prompt": piece.log_probs.get("prompt", [])}
            reason = piece.finish_reason and "length"
            piece = replace(
                piece, text_output="", num_output_tokens=0, log_probs=logs, finish_reason=reason
            )
        return super()._add(number, piece)

    async def _document(self) -> dict[str, Any]:
        choices = [
            {"index": number, **self._whole(choice)} for number, choice in enumerate(self._choices)
        ]
        return {**self._head, "choices": choices, **await self._totals()}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        if not self._asked.is_chat:
            return self._text(choice)
        reasoning, text, parts = choice.take()
        calls: list[dict[str, Any]] = []
        for part in parts:
            del part["index"]
            if "id" in part:
                calls.append(part)
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        message |= {"refusal": None} | ({"reasoning_content": reasoning} if reasoning else {})
        return {
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": choice.log_probs and choice.log_probs.take(),
            "finish_reason": choice.finish_reason,
        }

    def _text(self, choice: Choice) -> dict[str, Any]:
        """What is new in a completion."""
        _, text, _ = choice.take()
        echo, choice.echo = choice.echo, ""
        return {
            "text": echo + text,
            "logprobs": choice.log_probs and choice.log_probs.take(),
            "finish_reason": choice.finish_reason,
        }

    def _of_piece(self, number: int, piece: Piece) -> Iterator[Event]:
        choice = self._add(number, piece)
        chunks = self._deltas(choice) if self._asked.is_chat else [self._text(choice)]
        if chunks and self._asked.shows_steps:
            chunks[-1]["speculation"] = self._step(piece)
        for chunk in chunks:
            yield {"choices": [{"index": number, **chunk}], **self._usage_so_far()}

    def _beginning(self, event: Event) -> str:
        """What all chunks have is made once."""
        return self._chunk_head if "choices" in event else "data: {"

    def _deltas(self, choice: Choice) -> list[dict[str, Any]]:
        """What is new in a chat. With log-probabilities or counts, each piece has a chunk."""
        is_first, choice.has_begun = not choice.has_begun, True
        reasoning, text, parts = choice.take()
        chunks = [_chunk({"reasoning_content": reasoning})] if reasoning else []
        chunks += [_chunk({"content": text})] if text else []
        chunks += [_chunk({"tool_calls": [part]}) for part in parts]
        if choice.finish_reason:
            chunks.append(_chunk({}, choice.finish_reason))
        logs = choice.log_probs and choice.log_probs.take()
        has_logs = bool(logs and logs["content"])
        if not chunks and (has_logs or self._asked.shows_steps or self._asked.streams_usage):
            chunks = [_chunk({})]
        if has_logs:
            chunks[0]["logprobs"] = logs
        if is_first:
            # A text that is held back can become a call.
            content = None if parts or (self._asked.tools and not text) else ""
            role = {"role": "assistant", "content": content, "refusal": None}
            chunks.insert(0, _chunk(role))
        return chunks

    async def _last_events(self) -> list[Event]:
        """The token counts and statistics, if they are wanted."""
        is_wanted = self._asked.includes_usage or self._metrics
        return [{"choices": [], **await self._totals()}] if is_wanted else []

    def _failed(self, error: ApiError) -> list[Event]:
        return [error.body]

    def _usage_so_far(self) -> dict[str, Any]:
        """As far as a chunk has them. Where only the last one does, the others have null."""
        if self._asked.streams_usage:
            return {"usage": self._counts("prompt", "completion")}
        return {"usage": None} if self._asked.includes_usage else {}

    async def _totals(self) -> dict[str, Any]:
        return {"usage": await self._usage("prompt", "completion"), **self._statistics()}

    def _log_probs(self, first: int | None) -> LogProbs | None:
        if self._asked.num_top_log_probs is None:
            return None
        is_chat = self._asked.is_chat
        return OfChat(self._token_bytes) if is_chat else OfText(self._token_bytes, first)

    def _step(self, piece: Piece) -> dict[str, Any]:
        texts = [self._token_bytes(token).decode(errors="replace") for token in piece.output_ids]
        return {
            "num_tokens": piece.num_output_tokens,
            "num_steps": piece.num_steps,
            "num_drafted": piece.total_draft_tokens,
            "num_accepted": piece.total_accepted_draft_tokens,
            "proposer": piece.proposer or None,
            "tokens": texts,
        }


def _chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"delta": delta, "logprobs": None, "finish_reason": finish_reason}
