"""The OpenAI routes on their own port. Until the model is ready, they answer 503."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from smartspec_gateway.guard import Message, Receive, Send
from smartspec_gateway.limits import Refused
from smartspec_gateway.openai.app import create_app
from smartspec_gateway.openai.endpoint import Settings
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.model import Model
from smartspec_gateway.openai.prompts import PromptError, Prompts
from smartspec_gateway.triton import Triton

KEY_VARIABLE = "SMARTSPEC_API_KEY"


class OpenAi:
    """The ASGI application. Ends the process if the template or the keys cannot be read."""

    def __init__(self, triton: Triton, options: argparse.Namespace) -> None:
        """options: those of the command line."""
        try:
            prompts = Prompts(options.model_dir, options.chat_template)
            keys = api_keys(options.api_key_file)
        except (PromptError, OSError) as error:
            sys.exit(f"smartspec_gateway: {error}")
        self.settings = Settings(options.name, 0, keys, options.metrics_url)
        self._app = create_app(Model(triton, options.name), prompts, self.settings)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not self.settings.context_len:
            raise Refused(503, "the model is starting: send the request again later")
        await self._app(scope, receive, send)


def openai_error(status: int, message: str) -> bytes:
    """In OpenAI's format."""
    return json.dumps(ApiError(status, message).body).encode()


def api_keys(path: Path | None) -> tuple[str, ...] | None:
    """The keys of the file, one per line, and of the environment; None if there are none."""
    text = os.environ.get(KEY_VARIABLE, "")
    if path is not None:
        text += "\n" + path.read_text(encoding="utf-8")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if path is not None and not keys:
        sys.exit(f"smartspec_gateway: {path} has no API key: write one per line")
    return keys or None
