"""Installs clients of other projects and runs them unchanged against a server.

Each client runs twice: with a scripted engine behind the tokenizer and the chat template of the
model, which writes the texts of script.json, and with the model itself, which shows that any text
works. Results of earlier runs with the same model are kept for the table. Requests and answers are
kept in .smartspec/clients/traffic.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from install import CLIENTS, HERE, Client, command, install
from table import Result, as_text, page_with, with_model
from tee import Tee

ROOT = HERE.parents[1]
CACHE = ROOT / ".smartspec" / "clients"
PAGE = ROOT / "docs" / "operate" / "clients.md"
SCRIPTED, MODEL = "scripted", "model"
CASE_S = {SCRIPTED: 90, MODEL: 400}
"""Seconds for a case. A model of 0.5 B reads the 19,000 tokens of an agent in minutes on a CPU."""

NUM_CASES = 18
"""At most, of a client; see cases.py."""

END_S = 5.0


@contextmanager
def server(model: Path, engine: str) -> Iterator[int]:
    """The port of the OpenAI routes of a server that is ready."""
    from smartspec_launch.address import free_address
    from smartspec_launch.foreground import signals_interrupt
    from smartspec_launch.gateway import OpenAi
    from smartspec_launch.triton_server import TritonServer
    from smartspec_py.config import LimitsConfig, LocalEngineConfig, ServerConfig
    from smartspec_py.engines.checkpoints.gguf.folder import model_folder
    from smartspec_testing.engines import ScriptedConfig

    folder = model_folder(model)
    script = str(HERE / "script.json")
    engines = {
        SCRIPTED: ScriptedConfig(kind="scripted", tokenizer=str(folder), script=script),
        MODEL: LocalEngineConfig(
            model=str(folder), profile_cache=str(ROOT / ".smartspec/profiles")
        ),
    }
    limits = LimitsConfig(max_sequences=2, max_context_len=32768 if engine == SCRIPTED else None)
    config = ServerConfig(engine=engines[engine], limits=limits)
    openai = OpenAi(free_address().http_port, folder)
    run_dir = CACHE / f"run-{os.getpid()}-{engine}"
    with (
        signals_interrupt(),
        TritonServer(config, run_dir, free_address(), openai=openai) as started,
    ):
        started.wait_ready()
        yield openai.port


def results_of(client: Client, engine: str, tee: Tee) -> Iterator[Result]:
    """Run the client's program, and end it by its process group if it does not end."""
    tee.begin(f"{engine}-{client.name}")
    where = {"BASE_URL": f"http://127.0.0.1:{tee.port}", "FOLDER": str(CACHE / client.name)}
    how = {"EXACT": str(int(engine == SCRIPTED)), "CASE_S": str(CASE_S[engine])}
    log = CACHE / f"{client.name}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command(client, CACHE / client.name),
            env=os.environ | where | how | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    watchdog = threading.Timer(NUM_CASES * CASE_S[engine], _end, (process,))
    watchdog.start()
    about, num_results = (client.name, client.versions, engine), 0
    try:
        for line in process.stdout or ():
            if line.startswith('{"route"'):
                num_results += 1
                yield _result(about, json.loads(line), tee.taken())
        process.wait()
    finally:
        watchdog.cancel()
        _end(process)
    if process.returncode or not num_results:
        tail = " ".join(log.read_text(errors="replace").split())[-200:]
        yield Result(*about, "-", "plain", f"exit code {process.returncode}: {tail}")


def _result(about: tuple[str, str, str], fields: dict[str, str], refusals: list[str]) -> Result:
    """If the case failed and the server refused something, that is the reason."""
    if fields["error"] and refusals:
        fields["error"] = refusals[0]
    return Result(*about, **fields)


def _end(process: subprocess.Popen) -> None:
    """Let the program end its agent; then end it and its other children, a group of their own."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        process.terminate()
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def check(model: Path, engines: Sequence[str], clients: Sequence[Client]) -> Iterator[Result]:
    """Results of all clients that can be installed; others have one that says why not."""
    ready = []
    for client in clients:
        if reason := install(client, CACHE / client.name):
            why = f"not installed: {reason}"
            yield Result(client.name, client.versions, "-", "-", "plain", why)
        else:
            ready.append(client)
    traffic = CACHE / "traffic"
    traffic.mkdir(parents=True, exist_ok=True)
    for engine in engines:
        with server(model, engine) as port, closing(Tee(port, traffic)) as tee:
            for client in ready:
                yield from results_of(client, engine, tee)


def earlier(path: Path, engines: Sequence[str], clients: Sequence[Client]) -> list[Result]:
    """Stored results of what does not run now."""
    stored = [Result(**one) for one in json.loads(path.read_text())] if path.is_file() else []
    names = {client.name for client in clients}
    pinned = {(client.name, client.versions) for client in CLIENTS}
    return [
        one
        for one in stored
        if (one.client, one.versions) in pinned
        and (one.client not in names or one.engine not in (*engines, "-"))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file or folder; default: the quickstart's")
    parser.add_argument("--engine", choices=(SCRIPTED, MODEL), help="default: both")
    parser.add_argument("--client", action="append", help="default: all; may be repeated")
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE.name}")
    given = parser.parse_args()
    from smartspec_bench.real_model import served

    names = {client.name for client in CLIENTS}
    if unknown := set(given.client or ()) - names:
        parser.error(f"--client: got {', '.join(unknown)}, must be one of {', '.join(names)}")
    model = served(given.model, None)[0]
    chosen = [one for one in CLIENTS if not given.client or one.name in given.client]
    engines = [given.engine] if given.engine else [SCRIPTED, MODEL]
    path = CACHE / f"results-{model.stem}.json"
    results = earlier(path, engines, chosen)
    for result in check(model, engines, chosen):
        print(result.line, flush=True)
        results.append(result)
        path.write_text(json.dumps([asdict(one) for one in results]))
    order = [client.name for client in CLIENTS]
    results.sort(key=lambda one: order.index(one.client))
    print(as_text(results), with_model(results), sep="\n")
    if given.write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), results, model.stem))
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main())
