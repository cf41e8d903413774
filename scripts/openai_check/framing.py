"""The cases of `scripts/hostile` with chunks, headers and broken connections, for the endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from urllib.parse import urlsplit

from hostile_http.bodies import BODIES
from hostile_http.case import GENERATE, STREAM, Case, request
from hostile_http.client import carry_out
from hostile_http.framing import FRAMINGS, slow_cases

from openai_check.external import CheckFailed

PATH = "/v1/completions"
LIMIT = 8 << 20
NO_FAULT = frozenset({200, *range(400, 500), 501, 505})
"""Any refusal, but no fault of the server. The bodies are those of another interface."""

NORMAL = json.dumps({"prompt": "a", "max_tokens": 2}).encode()


def hostile(url: str, count: int) -> str:
    """Raises CheckFailed if the endpoint had a fault, or did not answer a normal request."""
    parts = urlsplit(url)
    address = (str(parts.hostname), int(parts.port or 80))
    problems = []
    cases = [*map(_own, slow_cases()), *_cases(count)]
    with ThreadPoolExecutor(24) as pool:
        results = pool.map(lambda one: carry_out(one, address), cases)
        for case, found in zip(cases, results, strict=True):
            if found and not found.startswith("200 with"):
                problems.append(f"{case.kind}: {found}")
    normal = Case("normal", [_sent(request(NORMAL))], [frozenset({200})])
    if (found := carry_out(normal, address)) and not found.startswith("200 with"):
        problems.append(f"a normal request: {found}")
    if problems:
        raise CheckFailed("\n".join(problems[:10]))
    return f"{len(cases)} connections, then a normal request"


def _cases(count: int) -> Iterator[Case]:
    for number in range(count):
        source = Random(f"1/{number}")
        yield _own(source.choice(source.choice((BODIES, FRAMINGS)))(source, LIMIT))


def _own(case: Case) -> Case:
    steps = [_sent(step) if isinstance(step, bytes) else step for step in case.steps]
    return replace(case, steps=steps, expected=[NO_FAULT for _ in case.expected])


def _sent(step: bytes) -> bytes:
    """The same for the endpoint's path. Bodies stay, because their sizes were announced."""
    for path in (STREAM, GENERATE):
        step = step.replace(path.encode(), PATH.encode())
    return step.replace(b"Host: localhost", b"Host: localhost\r\nContent-Type: application/json")
