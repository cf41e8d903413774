"""Requests told apart by how their prompts begin."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from smartspec_py.serving.kinds import (
    ENOUGH_REQUESTS,
    LEAST_REQUESTS,
    LENGTHS,
    NO_KIND,
    WINDOW,
    PromptKinds,
)

HEADER = list(range(1000, 1020))
"""What every application's prompts begin with."""


def prompt(rng: random.Random, *beginning: int, length: int = 60) -> list[int]:
    """These tokens, and others that no two prompts share."""
    return [*beginning, *(rng.randrange(10_000, 10_000_000) for _ in range(length))]


def test_nobody_is_told_apart_before_enough_were_seen() -> None:
    kinds, rng = PromptKinds(), random.Random(1)
    found = [kinds.of(prompt(rng, *HEADER)) for _ in range(ENOUGH_REQUESTS)]
    assert set(found[:-1]) == {NO_KIND}
    assert found[-1] != NO_KIND


def test_applications_are_told_apart_and_their_requests_are_not() -> None:
    kinds, rng = PromptKinds(), random.Random(1)
    beginnings = [(7, 7, 7, n) for n in range(5)]
    found: dict[int, Counter[str]] = {n: Counter() for n in range(5)}
    for number in range(500):
        name = kinds.of(prompt(rng, *beginnings[number % 5]))
        if number >= 2 * ENOUGH_REQUESTS:
            found[number % 5][name] += 1
    assert all(len(names) == 1 for names in found.values())
    assert len(set.union(*(set(names) for names in found.values()))) == 5


@pytest.mark.parametrize("num_own", [4, 6, 12, 20])
def test_a_common_header_does_not_hide_what_is_behind_it(num_own: int) -> None:
    kinds, rng = PromptKinds(), random.Random(1)
    names = set[tuple[int, str]]()
    for number in range(400):
        app = number % 2
        name = kinds.of(prompt(rng, *HEADER, *([app] * num_own)))
        if number >= 4 * ENOUGH_REQUESTS:
            names.add((app, name))
    assert {app for app, _ in names} == {0, 1}
    assert len(names) == len({name for _, name in names}) == 2


def test_a_prompt_that_came_twice_is_no_application() -> None:
    kinds, rng = PromptKinds(), random.Random(1)
    twice = prompt(rng, length=600)
    for _ in range(ENOUGH_REQUESTS):
        kinds.of(prompt(rng))
    assert {kinds.of(twice) for _ in range(LEAST_REQUESTS - 1)} == {NO_KIND}
    assert kinds.of(twice) != NO_KIND


def test_what_differs_from_request_to_request_splits_no_application() -> None:
    """Behind four tokens comes one of 40 names, and then what is alike for each name."""
    kinds, rng = PromptKinds(), random.Random(1)
    names = Counter(
        kinds.of(prompt(rng, 1, 2, 3, 4, *[100 + rng.randrange(40)] * 12)) for _ in range(6000)
    )
    assert names.most_common(1)[0][0].startswith("4 tokens")
    assert names.most_common(1)[0][1] > 5900


def test_a_rare_application_is_in_no_kind_of_its_own() -> None:
    kinds, rng = PromptKinds(), random.Random(1)
    rare = set[str]()
    for number in range(2000):
        kinds.of(prompt(rng, 1, 1, 1, 1))
        if number % 50 == 0 and number > ENOUGH_REQUESTS:
            rare.add(kinds.of(prompt(rng, 2, 2, 2, 2)))
    assert rare == {NO_KIND}


def test_prompts_that_share_nothing_are_in_no_kind_and_take_bounded_memory() -> None:
    kinds, rng = PromptKinds(), random.Random(1)
    for number in range(20 * WINDOW):
        assert kinds.of(prompt(rng, length=rng.randrange(1, 40))) == NO_KIND, number
    assert kinds.num_counted <= WINDOW * len(LENGTHS)


def test_an_application_that_is_not_used_any_more_is_forgotten() -> None:
    kinds, rng = PromptKinds(), random.Random(1)
    for _ in range(200):
        kinds.of(prompt(rng, 1, 1, 1, 1))
    assert kinds.of(prompt(rng, 1, 1, 1, 1)) != NO_KIND
    for _ in range(6 * WINDOW):
        kinds.of(prompt(rng, 2, 2, 2, 2))
    assert kinds.of(prompt(rng, 1, 1, 1, 1)) == NO_KIND


@pytest.mark.parametrize("length", [0, 1, 3])
def test_short_prompts(length: int) -> None:
    kinds = PromptKinds()
    assert {kinds.of(list(range(length))) for _ in range(100)} == {NO_KIND}
