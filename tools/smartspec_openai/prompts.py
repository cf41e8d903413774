"""Chat templates and token counts, with the files of the served model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from smartspec_openai.errors import ApiError

NO_TEMPLATE = (
    "this model has no chat template: start the server with --chat-template FILE, or use "
    "/v1/completions"
)


class PromptError(Exception):
    """The files of the model cannot be used. The message names the file."""


class Prompts:
    """Makes prompts of messages, and counts tokens."""

    def __init__(self, folder: Path, chat_template: Path | None = None) -> None:
        """folder: the model's directory. chat_template: a file to use instead of the model's own.

        Raises PromptError.
        """
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise PromptError(f"{path} cannot be read: {error}") from error
        config = _json(folder / "tokenizer_config.json")
        self._template = _template(folder, config, chat_template)
        special = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._special = {name: _content(config.get(name)) for name in special if config.get(name)}
        self._begin_tokens = self._tokenizer.encode("").ids

    def load(self) -> None:
        """Import what templates need. Without this, the first chat takes 0.7 s longer."""
        import transformers.utils.chat_template_utils  # noqa: F401

    def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt. Raises ApiError if the template refuses the messages or if there is none."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._template is None:
            raise ApiError(400, NO_TEMPLATE, "messages")
        try:
            found: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                **{**self._special, **variables},
            )
        except (TemplateError, TypeError, ValueError) as error:
            message = f"messages: the chat template refuses them: {error}"
            raise ApiError(400, message, "messages") from error
        prompt = str(found[0][0])
        begin = self._special.get("bos_token")
        if begin and self._begin_tokens and prompt.startswith(begin):
            prompt = prompt[len(begin) :]  # the server's tokenizer adds it
        return prompt

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises UnicodeEncodeError for text with lone surrogates."""
        text.encode()
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Raises ApiError for a token that does not exist."""
        size = self._tokenizer.get_vocab_size()
        for token in tokens:
            if token >= size:
                raise ApiError(400, f"tokens: got {token}, must be in 0..{size - 1}", "tokens")
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def word(self, token: str) -> str:
        """The text of a token id of logit_bias, which must be encoded as this token again."""
        param = "logit_bias"
        if not token.isdecimal() or int(token) >= self._tokenizer.get_vocab_size():
            most = self._tokenizer.get_vocab_size() - 1
            raise ApiError(400, f"{param}: got token {token!r}, must be in 0..{most}", param)
        word = self.decode([int(token)])
        if self.encode(word, add_special_tokens=False) != [int(token)]:
            raise ApiError(
                400,
                f"{param}: token {token} cannot be given alone, because its text {word!r} has "
                "other tokens: leave it out",
                param,
            )
        return word


def _template(folder: Path, config: Mapping[str, Any], given: Path | None) -> str | None:
    path = given or folder / "chat_template.jinja"
    if given is not None or path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"{path} cannot be read: {error}") from error
    found = config.get("chat_template")
    if isinstance(found, list):  # several templates with names
        by_name = {one.get("name"): one.get("template") for one in found}
        found = by_name.get("default")
    return found if isinstance(found, str) else None


def _content(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError) as error:
        raise PromptError(f"{path} cannot be read: {error}") from error
