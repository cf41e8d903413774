"""Options in addition to Locust's own, on its command line and in the form of its page."""

from __future__ import annotations

from locust.argument_parser import LocustArgumentParser
from stages import SCENARIOS

from smartspec_bench.prompts import MIXED
from smartspec_bench.workloads import WORKLOADS

RUN_S = 60
STOP_S = 30
NUM_USERS = 8


def add_options(parser: LocustArgumentParser) -> None:
    """Add the options and set Locust's defaults.

    By default a run has a time limit, and requests in flight at its end may finish. Cut requests
    are mostly long ones, and without them latencies look too good.
    """
    parser.set_defaults(
        num_users=NUM_USERS,
        run_time=RUN_S,
        stop_timeout=STOP_S,
        host="http://127.0.0.1:8000",
        web_host="127.0.0.1",  # Locust's page has no password, and its form names files to write
    )
    add = parser.add_argument  # Locust's page does not show options of an argument group
    workloads = (*WORKLOADS, MIXED)
    add("--scenario", choices=list(SCENARIOS), default="steady", help="Number of users over time.")
    add("--scale", type=float, default=1.0, help="Factor of the users of step: 1, 16, 48.")
    add("--workload", choices=workloads, default=MIXED, help="Workload of the prompts.")
    add(
        "--shift-to",
        choices=workloads,
        default="chat",
        help="Workload in the second half of shift.",
    )
    add("--prompts", default="", help="Instead of --workload: a JSONL file, plain or ShareGPT.")
    add("--max-tokens", type=int, default=64, help="Tokens for prompts without max_tokens.")
    add("--temperature", type=float, default=0.0, help="Sampling temperature; 0 is greedy.")
    add("--policy", default="", help="Policy of the requests; default: the server's.")
    add("--fields", default="", help='More request fields, as JSON: {"ignore_eos": true}.')
    add("--grpc", default="127.0.0.1:8001", help="gRPC address of GrpcUser, HOST:PORT.")
    lines = "File for one JSON line per request. Each run overwrites it."
    add("--jsonl", default="", help=lines, include_in_web_ui=False)
    add("--max-requests", type=int, default=100_000, help="The run ends after this many requests.")
    add("--request-timeout", type=float, default=300.0, help="Timeout of a request in seconds.")
