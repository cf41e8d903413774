"""The table of all metrics: names, kinds, labels, help texts and buckets.

Names follow vLLM and TensorRT-LLM. docs/reference/metrics.md is generated from this table. Triton
adds no suffix to a name, so the names of counters end in `_total` here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from smartspec_py.serving.step import Reason


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """meaning: the help text. labels: names, without model and version. buckets: upper edges."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


FAMILIES: list[Family] = []
"""In the order of the documentation."""


def _counter(name: str, meaning: str, *labels: str) -> Family:
    return _family(name, Kind.COUNTER, meaning, labels=labels)


def _gauge(name: str, meaning: str, *labels: str) -> Family:
    return _family(name, Kind.GAUGE, meaning, labels=labels)


def _histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Family:
    return _family(name, Kind.HISTOGRAM, meaning, buckets=buckets)


def _family(name: str, kind: Kind, meaning: str, **fields: Any) -> Family:
    FAMILIES.append(family := Family(f"smartspec_{name}", kind, meaning, **fields))
    return family


# vLLM's edges, so that dashboards can compare servers, and smaller ones for small models.
# fmt: off
_TTFT_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
           160, 640, 2560)
_TPOT_S = (.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5,
           10, 20, 40, 80)
_E2E_S = (.05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
          960, 1920, 7680)
_QUEUE_S = (.001, .005, .01, .05, .1, .2, *_E2E_S[3:])
_STEP_S = (.001, .002, .003, .004, .006, .008, .01, .015, .02, .03, .04, .06, .08, .1, .15, .2, .3,
           .5, 1, 2, 5)
_LENGTHS = (0, .5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16)
# fmt: on

DRAFTS = _counter("spec_decode_num_drafts_total", "Verifications: steps of a sequence with drafts")
DRAFT_TOKENS = _counter("spec_decode_num_draft_tokens_total", "Tokens drafted")
ACCEPTED = _counter("spec_decode_num_accepted_tokens_total", "Drafted tokens accepted")
DRAFT_TOKENS_AT = _counter(
    "spec_decode_num_draft_tokens_per_pos_total",
    "Verifications with at least so many drafts",
    "position",
)
ACCEPTED_AT = _counter(
    "spec_decode_num_accepted_tokens_per_pos_total",
    "Verifications that accepted at least so many drafts",
    "position",
)
PROPOSED_LENGTHS = _histogram(
    "spec_decode_proposed_length_tokens",
    "Mean drafts per decoding sequence in a step; one step per second",
    _LENGTHS,
)
DISABLED_STEPS = _counter("spec_decode_disabled_steps_total", "Steps of a sequence without drafts")
GOODPUT_PREDICTED = _gauge(
    "token_goodput_predicted_tokens_per_second",
    "Tokens per second of step time that plans expected, in recent steps without prompt chunks",
)
GOODPUT_ACTUAL = _gauge(
    "token_goodput_actual_tokens_per_second", "Tokens per second of step time in the same steps"
)
STEP_PREDICTED = _gauge(
    "step_latency_predicted_seconds", "Mean step time that plans expected of the same steps"
)
STEP_LATENCY = _histogram(
    "step_latency_seconds", "Duration of a step; one step per second", _STEP_S
)
STEP_TIME = _counter("step_time_seconds_total", "Time spent in decoding steps")
HOST_TIME = _counter(
    "request_host_time_seconds_total",
    "Processor time of work for single requests beside passes: grammar, shaping (biases, bans, "
    "penalties), or log_probs (of prompts)",
    "cause",
)
DECIDED = _counter(
    "decoding_steps_total",
    f"Decoding steps by what set the draft lengths: {', '.join(Reason)}",
    "decider",
)
SWITCHES = _counter(
    "guard_switches_total", "Times that the guard turned speculation off or on again"
)
COST_FACTOR = _gauge(
    "cost_factor",
    "Factors on the profile: target_base and target_slope for the target's passes, draft for draft "
    "passes",
    "part",
)
TIME_ERROR = _gauge(
    "step_latency_relative_error",
    "Mean relative error of predicted step times over about 100 steps: profile, and corrected",
    "predictor",
)
DRAFT_TIME = _counter("draft_time_seconds_total", "Time spent drafting")
VERIFY_TIME = _counter("verify_time_seconds_total", "Time spent in the target's decoding passes")
RUNNING = _gauge("num_requests_running", "Requests that are running in the engine")
WAITING = _gauge("num_requests_waiting", "Requests that are waiting")
CACHE = _gauge("kv_cache_utilization", "Used share of the target's cache, 0 to 1")
PREEMPTIONS = _counter("num_preemptions_total", "Times that a running request was preempted")
PROMPT_TOKENS = _counter(
    "prompt_tokens_total", "Prompt tokens computed; cached ones are not counted"
)
GENERATION_TOKENS = _counter(
    "generation_tokens_total", "Tokens generated, including a few after stop words"
)
SUCCESS = _counter("request_success_total", "Requests that finished", "finished_reason")
CANCELLED = _counter("request_cancelled_total", "Requests cancelled by the client or by a shutdown")
FAILED = _counter("request_failed_total", "Accepted requests that ended with an error")
REJECTED = _counter("request_rejected_total", "Requests that were rejected", "reason")
QUEUE_TIME = _histogram(
    "request_queue_time_seconds", "Time from arrival to the start of the prefill", _QUEUE_S
)
TTFT = _histogram("time_to_first_token_seconds", "Time from arrival to the first token", _TTFT_S)
TPOT = _histogram(
    "time_per_output_token_seconds",
    "Mean time per token of a request, from its first token to its last",
    _TPOT_S,
)
E2E = _histogram(
    "e2e_request_latency_seconds",
    "Time from arrival to the last response of requests that finished",
    _E2E_S,
)
CONFIG_INFO = _gauge(
    "config_info",
    "Always 1; the labels say what is served",
    "method",
    "k_max",
    "policy",
    "served_model_name",
)
