"""The panels of the Grafana dashboard, as a table.

Every query is of the servers that the dashboard's variables choose; WHERE stands for that selector.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """expr: PromQL. legend: Grafana's template of a series' name."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """unit: Grafana's name of it. stacked: whether the series add up to something."""

    title: str
    unit: str
    description: str
    queries: tuple[Query, ...]
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def _rate(name: str, labels: str = "") -> str:
    return f"rate(smartspec_{name}{{{labels}WHERE}}[{WINDOW}])"


def _total(name: str, labels: str = "") -> str:
    return f"sum({_rate(name, labels)})"


def _by(label: str, name: str) -> str:
    return f"sum by ({label}) ({_rate(name)})"


def _gauge(name: str, labels: str = "") -> str:
    return f"smartspec_{name}{{{labels}WHERE}}"


def _quantiles(name: str) -> tuple[Query, ...]:
    return tuple(
        Query(f"histogram_quantile({share}, {_by('le', f'{name}_bucket')})", legend)
        for share, legend in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


_DRAFTED = "spec_decode_num_draft_tokens_total"
_ACCEPTED = "spec_decode_num_accepted_tokens_total"
_VERIFIED = "spec_decode_num_drafts_total"
_UNDRAFTED = "spec_decode_disabled_steps_total"
_DRAFT_S, _TARGET_S = _total("draft_time_seconds_total"), _total("verify_time_seconds_total")
_MEAN_STEP_S = f"{_total('step_latency_seconds_sum')} / {_total('step_latency_seconds_count')}"
_REST_S = (
    f"clamp_min({_total('decoding_steps_total')} * {_MEAN_STEP_S} - {_DRAFT_S} - {_TARGET_S}, 0)"
)

ROWS = (
    Row(
        "Load",
        (
            Panel(
                "Requests",
                "short",
                "Requests that hold a place in the engine, and those that wait for one. Waiting "
                "for long means overload: scale on it.",
                (
                    Query(f"sum({_gauge('num_requests_running')})", "running"),
                    Query(f"sum({_gauge('num_requests_waiting')})", "waiting"),
                ),
            ),
            Panel(
                "Tokens a second",
                "short",
                "Tokens generated and prompt tokens read, by the wall clock; cached prompt tokens "
                "are not read.",
                (
                    Query(_total("generation_tokens_total"), "generated"),
                    Query(_total("prompt_tokens_total"), "prompt"),
                ),
            ),
            Panel(
                "Goodput, predicted and actual",
                "short",
                "Tokens a second of execution: what plans expected of the last steps, and what "
                "came of them. Far apart for long means that the estimates are off.",
                (
                    Query(
                        f"sum({_gauge('token_goodput_predicted_tokens_per_second')})", "predicted"
                    ),
                    Query(f"sum({_gauge('token_goodput_actual_tokens_per_second')})", "actual"),
                ),
            ),
            Panel(
                "Time to first token",
                "s",
                "From a request's arrival to its first token, waiting included.",
                _quantiles("time_to_first_token_seconds"),
            ),
            Panel(
                "Time per output token",
                "s",
                "Mean of a request from its first token to its last; percentiles over requests.",
                _quantiles("time_per_output_token_seconds"),
            ),
            Panel(
                "Time in the queue",
                "s",
                "From a request's arrival to its first step. Triton's own queue time stays near 0: "
                "it hands requests over at once.",
                _quantiles("request_queue_time_seconds"),
            ),
        ),
    ),
    Row(
        "Speculation",
        (
            Panel(
                "Acceptance rate",
                "percentunit",
                "Accepted share of drafted tokens.",
                (Query(f"{_total(_ACCEPTED)} / {_total(_DRAFTED)}", "accepted of drafted"),),
            ),
            Panel(
                "Length of drafts",
                "short",
                "Of steps that drafted: tokens drafted and accepted for a sequence, on average. A "
                "step yields one token more than were accepted.",
                (
                    Query(f"{_total(_DRAFTED)} / {_total(_VERIFIED)}", "drafted"),
                    Query(f"{_total(_ACCEPTED)} / {_total(_VERIFIED)}", "accepted"),
                ),
            ),
            Panel(
                "Planned draft length",
                "short",
                "Drafts a sequence in a step, steps without drafts included: the mean, and the "
                "median and 95th percentile over steps.",
                (
                    Query(
                        f"{_total(_DRAFTED)} / ({_total(_VERIFIED)} + {_total(_UNDRAFTED)})", "mean"
                    ),
                    *_quantiles("spec_decode_proposed_length_tokens")[:2],
                ),
            ),
            Panel(
                "Acceptance by position",
                "percentunit",
                "Of the drafts that were made at a position, the share that was accepted there.",
                (
                    Query(
                        f"{_by('position', 'spec_decode_num_accepted_tokens_per_pos_total')} / "
                        f"{_by('position', 'spec_decode_num_draft_tokens_per_pos_total')}",
                        "position {{position}}",
                    ),
                ),
            ),
            Panel(
                "Who decided",
                "percentunit",
                "Share of decoding steps that went as planned, were held back by the guard, or ran "
                "as a probe. Much of guard means that speculation does not pay.",
                (
                    Query(
                        f"{_by('decider', 'decoding_steps_total')} / ignoring(decider) group_left "
                        f"{_total('decoding_steps_total')}",
                        "{{decider}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Guard switches",
                "short",
                "Times in 15 minutes that the guard forbade speculation, or allowed it again.",
                (
                    Query(
                        "sum by (instance) (increase(smartspec_guard_switches_total{WHERE}[15m]))",
                        "{{instance}}",
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Time and estimates",
        (
            Panel(
                "Where the time goes",
                "percentunit",
                "Seconds a second of the wall clock. The rest of a step is reading prompts and "
                "work of the host; it is estimated from the mean length of sampled steps.",
                (
                    Query(_DRAFT_S, "draft"),
                    Query(_TARGET_S, "target"),
                    Query(_REST_S, "prompts and host"),
                ),
                stacked=True,
            ),
            Panel(
                "Cost factors",
                "short",
                "How measured passes differ from the profile; 1 is as profiled. A jump means that "
                "the machine changed: clocks, neighbours, memory.",
                (Query(_gauge("cost_factor"), "{{part}}, {{instance}}"),),
            ),
            Panel(
                "Error of predicted step times",
                "percentunit",
                "Mean relative error over about 100 steps, by the profile alone and as corrected.",
                (Query(_gauge("step_latency_relative_error"), "{{predictor}}, {{instance}}"),),
            ),
            Panel(
                "Length of a step",
                "s",
                "Percentiles over sampled steps, and the mean that plans expected.",
                (
                    *_quantiles("step_latency_seconds")[:2],
                    Query(f"avg({_gauge('step_latency_predicted_seconds')})", "predicted"),
                ),
            ),
            Panel(
                "Cache in use",
                "percentunit",
                "Used share of the target's cache. Near 1, drafts shrink and requests lose their "
                "places.",
                (Query(_gauge("kv_cache_utilization"), "{{instance}}"),),
            ),
            Panel(
                "Preemptions",
                "ops",
                "Requests a second that lost their place and have to read their text again.",
                (Query(_total("num_preemptions_total"), "preempted"),),
            ),
        ),
    ),
    Row(
        "Ends and errors",
        (
            Panel(
                "Requests that ended",
                "reqps",
                "By why they ended; `cancelled` are clients that left, or were cut by a stop.",
                (
                    Query(_by("finished_reason", "request_success_total"), "{{finished_reason}}"),
                    Query(_total("request_cancelled_total"), "cancelled"),
                ),
                stacked=True,
            ),
            Panel(
                "Errors",
                "reqps",
                "Requests refused, by reason (unavailable: the queue is full or the server stops), "
                "and requests that were taken and failed.",
                (
                    Query(_by("reason", "request_rejected_total"), "refused: {{reason}}"),
                    Query(_total("request_failed_total"), "failed"),
                ),
                stacked=True,
            ),
            Panel(
                "Triton's own counts",
                "reqps",
                "Requests as Triton counts them: a request is done for it when it has been handed "
                "over, long before its text is.",
                (
                    Query(f"sum(rate(nv_inference_request_success{{WHERE}}[{WINDOW}]))", "success"),
                    Query(
                        f"sum by (reason) (rate(nv_inference_request_failure{{WHERE}}[{WINDOW}]))",
                        "failure: {{reason}}",
                    ),
                ),
            ),
        ),
    ),
)
