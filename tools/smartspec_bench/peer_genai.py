"""OpenVINO GenAI as a server with `/v1/completions`, for `scripts/bench_peer`.

Runs in an environment of its own with openvino-genai, on a model that `optimum-cli export openvino`
has made: python peer_genai.py MODEL --port 8395 [--draft DRAFT | --lookup] [--k 3]. Answers in one
event, so the time to the first token is that to the last one.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

CACHE_GB = 2
IDLE_S = 0.001
MAX_NGRAM = 3


class Pipeline:
    """The continuous-batching pipeline, and the thread that runs its steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        import openvino_genai as genai

        self._genai, self._ids = genai, count()
        self._k = options.k if options.draft or options.lookup else 0
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": options.threads,
            "INFERENCE_PRECISION_HINT": options.precision,
            "KV_CACHE_PRECISION": options.precision,
        }
        draft: dict[str, Any] = {"prompt_lookup": True} if options.lookup else {}
        if options.draft:
            draft["draft_model"] = genai.draft_model(options.draft, "CPU", **properties)
        self._pipeline = genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", {**properties, **draft}
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        threading.Thread(target=self._steps, daemon=True).start()

    def _steps(self) -> None:
        while True:
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            else:
                time.sleep(IDLE_S)

    def complete(self, prompt: str, max_tokens: int) -> tuple[str, int]:
        """The text, and its number of tokens."""
        config = self._genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False
        )
        if self._k:
            config.num_assistant_tokens = self._k
            config.max_ngram_size = MAX_NGRAM  # of prompt lookup
        inputs = self._tokenizer.encode(prompt).input_ids
        handle = self._pipeline.add_request(next(self._ids), inputs, config)
        # `read_all` would wait with Python's lock, which the thread of the steps needs.
        while handle.get_status() == self._genai.GenerationStatus.RUNNING:
            time.sleep(IDLE_S)
        tokens = list(handle.read_all()[0].generated_ids)
        return str(self._tokenizer.decode(tokens)), len(tokens)


class Handler(BaseHTTPRequestHandler):
    pipeline: Pipeline

    def do_GET(self) -> None:
        self._answer(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, num_tokens = self.pipeline.complete(body["prompt"], body["max_tokens"])
        event = {"choices": [{"text": text}], "usage": {"completion_tokens": num_tokens}}
        self._answer(f"data: {json.dumps(event)}\n\n".encode())

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8395)
    parser.add_argument("--draft")
    parser.add_argument("--lookup", action="store_true", help="drafts by prompt lookup")
    parser.add_argument("--k", type=int, default=3, help="drafts per step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="f32", help="f32 or bf16")
    options = parser.parse_args()
    Handler.pipeline = Pipeline(options)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
