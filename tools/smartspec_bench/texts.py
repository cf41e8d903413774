"""Prompts: 40 for each of four workloads, written by hand for this project, and 40 documents for
each of the four tasks of the tiny pair.

Each is a file in `texts/`, whose prompts stand between lines of four hyphens. Real texts are what a
user sends, without a chat template. The documents were not in the training of the tiny pair.
"""

from functools import cache
from pathlib import Path

WORKLOADS = ("chat", "sql", "summarize", "qa")
TINY = tuple(f"tiny-{one}" for one in WORKLOADS)
NUM_PROMPTS = 40
FOLDER = Path(__file__).with_name("texts")


@cache
def prompts(workload: str) -> tuple[str, ...]:
    text = (FOLDER / f"{workload}.txt").read_text(encoding="utf-8")
    return tuple(one.strip() for one in text.split("\n----\n"))


def prompt(workload: str, index: int) -> str:
    """The prompt at `index` modulo 40 of a workload or of a task of the tiny pair."""
    return prompts(workload)[index % NUM_PROMPTS]
