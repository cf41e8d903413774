"""Sends hostile requests in batches, with a normal request after each batch. Prints a table."""

from __future__ import annotations

import argparse
import ipaddress
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from hostile_http.bodies import BODIES
from hostile_http.case import Case
from hostile_http.client import body_limit, carry_out, normal_request
from hostile_http.framing import FRAMINGS, slow_cases
from hostile_http.processes import Held, held

BATCH = 100
MAX_SHOWN = 20


@dataclass
class Result:
    """The results of a run. surprises: unexpected answers, with the name to repeat the case."""

    num_by_kind: Counter[str] = field(default_factory=Counter)
    surprises_by_kind: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)

    def add(self, name: str, case: Case, problem: str) -> None:
        self.num_by_kind[case.kind] += 1
        if problem:
            self.surprises_by_kind[case.kind] += 1
            self.surprises.append(f"{name}, {case.kind}: {problem}")


def run(
    address: tuple[str, int],
    count: int,
    seed: int,
    concurrency: int,
    max_s: float,
    *,
    is_slow: bool,
) -> Result:
    """Run `count` cases, or those that begin within max_s. is_slow: also run the slow cases."""
    limit = body_limit(address)
    result = Result()
    deadline = time.monotonic() + max_s
    slow = slow_cases() if is_slow else []
    with ThreadPoolExecutor(concurrency + len(slow)) as pool:
        waiting = [(each, pool.submit(carry_out, each, address)) for each in slow]
        for first in range(0, count, BATCH):
            if time.monotonic() > deadline or len(result.surprises) > MAX_SHOWN:
                break
            last = min(first + BATCH, count)
            _run_batch(pool, address, list(_cases(seed, first, last, limit)), result)
            if problem := normal_request(address):
                result.surprises.append(f"a normal request after case {last - 1}: {problem}")
        _take(waiting, "slow", result)
    if problem := normal_request(address):
        result.surprises.append(f"a normal request at the end: {problem}")
    return result


def _cases(seed: int, first: int, last: int, limit: int) -> Iterator[tuple[str, Case]]:
    """The cases with these numbers. The same seed and number give the same case."""
    for number in range(first, last):
        name = f"{seed}/{number}"
        source = random.Random(name)
        yield name, source.choice(source.choice((BODIES, FRAMINGS)))(source, limit)


def _run_batch(
    pool: ThreadPoolExecutor,
    address: tuple[str, int],
    cases: Sequence[tuple[str, Case]],
    result: Result,
) -> None:
    sent = [(name, case, pool.submit(carry_out, case, address)) for name, case in cases]
    for name, case, problem in sent:
        result.add(name, case, problem.result())


def _take(waiting: Sequence[tuple[Case, Future[str]]], name: str, result: Result) -> None:
    for case, problem in waiting:
        result.add(name, case, problem.result())


def report(result: Result, before: Held | None, after: Held | None) -> None:
    print(f"{'kind':28}{'sent':>7}{'surprises':>11}")
    for kind, sent in sorted(result.num_by_kind.items()):
        print(f"{kind:28}{sent:7}{result.surprises_by_kind[kind]:11}")
    print(f"{'all':28}{result.num_by_kind.total():7}{len(result.surprises):11}")
    for surprise in result.surprises[:MAX_SHOWN]:
        print(surprise)
    if before is not None and after is not None:
        print(f"{'held':28}{'before':>10}{'after':>10}")
        for name, value in vars(before).items():
            print(f"{name:28}{value:10.0f}{vars(after)[name]:10.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/hostile", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-s", type=float, default=1800.0, help="time limit in seconds")
    parser.add_argument("--pid", type=int, help="process id of `smartspec serve` on this machine")
    parser.add_argument("--no-slow", action="store_true", help="skip the cases that wait 30 s")
    parser.add_argument(
        "--allow-remote", action="store_true", help="allow an address other than loopback"
    )
    asked = parser.parse_args()
    url = urlsplit(asked.url)
    host = socket.gethostbyname(url.hostname or "")
    if not (asked.allow_remote or ipaddress.ip_address(host).is_loopback):
        parser.error(
            f"--url: {url.hostname} is not loopback; to attack it anyway, use --allow-remote"
        )
    address = (host, url.port or 8000)
    before = None if asked.pid is None else held(asked.pid)
    result = run(
        address, asked.count, asked.seed, asked.concurrency, asked.max_s, is_slow=not asked.no_slow
    )
    report(result, before, None if asked.pid is None else held(asked.pid))
    return 1 if result.surprises else 0


if __name__ == "__main__":
    sys.exit(main())
