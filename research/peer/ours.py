"""This repository's loop and PyTorch engine, in one process without Triton."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from peer.worker import Done, Job, Settings, serve
from smartspec_cli.commands.settings import checked_config, pair_settings
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_testing.local import generate

NO_END = -1


def start(settings: Settings) -> Callable[[Job], Done]:
    config = checked_config(
        {
            "engine": pair_settings(
                Path(settings.target), Path(settings.draft), settings.dtype, settings.num_threads
            ),
            "limits": {
                "max_sequences": settings.max_sequences,
                "max_context_len": settings.max_context_len,
            },
        }
    )
    server = Server(build_engine(config, Path.cwd()), config)
    server.start()

    def run(job: Job) -> Done:
        requests = [
            GenerateParams(
                text=prompt,
                max_tokens=job.max_tokens,
                policy=job.policy,
                end_id=NO_END,
                reuse_prefix=False,
            )
            for prompt in job.prompts
        ]
        start_s = time.perf_counter()
        sinks = generate(server, requests)
        seconds = time.perf_counter() - start_s
        failed = next((sink.error for sink in sinks if sink.error), None)
        if failed:
            raise RuntimeError(str(failed))
        return Done(seconds, sum(sink.num_tokens for sink in sinks), [sink.text for sink in sinks])

    return run


if __name__ == "__main__":
    serve(start)
