"""Prompts of real texts: 40 for each of four workloads, written by hand for this project.

Each workload is a file in `texts/`, whose prompts stand between lines of four hyphens. They are
what a user sends, without a chat template.
"""

from functools import cache
from pathlib import Path

WORKLOADS = ("chat", "sql", "summarize", "qa")
NUM_PROMPTS = 40
FOLDER = Path(__file__).with_name("texts")


@cache
def prompts(workload: str) -> tuple[str, ...]:
    text = (FOLDER / f"{workload}.txt").read_text(encoding="utf-8")
    return tuple(one.strip() for one in text.split("\n----\n"))


def prompt(workload: str, index: int) -> str:
    """The prompt at `index` modulo 40 of a workload."""
    return prompts(workload)[index % NUM_PROMPTS]
