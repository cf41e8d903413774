"""Options beside Locust's own, on its command line and in its page's form."""

from __future__ import annotations

from locust.argument_parser import LocustArgumentParser
from stages import SCENARIOS

from smartspec_bench.prompts import MIXED
from smartspec_bench.workloads import WORKLOADS

RUN_S = 60
STOP_S = 30
NUM_USERS = 8


def add_options(parser: LocustArgumentParser) -> None:
    """Every run is bounded, and those that are out at its end may finish, unless asked otherwise:
    requests that are cut off are the long ones, and without them latencies look too good."""
    parser.set_defaults(
        num_users=NUM_USERS,
        run_time=RUN_S,
        stop_timeout=STOP_S,
        host="http://127.0.0.1:8000",
        web_host="127.0.0.1",  # Locust's page asks nobody for a password, and names files to write
    )
    add = parser.add_argument  # of a group of its own the page would show nothing
    workloads = (*WORKLOADS, MIXED)
    add("--scenario", choices=list(SCENARIOS), default="steady", help="How users come and go.")
    add("--scale", type=float, default=1.0, help="Times the users of step: 1, 16, 48.")
    add("--workload", choices=workloads, default=MIXED, help="What users ask.")
    add("--shift-to", choices=workloads, default="chat", help="From the middle of shift on.")
    add("--prompts", default="", help="Instead of --workload: a JSONL file, plain or ShareGPT.")
    add("--max-tokens", type=int, default=64, help="Of prompts that name none.")
    add("--temperature", type=float, default=0.0, help="0 is greedy.")
    add("--policy", default="", help="Other than the server's own.")
    add("--fields", default="", help='More of each request: {"ignore_eos": true}.')
    add("--grpc", default="127.0.0.1:8001", help="gRPC address, HOST:PORT, of GrpcUser.")
    lines = "A line a request; each start of a run writes it anew."
    add("--jsonl", default="", help=lines, include_in_web_ui=False)
    add("--max-requests", type=int, default=100_000, help="The run ends after so many.")
    add("--request-timeout", type=float, default=300.0, help="Seconds for each request.")
