"""The prompts of real texts: 40 different ones of each workload, of bounded length."""

import unicodedata

import pytest

from smartspec_bench import texts

# Characters of the shortest and the longest prompt: a token has three to five.
LENGTHS = {"chat": (40, 400), "sql": (150, 700), "summarize": (450, 1200), "qa": (450, 1200)}


@pytest.mark.parametrize("workload", texts.WORKLOADS)
def test_a_workload_has_40_prompts_of_bounded_length(workload: str) -> None:
    shortest, longest = LENGTHS[workload]
    prompts = texts.prompts(workload)
    assert len(prompts) == texts.NUM_PROMPTS
    assert texts.prompt(workload, 43) == prompts[3]
    for prompt in prompts:
        assert shortest <= len(prompt) <= longest, prompt
        assert prompt == unicodedata.normalize("NFC", prompt).strip()
        assert all(char == "\n" or char.isprintable() for char in prompt), prompt


def test_no_prompt_occurs_twice() -> None:
    prompts = [text for name in texts.WORKLOADS for text in texts.prompts(name)]
    assert len(set(prompts)) == len(prompts)
