"""`/tokenize` and `/detokenize`: between texts and tokens, as vLLM's routes."""

from __future__ import annotations

from typing import Any

from smartspec_gateway.openai.apis.chat_schema import ChatPrompt, TokenizeRequest
from smartspec_gateway.openai.apis.requests import Requests
from smartspec_gateway.openai.apis.route import Route
from smartspec_gateway.openai.apis.schema import DetokenizeRequest
from smartspec_gateway.openai.errors import ApiError


def _tokenize(requests: Requests, asked: TokenizeRequest) -> dict[str, Any]:
    tokens = _tokens(requests, asked)
    found = {"tokens": tokens, "count": len(tokens), "max_model_len": requests.context_len}
    if asked.return_token_strs:
        found["token_strs"] = requests.prompts.strings(tokens)
    return found


def _tokens(requests: Requests, asked: TokenizeRequest) -> list[int]:
    text, messages = asked.prompt, asked.messages
    if messages is not None:
        if text is not None:
            raise ApiError(400, "prompt: not together with messages", "prompt")
        if asked.add_special_tokens:
            name = "add_special_tokens"
            raise ApiError(400, f"{name}: got True, must be false with messages", name)
        return requests.chat_prompt(messages, asked)[0]
    if text is None:
        raise ApiError(400, "prompt: must be given, or messages", "prompt")
    if others := asked.model_fields_set & ChatPrompt.model_fields.keys():
        raise ApiError(400, f"{min(others)}: only with messages", min(others))
    requests.check_bytes("prompt", text)
    return requests.prompts.encode(text, asked.add_special_tokens is not False)


def _detokenize(requests: Requests, asked: DetokenizeRequest) -> dict[str, Any]:
    return {"prompt": requests.prompts.decode(asked.tokens)}


ROUTES = (
    Route("/tokenize", TokenizeRequest, _tokenize),
    Route("/detokenize", DetokenizeRequest, _detokenize),
)
