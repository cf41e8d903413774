"""`/v1/chat/completions`. The role, each part of a tool call and `finish_reason` have chunks of
their own, as in OpenAI's streams."""

from __future__ import annotations

from typing import Any

from smartspec_gateway.openai.apis.answers import ChoicesWriter
from smartspec_gateway.openai.apis.chat_schema import ChatRequest
from smartspec_gateway.openai.apis.choices import Choice, Prepared, text_of
from smartspec_gateway.openai.apis.requests import Requests
from smartspec_gateway.openai.apis.route import Route
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.logprobs import OfChat


def _prepared(requests: Requests, asked: ChatRequest) -> Prepared:
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs", "top_logprobs")
    return requests.of_chat(asked)


class ChatWriter(ChoicesWriter):
    """A chat in progress."""

    id_prefix, type, chunk_type = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _new_choice(self, found: Prepared, prompt: int) -> Choice:
        has_logs = found.wanted.num_top_log_probs is not None
        logs = OfChat(self._token_bytes) if has_logs else None
        return Choice.of(found.wanted, found.start, log_probs=logs)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        reasoning, parts = choice.take()
        text, calls = text_of(parts), list[dict[str, Any]]()
        for part in parts:
            if isinstance(part, str):
                continue
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

    def _chunks(self, choice: Choice) -> list[dict[str, Any]]:
        """With log-probabilities or counts, each piece has a chunk."""
        is_first, choice.has_begun = not choice.has_begun, True
        reasoning, parts = choice.take()
        chunks = [_chunk({"reasoning_content": reasoning})] if reasoning else []
        for part in parts:
            is_text = isinstance(part, str)
            chunks.append(_chunk({"content": part} if is_text else {"tool_calls": [part]}))
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
            begins_with_text = bool(parts) and isinstance(parts[0], str)
            content = "" if begins_with_text or not self._asked.tools else None
            role = {"role": "assistant", "content": content, "refusal": None}
            chunks.insert(0, _chunk(role))
        return chunks


def _chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"delta": delta, "logprobs": None, "finish_reason": finish_reason}


ROUTE = Route(ChatRequest.route, ChatRequest, _prepared, ChatWriter)
