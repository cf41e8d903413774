"""Prompts: 40 for each of five workloads, written by hand for this project, 40 documents for each
of the four tasks of the tiny pair, and sessions with a coding agent.

Each is a file in `texts/`, whose prompts stand between lines of four hyphens. Real texts are what a
user sends, without a chat template. The documents were not in the training of the tiny pair.

The sessions of `texts/agent.json` were written by hand: what an agent with tools sends, and what it
is answered. Those of `texts/aider.json` were recorded: aider 0.86.2 asked Qwen2.5-Coder-1.5B to
change files, ran their tests, showed what failed, and asked for messages of commits and for
summaries. aider's own instructions were replaced by texts of the same form and length that were
written for this project. All are about small repositories that were written for it too; the prompts
of `edit` show their files.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

WORKLOADS = ("chat", "sql", "summarize", "qa")
TINY = tuple(f"tiny-{one}" for one in WORKLOADS)
NUM_PROMPTS = 40
EDIT, AGENT, AIDER = "edit", "agent", "aider"
SESSIONS = (AGENT, AIDER)
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
def sessions(workload: str) -> tuple[tuple[Chat, ...], ...]:
    """The requests of each session with an agent, in their order."""
    document = json.loads((FOLDER / f"{workload}.json").read_text(encoding="utf-8"))
    if workload == AIDER:  # requests are lists of indices of messages
        messages = document["messages"]
        return tuple(
            tuple(Chat([messages[index] for index in request]) for request in session)
            for session in document["sessions"]
        )
    return tuple(
        tuple(
            Chat(messages[:end], document["tools"])
            for end, message in enumerate(messages)
            if message["role"] == "assistant"
        )
        for messages in document["sessions"]
    )
