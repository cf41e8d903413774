"""Builds the CPU image and tries it with docker, podman or buildah, whichever works here.

    scripts/check_image [--with PROGRAM] [--models FOLDER] [BUILD OPTIONS]
        --with    docker, podman or buildah; default: the first one that works
        --models  a model repository to serve instead of the tiny pair of the image
        others    go to the program's `build`, such as --build-arg TORCH_INDEX=URL

The container has a read-only root and an empty volume. It must become ready, pass its health check,
answer requests, and drain 8 streams on SIGTERM. A second container on the same volume must not
measure again. The image stays as smartspec:cpu; containers and the volume are removed. Exit status:
0 if all is as it must be.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from containers import USER, Containers, found

IMAGE = "smartspec:cpu"
NUM_STREAMS = 8
NUM_TOKENS = 800
"""Of each stream: so many that all are open at the signal, and may finish in `limits.drain_s`."""

START_S = 600.0
ANSWER_S = 120.0
LOOK_S = 0.1
HTTP, METRICS, OPENAI = 8000, 8002, 9000
READY = "/v2/models/smartspec/ready"
MEASURING = "measuring costs"
ANEW = "was measured on a busy machine: measuring again"
"""In the log. Costs on the volume are measured again if the machine was busy before."""

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class CheckError(Exception):
    """Names what is not as it must be."""


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--with", dest="program", choices=["docker", "podman", "buildah"])
    parser.add_argument("--models", type=Path)
    arguments, options = parser.parse_known_args()
    try:
        containers = found(arguments.program)
        print(containers.isolation, flush=True)
        begin = time.monotonic()
        containers.build(IMAGE, options)
        say(f"built in {time.monotonic() - begin:.0f} s: {containers.size(IMAGE)}")
        check(containers, arguments.models and arguments.models.resolve())
    except (LookupError, OSError, subprocess.CalledProcessError, CheckError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def check(containers: Containers, models: Path | None) -> None:
    """Raises CheckError."""
    try:
        start(containers, models)
        check_rights(containers)
        check_answers(containers)
        check_drain(containers)
        expect("measuring at the first start", MEASURING in containers.log().lower(), True)
        containers.remove()
        start(containers, models)
        log = containers.log().lower()
        expect("costs from the volume", MEASURING not in log or ANEW in log, True)
        say(f"stopped without requests in {stopped(containers):.1f} s")
    except (OSError, CheckError):
        print(containers.log(), file=sys.stderr)
        raise
    finally:
        containers.remove()
        containers.remove_volume()


def start(containers: Containers, models: Path | None) -> None:
    begin = time.monotonic()
    containers.start(IMAGE, models)
    while status(containers) != 200:
        expect("a container that runs", containers.is_running(), True)
        expect(f"a start in {START_S:g} s", time.monotonic() - begin < START_S, True)
        time.sleep(LOOK_S)
    say(f"ready in {time.monotonic() - begin:.1f} s")


def check_rights(containers: Containers) -> None:
    expect("the user", containers.run("id", "-u").stdout.strip(), str(USER))
    for path in ("/x", "/var/x", "/opt/smartspec/x"):
        error = containers.run("touch", path).stderr.strip()
        expect(f"writing {path}", error.endswith("Read-only file system"), True)
    say(f"user {USER}, read-only root")


def check_answers(containers: Containers) -> None:
    health = containers.run("python", "/opt/smartspec/healthcheck.py")
    expect("exit status of the health check", health.returncode, 0)
    fields = {"text_input": "Once", "max_tokens": 8}
    with posted(containers, HTTP, "/v2/models/smartspec/generate", fields) as answer:
        expect("text of generate", bool(json.load(answer)["text_output"]), True)
    chat = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 8}
    with posted(containers, OPENAI, "/v1/chat/completions", chat) as answer:
        expect("tokens of a chat", json.load(answer)["usage"]["completion_tokens"] > 0, True)
    begin = time.monotonic()
    while "smartspec_num_requests_running" not in metrics(containers):  # they are up to 1 s late
        expect("metrics in time", time.monotonic() - begin < ANSWER_S, True)
        time.sleep(LOOK_S)
    say("health check, generate, chat, metrics: answered")


def check_drain(containers: Containers) -> None:
    """Every stream is open at the signal and has a last event, and new requests get 503."""
    begun = [Event() for _ in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS + 1) as pool:
        streams = [pool.submit(last_event, containers, each) for each in begun]
        for each in begun:
            expect("the first event of a stream", each.wait(ANSWER_S), True)
        expect("streams that ended before the signal", sum(each.done() for each in streams), 0)
        stop = pool.submit(stopped, containers)
        while (answer := status(containers)) == 200:
            time.sleep(LOOK_S)
        expect("readiness during the drain", answer, 503)
        ends = Counter(stream.result() for stream in streams)
        seconds = stop.result()
    expect("streams that broke off", ends["broken"], 0)
    counts = ", ".join(f"{count} {end}" for end, count in ends.items())
    say(f"{NUM_STREAMS} streams drained in {seconds:.1f} s: {counts}")


def last_event(containers: Containers, begun: Event) -> str:
    """Read a stream to its end. Returns whether it has finished, was ended by the server with an
    error, or has broken off."""
    fields = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    last = ""
    with posted(containers, OPENAI, "/v1/completions", {**fields, "stream": True}) as answer:
        for line in answer:
            begun.set()
            last = line.decode().strip() or last
    if last == "data: [DONE]":
        return "finished"
    return "ended after limits.drain_s" if last.startswith('data: {"error"') else "broken"


def stopped(containers: Containers) -> float:
    """Stop the container. Returns the seconds until it has ended."""
    begin = time.monotonic()
    expect("exit code after SIGTERM", containers.stop(), 0)
    return time.monotonic() - begin


def status(containers: Containers) -> int | None:
    """The status of the readiness check; None without an answer."""
    try:
        with DIRECT.open(url(containers, HTTP, READY), timeout=ANSWER_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return None


def metrics(containers: Containers) -> str:
    with DIRECT.open(url(containers, METRICS, "/metrics"), timeout=ANSWER_S) as answer:
        return str(answer.read(), "utf-8")


def posted(containers: Containers, port: int, path: str, fields: dict[str, Any]) -> Any:
    """The answer to a JSON body. Raises HTTPError, OSError."""
    headers = {"Content-Type": "application/json"}
    body = json.dumps(fields).encode()
    request = urllib.request.Request(url(containers, port, path), body, headers)
    return DIRECT.open(request, timeout=ANSWER_S)


def url(containers: Containers, port: int, path: str) -> str:
    return f"http://127.0.0.1:{containers.port(port)}{path}"


def expect(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise CheckError(f"{what}: got {got}, must be {wanted}")


def say(text: str) -> None:
    print(f"  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
