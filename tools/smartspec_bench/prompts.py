"""Prompts: of a workload by its name, or of a file in one of three formats.

`chat`, `sql`, `summarize` and `qa` are real texts, and `mixed` is all of them. `edit` has tasks to
change a file, `agent` and `aider` the requests of sessions with a coding agent, and `tiny` the
documents that the shipped tiny pair was trained for. The formats of files are JSON lines, those of
MT-bench and Spec-Bench, and ShareGPT's. Of several turns the first one of the user is the prompt,
because the model writes its own answer. Conversations without a human turn are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from smartspec_bench import texts
from smartspec_bench.texts import EDIT, SESSIONS, Chat
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.faults import shown

MIXED, TINY = "mixed", "tiny"
WORKLOADS = (*texts.WORKLOADS, MIXED, EDIT, *SESSIONS, TINY)
PROMPT_SEED = 6_000_011
"""Seed of the prompts. It differs from the seeds of the shipped pair's training."""

HUMAN = ("human", "user")
KEYS = ("prompt", "text_input", "max_tokens", "kind")


class PromptFileError(ValueError):
    """A file of prompts cannot be used; the message names the file, the line and the reason."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """max_tokens: None is the load's."""

    text: str
    max_tokens: int | None = None
    kind: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """Of a request, on top of the load's."""
        bound = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {"text_input": self.text, **bound}


Template = Callable[[str | Chat], str]
"""Makes a prompt of a user's message, or of a chat."""


def plain(asked: str | Chat) -> str:
    """The message, or those of a chat: the prompt of a model without a template."""
    if isinstance(asked, str):
        return asked
    return "\n\n".join(message["content"] for message in asked.messages)


def generated(
    workload: str, seed: int = PROMPT_SEED, template: Template = plain
) -> Iterator[Prompt]:
    """An endless sequence of prompts. All texts of a workload are used once in a random order, then
    in another one, and so on; `mixed` and `tiny` alternate between four kinds. Sessions with an
    agent take turns, each in its own order.

    template: of the model, see `chat_template`. Documents of `tiny` get none.
    """
    names = {MIXED: texts.WORKLOADS, TINY: texts.TINY}.get(workload, (workload,))
    random = Random(seed)
    while workload in SESSIONS:
        sessions = texts.sessions(workload)
        for turns in zip_longest(*random.sample(sessions, len(sessions))):
            yield from (Prompt(template(chat), kind=workload) for chat in turns if chat)
    while True:
        orders = [random.sample(texts.prompts(name), texts.NUM_PROMPTS) for name in names]
        for turn in zip(*orders, strict=True):
            for name, text in zip(names, turn, strict=True):
                kind = name.removeprefix("tiny-")
                yield Prompt(text if workload == TINY else template(text), kind=kind)


def chat_template(model: Path | None) -> Template:
    """The chat template of a model's directory or GGUF file; `plain` if there is no model, or if
    the model has no template.

    Raises ValueError if the files cannot be used.
    """
    from smartspec_gateway.openai.errors import ApiError
    from smartspec_gateway.openai.formats.prompts import Prompts

    if model is None:
        return plain
    prompts = Prompts(model_folder(model))

    def template(asked: str | Chat) -> str:
        chat = Chat([{"role": "user", "content": asked}]) if isinstance(asked, str) else asked
        return prompts.of_chat(chat.messages, {}, tools=chat.tools)

    try:
        template("a message")
    except ApiError:
        return plain
    return template


def read_prompts(path: Path) -> list[Prompt]:
    """A file of JSON lines, or of one JSON list, with entries of any format:

    - {"prompt": "..", "max_tokens": 64, "kind": ".."}, where only the first is required;
      `text_input` is another name for `prompt`
    - {"turns": ["..", ..], "category": ".."} of MT-bench and Spec-Bench, with any other keys
    - ShareGPT's {"conversations": [{"from": "human", "value": ".."}, ..]}

    Raises PromptFileError, which names the line or entry, if an entry has none of them or the
    file has no entry.
    """
    place, found = str(path), []
    try:
        text = path.read_text(encoding="utf-8")
        is_list = text.lstrip().startswith("[")
        entries = json.loads(text) if is_list else text.split("\n")
        for number, entry in enumerate(entries, start=1):
            place = f"{path.name}, {'entry' if is_list else 'line'} {number}"
            if is_list or entry.strip():
                prompt = _prompt(entry if is_list else json.loads(entry))
                found += [] if prompt is None else [prompt]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromptFileError(f"{place}: {error}") from error
    if not found:
        raise PromptFileError(f"{path.name}: holds no prompt")
    return found


def _prompt(entry: Any) -> Prompt | None:
    """None for a conversation without a human turn."""
    if not isinstance(entry, dict):
        raise ValueError("no JSON object")
    if "conversations" in entry:
        turns = entry["conversations"]
        human = (turn["value"] for turn in turns if turn["from"] in HUMAN and turn["value"])
        text = next(human, None)
        return None if text is None else Prompt(str(text), kind="sharegpt")
    if "turns" in entry:
        turns, kind = entry["turns"], str(entry.get("category", ""))
        if (
            not isinstance(turns, list)
            or not turns
            or not isinstance(turns[0], str)
            or not turns[0]
        ):
            raise ValueError(f"turns: got {shown(turns)}, must be a list that begins with text")
        return Prompt(turns[0], kind=kind)
    if unknown := entry.keys() - set(KEYS):
        raise ValueError(f"unknown key {min(unknown)!r}, known are {', '.join(KEYS)}")
    text, max_tokens = entry.get("prompt", entry.get("text_input")), entry.get("max_tokens")
    if not isinstance(text, str) or not text:
        raise ValueError(f"prompt: got {shown(text)}, must be text that is not empty")
    if max_tokens is not None and not (type(max_tokens) is int and max_tokens >= 1):
        raise ValueError(f"max_tokens: got {shown(max_tokens)}, must be a number from 1")
    return Prompt(text, max_tokens, str(entry.get("kind", "")))
