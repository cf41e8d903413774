"""Runs the checks of the endpoint against a server that it starts. Prints a table."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import aiohttp

from openai_check import external
from openai_check.bodies import problem, random_body
from openai_check.external import CheckFailed
from openai_check.framing import hostile
from openai_check.served import Served, served
from openai_check.streams import drop_streams

Check = Callable[[Served], str]
WARM_UP = 0.3
"""Share of the streams after which memory is read for the first time."""


def fuzz(found: Served, count: int) -> str:
    """Random bodies, eight at once."""
    return asyncio.run(_fuzz(found.url, count))


async def _fuzz(url: str, count: int) -> str:
    statuses: Counter[int] = Counter()
    problems: list[str] = []
    free = asyncio.Semaphore(8)
    headers = {"Content-Type": "application/json"}

    async with aiohttp.ClientSession() as session:

        async def one(number: int) -> None:
            path, body = random_body(random.Random(f"1/{number}"))
            async with free, session.post(url + path, data=body, headers=headers) as response:
                found = problem(response.status, await response.read())
            statuses[response.status] += 1
            problems.extend([f"body {number}: {found}"] if found else [])

        await asyncio.gather(*map(one, range(count)))
    if problems:
        raise CheckFailed("\n".join(problems[:10]))
    return f"{count} bodies: " + ", ".join(f"{n} x {s}" for s, n in sorted(statuses.items()))


def streams(found: Served, count: int) -> str:
    """Streams that are dropped. Memory is compared after a part of them and at the end."""
    num_first = int(WARM_UP * count)
    asyncio.run(drop_streams(found.url, num_first, 16, 1))
    if not found.wait_idle():
        raise CheckFailed(f"{found.num_open()} requests are left in Triton")
    before = found.held()
    asyncio.run(drop_streams(found.url, count - num_first, 16, 2))
    if not found.wait_idle():
        raise CheckFailed(f"{found.num_open()} requests are left in Triton")
    after = found.held()
    held = [
        f"{name} {before[name][0]:.0f} -> {mib:.0f} MiB, {before[name][1]} -> {files} files"
        for name, (mib, files) in after.items()
    ]
    return f"{count} streams, none left; " + "; ".join(held)


def checks(environment: Path | None, share: float) -> dict[str, Check]:
    """By name. environment: the folder of the other clients' programs; None leaves them out."""
    found: dict[str, Check] = {
        "fuzz": partial(fuzz, count=int(10_000 * share)),
        "streams": partial(streams, count=int(1_000 * share)),
        "hostile": lambda one: hostile(one.url, int(2_000 * share)),
    }
    if environment is not None:
        environment = environment.absolute()
        others = (
            external.openai_sdk,
            external.litellm,
            external.schemathesis,
            external.lm_eval,
            partial(external.guidellm, seconds=max(5, int(60 * share))),
        )
        names = ("openai", "litellm", "schemathesis", "lm_eval", "guidellm")
        for name, check in zip(names, others, strict=True):
            found[name] = lambda one, check=check: check(environment, one.url)  # type: ignore[misc]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/openai_checks", description=__doc__)
    parser.add_argument("names", nargs="*", help="checks to run; default: all")
    parser.add_argument("--environment", type=Path, help="bin folder of the other clients")
    parser.add_argument("--share", type=float, default=1.0, help="of the number of requests")
    asked = parser.parse_args()
    known = checks(asked.environment, asked.share)
    if unknown := set(asked.names) - set(known):
        parser.error(f"unknown checks {sorted(unknown)}; there are {', '.join(known)}")
    num_failed = 0
    with served() as found:
        print(f"endpoint {found.url}, openai {version('openai')}", file=sys.stderr)
        for name in asked.names or known:
            try:
                result, text = "ok", known[name](found)
                if not found.is_up():
                    raise CheckFailed("the server does not answer any more")
            except CheckFailed as error:
                result, text = "failed", str(error)
                num_failed += 1
            print(f"{name:14}{result:8}{text}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
