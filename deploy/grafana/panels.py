"""The panels of the Grafana dashboard, as a table.

In a query, WHERE is replaced by the selector for the dashboard's variables (model and instance).
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """expr: PromQL. legend: Grafana's template for the name of a series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """unit: Grafana's name of the unit. stacked: whether the series are stacked, because their sum
    has a meaning."""

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
                "Requests that run in the engine, and requests that wait in the queue. A long "
                "queue means overload. Use it for autoscaling.",
                (
                    Query(f"sum({_gauge('num_requests_running')})", "running"),
                    Query(f"sum({_gauge('num_requests_waiting')})", "waiting"),
                ),
            ),
            Panel(
                "Tokens per second",
                "short",
                "Generated tokens and prefill tokens per second of wall clock. Prompt tokens from "
                "the prefix cache are not counted.",
                (
                    Query(_total("generation_tokens_total"), "generated"),
                    Query(_total("prompt_tokens_total"), "prompt"),
                ),
            ),
            Panel(
                "Goodput, predicted and actual",
                "short",
                "Tokens per second of execution in recent steps, as predicted by the plans and as "
                "measured. A lasting difference means that the estimates are wrong.",
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
                "Time from the arrival of a request to its first token, including the queue.",
                _quantiles("time_to_first_token_seconds"),
            ),
            Panel(
                "Time per output token",
                "s",
                "Mean time per token of a request after its first token. Percentiles over "
                "requests.",
                _quantiles("time_per_output_token_seconds"),
            ),
            Panel(
                "Time in the queue",
                "s",
                "Time from the arrival of a request to its first step. Triton's own queue time "
                "stays near 0, because Triton passes requests to the backend at once.",
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
                "Accepted tokens divided by drafted tokens.",
                (Query(f"{_total(_ACCEPTED)} / {_total(_DRAFTED)}", "accepted of drafted"),),
            ),
            Panel(
                "Draft length",
                "short",
                "Mean drafted and accepted tokens per sequence, in steps with drafts. A step "
                "generates one token more than it accepts.",
                (
                    Query(f"{_total(_DRAFTED)} / {_total(_VERIFIED)}", "drafted"),
                    Query(f"{_total(_ACCEPTED)} / {_total(_VERIFIED)}", "accepted"),
                ),
            ),
            Panel(
                "Planned draft length",
                "short",
                "Drafted tokens per sequence and step, including steps without drafts: the mean, "
                "and the median and 95th percentile over steps.",
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
                "Accepted drafts divided by all drafts at each draft position.",
                (
                    Query(
                        f"{_by('position', 'spec_decode_num_accepted_tokens_per_pos_total')} / "
                        f"{_by('position', 'spec_decode_num_draft_tokens_per_pos_total')}",
                        "position {{position}}",
                    ),
                ),
            ),
            Panel(
                "Step decisions",
                "percentunit",
                "Share of decoding steps that ran as planned, were limited by the guard, or ran as "
                "a probe. A large guard share means that speculation does not pay off.",
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
                "How often in 15 minutes the guard turned speculation off or on again.",
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
                "Time by part of a step",
                "percentunit",
                "Seconds per second of wall clock. The rest of a step is prefill and host work. It "
                "is estimated from the mean time of sampled steps.",
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
                "Measured pass time divided by the profile's time. A sudden change means that the "
                "machine changed: clock rate, other load or memory.",
                (Query(_gauge("cost_factor"), "{{part}}, {{instance}}"),),
            ),
            Panel(
                "Error of predicted step times",
                "percentunit",
                "Mean relative error over about 100 steps, for the profile alone and for the "
                "corrected prediction.",
                (Query(_gauge("step_latency_relative_error"), "{{predictor}}, {{instance}}"),),
            ),
            Panel(
                "Step time",
                "s",
                "Percentiles over sampled steps, and the mean that the plans predicted.",
                (
                    *_quantiles("step_latency_seconds")[:2],
                    Query(f"avg({_gauge('step_latency_predicted_seconds')})", "predicted"),
                ),
            ),
            Panel(
                "Cache in use",
                "percentunit",
                "Used share of the target's KV cache. Near 1, drafts get shorter and requests are "
                "preempted.",
                (Query(_gauge("kv_cache_utilization"), "{{instance}}"),),
            ),
            Panel(
                "Preemptions",
                "ops",
                "Preempted requests per second. A preempted request repeats its prefill.",
                (Query(_total("num_preemptions_total"), "preempted"),),
            ),
        ),
    ),
    Row(
        "Finished requests and errors",
        (
            Panel(
                "Finished requests",
                "reqps",
                "By finish reason. `cancelled`: the client disconnected, or the server stopped.",
                (
                    Query(_by("finished_reason", "request_success_total"), "{{finished_reason}}"),
                    Query(_total("request_cancelled_total"), "cancelled"),
                ),
                stacked=True,
            ),
            Panel(
                "Errors",
                "reqps",
                "Refused requests by reason, and accepted requests that failed. `unavailable`: the "
                "queue is full or the server is stopping.",
                (
                    Query(_by("reason", "request_rejected_total"), "refused: {{reason}}"),
                    Query(_total("request_failed_total"), "failed"),
                ),
                stacked=True,
            ),
            Panel(
                "Triton's own counts",
                "reqps",
                "Requests as Triton counts them. Triton counts a request as done when it passes it "
                "to the backend, long before the text is complete.",
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
