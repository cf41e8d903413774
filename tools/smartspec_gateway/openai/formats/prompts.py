"""Chat templates and token counts, with the files of the served model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateSyntaxError
from pydantic_core import from_json
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import render_jinja_template

from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats import histories
from smartspec_gateway.openai.formats.call_grammar import CallFormat, format_of
from smartspec_gateway.openai.formats.reasoning import marks_in
from smartspec_gateway.openai.formats.special_names import CUT, SpecialNames
from smartspec_gateway.openai.formats.tool_ways import Tools, joined, ways_of
from smartspec_gateway.openai.surrogates import without_escaped_surrogates, without_surrogates
from smartspec_py.engines.tokenizer_file import (
    SPECIAL_MARKS,
    harmony_marks,
    num_token_ids,
    read_tokenizer,
)
from smartspec_py.faults import shown

NO_TEMPLATE = "messages: this model has no chat template: use --chat-template, or /v1/completions"

RESERVED = frozenset(
    (
        *("self", "conversation", "conversations", "messages", "tools", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens"),
    )
)
"""Names that are no variables of a chat template: parameters of what renders it. `documents` is
both."""

TEMPLATES_DIR = "additional_chat_templates"
"""Where Transformers writes templates besides chat_template.jinja, such as tool_use.jinja."""

MAX_KNOWN_TOKENS = 1 << 15
MAX_DIGITS = 10
"""Of a token id."""

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class PromptError(ValueError):
    """The files of the model cannot be used. The message names the file."""


class Prompts:
    """Makes prompts of messages, and counts tokens."""

    def __init__(self, folder: Path, chat_template: Path | None = None) -> None:
        """folder: the model's directory. chat_template: a file to use instead of the model's own.

        Raises PromptError.
        """
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = read_tokenizer(folder)
        except Exception as error:  # tokenizers raises plain Exception
            raise PromptError(f"{path} cannot be read: {error}") from error
        self._num_tokens = num_token_ids(self._tokenizer)
        config = _json(folder / "tokenizer_config.json")
        self._templates = _templates(folder, config, chat_template)
        self.reasoning_marks = marks_in("".join(self._templates.values()))
        """Of reasoning blocks in answers to chats; None if there are none."""

        added = self._tokenizer.get_added_tokens_decoder()
        special = {token: one.content for token, one in added.items() if one.special}
        names_added = {one.content for one in added.values()}
        marks = names_added.intersection((*SPECIAL_MARKS, *harmony_marks(names_added)))
        self._special_names = SpecialNames({*special.values(), *marks})
        self.special_tokens = frozenset(special)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._special = {name: _content(config.get(name)) for name in names if config.get(name)}
        self._begin_tokens = self._tokenizer.encode("").ids
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids
        self.token_bytes = lru_cache(MAX_KNOWN_TOKENS)(self._token_bytes)
        self._names_added = names_added
        self._ways = cache(
            lambda template: ways_of(template, partial(self._rendered, template), names_added)
        )

    def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
    ) -> str:
        """The prompt, for `encode_chat`. Names of special tokens in messages and tools are cut. The
        caller bounds the characters of all values.

        Raises ApiError if the template refuses the messages, if there is none, or for a variable
        with a reserved name.
        """
        if reserved := next((name for name in variables if name in RESERVED), None):
            field = f"chat_template_kwargs.{reserved}"
            raise ApiError(400, f"{field}: is no variable of a chat template; leave it out", field)
        template = self._templates.get("tool_use" if tools else "default")
        template = template or self._templates.get("default")
        if template is None:
            raise ApiError(400, NO_TEMPLATE, "messages")
        messages, tools = self._ways(template).told(list(map(_message, messages)), tools)
        cut = self._special_names.cut
        more = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **cut(dict(variables)),
        }
        prompt = self._rendered(template, messages, tools, **more)
        is_system = all(message["role"] in histories.SYSTEM for message in messages)
        if is_system and cut(messages[-1]["content"]).strip() not in prompt:
            prompt = self._rendered(template, histories.with_user(messages), tools, **more)
        prompt = joined(prompt)
        begin = self._special.get("bos_token")
        if begin and self._begin_tokens and prompt.startswith(begin):
            prompt = prompt[len(begin) :]  # the tokenizer adds it
        return prompt

    @property
    def call_format(self) -> CallFormat:
        """How the model writes tool calls."""
        template = self._templates.get("tool_use") or self._templates.get("default", "")
        return format_of(template, self._ways(template).of_tools, self._names_added)

    def _rendered(
        self, template: str, messages: histories.History, tools: Tools, /, **more: Any
    ) -> str:
        """The prompt, of the first form of the messages that the template takes. Raises
        ApiError."""
        cut = self._special_names.cut
        given: dict[str, Any] = {"chat_template": template, "tools": cut(list(tools)) or None}
        error: Exception | None = None
        for form in histories.forms(messages):
            try:
                found: Any = render_jinja_template(
                    [list(map(cut, form))], **given, **{**self._special, **more}
                )
                return without_surrogates(str(found[0][0]))
            except Exception as refused:  # a template can raise anything
                error = refused
        message = f"messages: the chat template refuses them: {error}"
        raise ApiError(400, message, "messages") from error

    @property
    def begin_text(self) -> str:
        """The special tokens that the tokenizer adds before a text."""
        return self.decode(self._begin_tokens)

    def is_token(self, mark: str) -> bool:
        """Whether the tokenizer has this text as one token."""
        return len(self.encode(mark, add_special_tokens=False)) == 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`encode` of the library would hold Python's lock, and stop all streams."""
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        tokens: list[int] = found.ids
        return tokens

    def encode_chat(self, prompt: str) -> list[int]:
        """The tokens of a prompt of `of_chat`. Parts between cuts are encoded one by one, so no
        special token is found across a cut."""
        first, *others = prompt.split(CUT)
        tokens = self.encode(first)
        for found in self._tokenizer.encode_batch(others, add_special_tokens=False):
            tokens += found.ids
        return tokens

    def decode(self, tokens: Sequence[int], param: str = "tokens") -> str:
        """Raises ApiError for a token that does not exist."""
        if (highest := max(tokens, default=0)) >= self._num_tokens:
            rule = f"must be in 0..{self._num_tokens - 1}"
            raise ApiError(400, f"{param}: got {highest}, {rule}", param)
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def strings(self, tokens: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def _token_bytes(self, token: int) -> bytes:
        """The bytes of a token in the middle of a text. Incomplete characters need the tokenizer's
        own notation: `<0xE2>`, or letters for bytes as in GPT-2."""
        before = self._tokenizer.decode(self._anchor, skip_special_tokens=False)
        both = self._tokenizer.decode([*self._anchor, token], skip_special_tokens=False)
        text: str = both[len(before) :]
        if "\ufffd" not in text:
            return text.encode()
        written = self._tokenizer.id_to_token(token) or ""
        if found := BYTE_TOKEN.fullmatch(written):
            return bytes([int(found[1], 16)])
        letters = _byte_letters()
        if all(letter in letters for letter in written):
            return bytes(letters[letter] for letter in written)
        return text.encode()

    def word(self, token: str) -> str:
        """The text of a token id of logit_bias, which must be encoded as this token again."""
        param, most = "logit_bias", self._num_tokens - 1
        # Python refuses to convert thousands of digits.
        if not token.isdecimal() or len(token) > MAX_DIGITS or int(token) > most:
            raise ApiError(400, f"{param}: got token {shown(token)}, must be in 0..{most}", param)
        word = self.decode([int(token)])
        if self.encode(word, add_special_tokens=False) != [int(token)]:
            raise ApiError(
                400,
                f"{param}: token {token} cannot be given alone, because its text {word!r} has "
                "other tokens: leave it out",
                param,
            )
        return word


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message for a template. Most want the arguments of tool calls as objects."""
    found = {"content": "", **message}
    if found.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are not a JSON object, which a model can write, become one with their text."""
    text = call["function"].get("arguments") or "{}"
    try:
        # At most 200 levels, as in a body: what follows takes two calls of Python for each.
        is_read = isinstance(text, dict)
        arguments = text if is_read else from_json(without_escaped_surrogates(text))
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"arguments": text}
    return {**call, "function": {**call["function"], "arguments": arguments}}


@cache
def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with."""
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _templates(folder: Path, config: Mapping[str, Any], given: Path | None) -> dict[str, str]:
    """By name: "default", and "tool_use" if the model has another one for tools."""
    if given is not None:
        return {"default": read_template(given)}
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / TEMPLATES_DIR).glob("*.jinja"))}
    if found := {name: _text(path) for name, path in files.items() if path.is_file()}:
        return found
    stated = config.get("chat_template")
    try:
        if isinstance(stated, list):
            stated = {one["name"]: one["template"] for one in stated}
        found = {"default": stated} if isinstance(stated, str) else dict(stated or {})
        if not all(isinstance(text, str) for pair in found.items() for text in pair):
            raise TypeError
    except (TypeError, ValueError, KeyError) as error:
        raise PromptError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a text or a list of "
            "objects with name and template: correct the file"
        ) from error
    return found


def read_template(path: Path) -> str:
    """The chat template. Raises PromptError if it cannot be read or has a syntax error."""
    template = _text(path)
    try:
        render_jinja_template([[]], chat_template=template)
    except TemplateSyntaxError as error:
        raise PromptError(f"{path}, line {error.lineno}: {error.message}") from error
    except Exception:
        pass  # it needs a message
    return template


def _content(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    text = _text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise PromptError(f"{path} is not a JSON object: replace it")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read: {error}") from error
