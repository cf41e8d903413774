"""Every metric that the server shows, in one table: names, kinds, labels, help, buckets.

Stems are vLLM's and TensorRT-LLM's; docs/metrics.md is made from this table. Triton adds nothing to
a name, so counters end in `_total` here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Labels = tuple[tuple[str, str], ...]
"""Names and values, in the order of the family's own labels."""

Series = tuple[str, Labels]


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """meaning: the help text. labels: its own, besides model and version. buckets: upper edges."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


FAMILIES: list[Family] = []
"""In the order of the docs."""


def _family(
    name: str,
    kind: Kind,
    meaning: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
) -> Family:
    family = Family(f"smartspec_{name}", kind, meaning, labels, buckets)
    FAMILIES.append(family)
    return family


# vLLM's edges, so that dashboards compare, with finer ones at the short end for small models.
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

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

DRAFTS = _family(
    "spec_decode_num_drafts_total", _C, "Verifications: steps of a sequence with drafts"
)
DRAFT_TOKENS = _family("spec_decode_num_draft_tokens_total", _C, "Tokens drafted")
ACCEPTED = _family("spec_decode_num_accepted_tokens_total", _C, "Drafted tokens accepted")
DRAFT_TOKENS_AT = _family(
    "spec_decode_num_draft_tokens_per_pos_total",
    _C,
    "Verifications with a draft at this position, from 1",
    ("position",),
)
ACCEPTED_AT = _family(
    "spec_decode_num_accepted_tokens_per_pos_total",
    _C,
    "Verifications that accepted the draft at this position, from 1",
    ("position",),
)
ACCEPTANCE_LENGTH = _family(
    "spec_decode_acceptance_length",
    _G,
    "Tokens a verification, the target's own included, over about 100 steps; 0 before the first",
)
ACCEPTANCE_RATE = _family(
    "spec_decode_acceptance_rate", _G, "Accepted share of drafted tokens, over about 100 steps"
)
PROPOSED_LENGTH = _family(
    "spec_decode_proposed_length", _G, "Drafts a decoding sequence in the last step, on average"
)
PROPOSED_LENGTHS = _family(
    "spec_decode_proposed_length_tokens",
    _H,
    "Drafts a decoding sequence in a step, on average; at most 16 steps each 0.25 s",
    buckets=_LENGTHS,
)
DISABLED_STEPS = _family(
    "spec_decode_disabled_steps_total", _C, "Steps of a sequence without drafts"
)
GOODPUT_PREDICTED = _family(
    "token_goodput_predicted_tokens_per_second",
    _G,
    "Tokens a second of execution that plans expected, in the last steps without prompt chunks",
)
GOODPUT_ACTUAL = _family(
    "token_goodput_actual_tokens_per_second", _G, "Tokens a second of execution in the same steps"
)
STEP_PREDICTED = _family(
    "step_latency_predicted_seconds", _G, "Mean length that plans expected of the same steps"
)
STEP_LATENCY = _family(
    "step_latency_seconds", _H, "Length of a step; at most 16 each 0.25 s", buckets=_STEP_S
)
DECIDED = _family(
    "decoding_steps_total",
    _C,
    "Steps that decoded, by who decided on drafts: the planner, the guard, or a probe",
    ("decider",),
)
SWITCHES = _family(
    "guard_switches_total", _C, "Times that the guard forbade speculation, or allowed it again"
)
COST_FACTOR = _family(
    "cost_factor",
    _G,
    "How passes of as many sequences as in the last step differ from the profile: target_base and "
    "target_slope of the target's, draft",
    ("part",),
)
TIME_ERROR = _family(
    "step_latency_relative_error",
    _G,
    "Mean error of predicted step times over about 100 steps: of the profile, and as corrected",
    ("predictor",),
)
DRAFT_TIME = _family("draft_time_seconds_total", _C, "Time spent drafting")
VERIFY_TIME = _family(
    "verify_time_seconds_total", _C, "Time spent in the target's passes of decoding work"
)
RUNNING = _family("num_requests_running", _G, "Requests that hold a place in the engine")
WAITING = _family("num_requests_waiting", _G, "Requests that wait for one")
CACHE = _family("kv_cache_utilization", _G, "Used share of the target's cache, 0 to 1")
PREEMPTIONS = _family("num_preemptions_total", _C, "Times that a request lost its place")
PROMPT_TOKENS = _family("prompt_tokens_total", _C, "Prompt tokens read; not those that were cached")
GENERATION_TOKENS = _family("generation_tokens_total", _C, "Tokens generated")
SUCCESS = _family(
    "request_success_total", _C, "Requests that came to their end", ("finished_reason",)
)
CANCELLED = _family("request_cancelled_total", _C, "Requests whose client left, or cut by shutdown")
FAILED = _family("request_failed_total", _C, "Requests that were taken and ended in an error")
REJECTED = _family("request_rejected_total", _C, "Requests that were not taken", ("reason",))
QUEUE_TIME = _family(
    "request_queue_time_seconds", _H, "From arrival to the first scheduling", buckets=_QUEUE_S
)
TTFT = _family(
    "time_to_first_token_seconds", _H, "From arrival to the first token", buckets=_TTFT_S
)
TPOT = _family(
    "time_per_output_token_seconds",
    _H,
    "Mean of a request, from its first token to its last",
    buckets=_TPOT_S,
)
E2E = _family(
    "e2e_request_latency_seconds",
    _H,
    "From arrival to the last response, of requests that came to their end",
    buckets=_E2E_S,
)
SENDS = _family("num_sends_total", _C, "Responses handed to Triton")
SEND_TIME = _family("send_seconds_total", _C, "Time that handing them over took")
CONFIG_INFO = _family(
    "config_info", _G, "Always 1; the labels say what is served", ("method", "k_max", "policy")
)


def value_in(text: str, family: Family) -> float | None:
    """The sum over all labels in what a metrics port shows (Prometheus' text format); None where
    the family is not there."""
    lines = [line for line in text.splitlines() if line.startswith(f"{family.name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else None
