"""Prompts: 40 for each of five workloads, written by hand for this project, 40 documents for each
of the four tasks of the tiny pair, and the chats of five sessions with a coding agent.

Each is a file in `texts/`, whose prompts stand between lines of four hyphens. Real texts are what a
user sends, without a chat template. The documents were not in the training of the tiny pair.

The sessions are in `texts/agent.json`: what the agent sent, as coding clients do, and what it was
answered. All of it was written by hand, on small repositories that were written for it too. The
prompts of `edit` show files of the same repositories.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

WORKLOADS = ("chat", "sql", "summarize", "qa")
TINY = tuple(f"tiny-{one}" for one in WORKLOADS)
NUM_PROMPTS = 40
EDIT, AGENT = "edit", "agent"
FOLDER = Path(__file__).with_name("texts")


class Chat(NamedTuple):
    """messages, tools: as in OpenAI's API."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@cache
def prompts(workload: str) -> tuple[str, ...]:
    text = (FOLDER / f"{workload}.txt").read_text(encoding="utf-8")
    return tuple(one.strip() for one in text.split("\n----\n"))


def prompt(workload: str, index: int) -> str:
    """The prompt at `index` modulo 40 of a workload or of a task of the tiny pair."""
    return prompts(workload)[index % NUM_PROMPTS]


@cache
def sessions() -> tuple[tuple[Chat, ...], ...]:
    """The requests of each session with an agent: a chat up to each of its answers."""
    document = json.loads((FOLDER / f"{AGENT}.json").read_text(encoding="utf-8"))
    return tuple(
        tuple(
            Chat(messages[:end], document["tools"])
            for end, message in enumerate(messages)
            if message["role"] == "assistant"
        )
        for messages in document["sessions"]
    )
