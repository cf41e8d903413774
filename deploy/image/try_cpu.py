"""Runs the CPU stages of the Dockerfile without a container engine, and serves from the result.

It runs every COPY and RUN of the stages on their real paths. A mount namespace provides these paths
as empty directories in memory. Then the rest of the file system becomes read-only. The program runs
the entry command, the health check, one request, and a stop by SIGTERM during a stream.

It does not test NVIDIA's base image, the user of the image or the image file. This machine's Python
replaces the Python of the base image. Triton from the wheel, with NumPy 1, replaces its Triton. The
wheel's Triton is older and therefore listens only on loopback. Run the program with
`scripts/check_image`, which creates the namespace.

    try_cpu.py FILE     writes the versions that pip installed to FILE
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

from containerfile import Copy, Stage, parse_copy, read_stages
from requirements import PYPROJECT, requirements

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = ("/dist", "/opt/smartspec", "/models", "/var/cache/smartspec")
"""Paths that a later stage copies from an earlier one. All stages share one directory for each."""

OWN = "/src"
"""A path that is separate for each stage: it is cleared before a stage."""

STAGES = ("wheel", "cpu")
IMAGE_PYTHON = "/opt/smartspec/bin/python"
URL = "http://127.0.0.1:8000/v2/models/smartspec"
READY_S = 180.0
STOP_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="file for the versions that pip installed")
    file = parser.parse_args().file
    stages = read_stages(REPOSITORY / "Dockerfile")
    for folder in (*SHARED, OWN):
        subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    # The base interpreter of this virtual environment replaces that of the base image.
    environment = {**kept, "PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    for name in STAGES:
        print(f"== {name}", flush=True)
        carry_out(stages[name], environment)
    pip = [f"{sys.base_prefix}/bin/python3", "-m", "pip", "--python", IMAGE_PYTHON]
    versions = subprocess.check_output([*pip, "list", "--format=freeze"], env=environment)
    file.write_bytes(versions)
    print("== Triton of the wheel", flush=True)
    wheel = requirements(tomllib.loads(PYPROJECT.read_text(encoding="utf-8")), ["triton"])
    subprocess.run([*pip, "install", "--no-cache-dir", *wheel], env=environment, check=True)
    environment["SMARTSPEC_HOST"] = "127.0.0.1"
    serve(stages["cpu"], environment)


def carry_out(stage: Stage, environment: dict[str, str]) -> None:
    """Run the instructions of the stage in order. ENV changes `environment`."""
    clear(Path(OWN))
    folder = Path("/")
    for instruction in stage.instructions:
        match instruction.word:
            case "WORKDIR":
                folder = Path(instruction.rest)
            case "ENV":
                set_variables(instruction.rest, environment)
            case "COPY":
                copy(parse_copy(instruction.rest), folder)
            case "RUN" if not instruction.rest.startswith("useradd"):
                print("RUN", instruction.rest, flush=True)
                command = ["sh", "-euc", instruction.rest]
                subprocess.run(command, cwd=folder, env=environment, check=True)


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def set_variables(rest: str, environment: dict[str, str]) -> None:
    for word in shlex.split(rest):
        key, _, value = word.partition("=")
        environment[key] = value.replace("$PATH", environment["PATH"])


def copy(what: Copy, folder: Path) -> None:
    """Copy from the build context. Files of another stage already exist: see SHARED."""
    if what.source_stage is not None:
        return
    target = folder / what.target
    for source in (REPOSITORY / name for name in what.sources):
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
            continue
        into = target / source.name if what.target.endswith("/") else target
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, into)


def serve(stage: Stage, environment: dict[str, str]) -> None:
    """Start the entry command, send one request, and stop it during a stream.

    Raises an error if one of these fails.
    """
    command = json.loads(stage.all("ENTRYPOINT")[-1])
    health = json.loads(stage.all("HEALTHCHECK")[-1].partition("CMD ")[2])
    print("==", *command, flush=True)
    # Read-only as in the chart and compose.yaml, except for the directories that they mount.
    subprocess.run(["mount", "-t", "tmpfs", "none", "/tmp"], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", "/"], check=True)
    process = subprocess.Popen(command, env=environment, cwd="/")
    try:
        wait_healthy(health, environment, process)
        print(ask("generate", {"text_input": "Hello", "max_tokens": 8}).decode(), flush=True)
        check_drain(process)
    finally:
        process.kill()


def wait_healthy(
    health: list[str], environment: dict[str, str], process: subprocess.Popen[bytes]
) -> None:
    deadline = time.monotonic() + READY_S
    while subprocess.run(health, env=environment, stderr=subprocess.DEVNULL).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the entry command did not become healthy")
        time.sleep(1.0)


def check_drain(process: subprocess.Popen[bytes]) -> None:
    body = {"text_input": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with urllib.request.urlopen(post("generate_stream", body)) as stream:
        events = [stream.readline()]
        process.send_signal(signal.SIGTERM)
        events += [line for line in stream if line.startswith(b"data:")]
    code = process.wait(STOP_S)
    last = json.loads(events[-1].removeprefix(b"data:"))
    print(f"stopped with {code} after {len(events)} events: {last}", flush=True)
    if code != 0 or last.get("finish_reason") != "length":
        raise SystemExit("the stream was cut off by SIGTERM")


def ask(path: str, body: dict[str, object]) -> bytes:
    with urllib.request.urlopen(post(path, body)) as response:
        answer: bytes = response.read()
    return answer


def post(path: str, body: dict[str, object]) -> urllib.request.Request:
    return urllib.request.Request(f"{URL}/{path}", json.dumps(body).encode())


if __name__ == "__main__":
    main()
