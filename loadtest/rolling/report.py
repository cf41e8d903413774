"""Counts and promises of a rolling restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from rolling.load import BEFORE, Answer, Texts
from rolling.servers import NAMES

OUTCOMES = ("answered", "refused", "failed", "answered twice", "wrong text")
COLUMNS = ("sent", *OUTCOMES, "by old", "by new")
"""by old, by new: answers of servers with the old and the new configuration."""

KILL = f"{NAMES[-1]} is killed"


def restarts(server: str) -> str:
    """The phase from SIGTERM until the new server takes requests."""
    return f"{server} restarts"


def replaced(server: str) -> str:
    """The phase after it."""
    return f"{server} is replaced"


PHASES = (BEFORE, *(phase(name) for name in NAMES for phase in (restarts, replaced)), KILL)


def outcome(answer: Answer, texts: Texts) -> str:
    """One of OUTCOMES."""
    if answer.status is not None and answer.status != 200:
        return "refused"
    if answer.error is not None:
        return "failed"
    if answer.num_last > 1 or answer.num_tokens > answer.max_tokens:
        return "answered twice"
    is_whole = answer.num_tokens == answer.max_tokens
    is_right = answer.text == texts.expected(answer.seed, answer.max_tokens)
    return "answered" if is_whole and is_right else "wrong text"


def summary_of(
    answers: Sequence[Answer],
    victims: Sequence[int],
    statistics: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """The JSON document. victims: seeds of the streams that the killed server had.

    A request counts as sent in the phase in which it was sent, and otherwise in that in which it
    ended.
    """
    texts = Texts()
    phases: dict[str, Counter[str]] = {name: Counter() for name in PHASES}
    failed = []
    for answer in answers:
        result = outcome(answer, texts)
        phases[answer.sent_in]["sent"] += 1
        phases[answer.ended_in][result] += 1
        if result == "answered":
            phases[answer.ended_in]["by old" if answer.drafted else "by new"] += 1
        elif result == "failed":
            failed.append(answer)
    backend = statistics["BACKEND"]
    return {
        "phases": {name: {one: phase[one] for one in COLUMNS} for name, phase in phases.items()},
        "refusals": dict(Counter(a.error for a in answers if a.status not in (None, 200))),
        "errors": dict(Counter(a.error for a in failed)),
        "sent_again": int(backend["wretr"]),
        "streams_of_the_killed_server": len(victims),
        "failed_of_the_killed_server": sum(a.seed in set(victims) for a in failed),
        "promises": _promises(answers, phases, failed, set(victims)),
    }


def _promises(
    answers: Sequence[Answer],
    phases: Mapping[str, Counter[str]],
    failed: Sequence[Answer],
    victims: set[int],
) -> dict[str, bool]:
    total: Counter[str] = sum(phases.values(), Counter())
    return {
        "no accepted request failed during the restarts": all(a.ended_in == KILL for a in failed),
        "no request was refused": not total["refused"],
        "no request was answered twice": not total["answered twice"],
        "no text was cut or changed": not total["wrong text"],
        "replaced servers answered with the new configuration": not any(map(_is_late, answers)),
        "the kill ended streams of the killed server, each with an error": bool(failed),
        "the kill ended no other stream": all(a.seed in victims for a in failed),
        "every request ended": total["sent"] == sum(total[name] for name in OUTCOMES),
    }


def _is_late(answer: Answer) -> bool:
    """Whether the old configuration answered a request that was sent after the restart."""
    if not answer.drafted or answer.server not in NAMES:
        return False
    since = PHASES.index(replaced(answer.server))
    return since <= PHASES.index(answer.sent_in) < PHASES.index(KILL)


def table_of(summary: Mapping[str, Any]) -> Table:
    table = Table()
    table.add_column("phase", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    total: Counter[str] = Counter()
    for name, phase in summary["phases"].items():
        total.update(phase)
        table.add_row(name, *(str(phase[column]) for column in COLUMNS))
    table.add_section()
    table.add_row("all", *(str(total[column]) for column in COLUMNS))
    return table
