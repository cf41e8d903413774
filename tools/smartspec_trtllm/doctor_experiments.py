"""Open questions about the executor, each answered by a small experiment on a real one.

An experiment takes a `Bench` and returns a `Finding`. It raises UnsettledError if it cannot run.
`doctor` makes a finding of any exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from statistics import median
from typing import Any

from smartspec_trtllm.doctor_bench import Bench
from smartspec_trtllm.doctor_finding import Finding, UnsettledError
from smartspec_trtllm.doctor_signatures import signatures_of

NUM_BLOCKS = 4
"""Length in blocks of the prompts that the cache should find."""

CHARGE_BUDGET = 512
NUM_CHARGED_PROMPTS = 12
NUM_TIMED = 7

IDLE_S = 0.2
"""Pause between two requests: much longer than a request."""


def default_priority(bench: Bench) -> Finding:
    for signature in signatures_of(bench.bindings.Request):
        for parameter in signature:
            if parameter.name == "priority":
                return Finding(
                    "default_priority",
                    "Which priority does a request have by default?",
                    str(parameter.default),
                    "from the constructor's signature",
                    "Nothing: the adapter sets none, so all its requests have the same priority.",
                )
    raise UnsettledError("the signature of Request's constructor cannot be read")


def two_executors(bench: Bench) -> Finding:
    """Start a second executor in this process, and send one request to each."""
    request = bench.request(bench.prompt(8, 1), 2)
    first = bench.executor
    second_dir = bench.draft_dir or bench.target_dir
    try:
        with bench.open(second_dir) as second:
            lengths = [
                len(bench.ask([request], executor)[0].output_token_ids[0])
                for executor in (first, second)
            ]
        answer, evidence = "works", f"both answered, with {lengths} tokens"
    except Exception as error:
        answer, evidence = "fails", f"{type(error).__name__}: {error}"
    return Finding(
        "two_executors",
        "Do a target and a draft executor run in one process, both in leader mode?",
        answer,
        evidence,
        "works: engine.draft can be served beside engine.target. fails: remove engine.draft from "
        "engine.json, so that prompt lookup drafts instead.",
    )


def finish_of_full_acceptance(bench: Bench) -> Finding:
    k = min(bench.max_draft_len, 4)
    prompt = bench.prompt(16, 2)
    text = bench.text(prompt, k + 1)
    (result,) = bench.ask([bench.request(prompt, k + 1, text[:k])])
    if len(result.output_token_ids[0]) != k + 1:
        got = len(result.output_token_ids[0])
        raise UnsettledError(f"got {got} of {k + 1} tokens: not all drafts were accepted")
    reason = _name(result.finish_reasons[0])
    return Finding(
        "finish_of_full_acceptance",
        "Which finish reason does a verification have if all k drafts are accepted and "
        "max_tokens = k + 1?",
        reason,
        f"k = {k}, got {k + 1} tokens, is_final is {result.is_final}",
        "LENGTH and NOT_FINISHED both end only the step. Any other reason would end the text: "
        "report it.",
    )


def reused_tokens_charged(bench: Bench) -> Finding:
    """Send cached prompts that together exceed the token budget; three fit into it."""
    build = bench.build
    length = CHARGE_BUDGET // 3
    if build["max_batch_size"] < 4 or build["max_input_len"] < length:
        raise UnsettledError("needs max_batch_size of 4 and max_input_len of 170 at least")
    bench.close()  # free the memory; two executors on one GPU are tested elsewhere
    options = {"max_num_tokens": min(CHARGE_BUDGET, build["max_num_tokens"])}
    length = options["max_num_tokens"] // 3
    prompt = bench.prompt(length, 3)
    with bench.open(bench.target_dir, **options) as executor:
        bench.ask([bench.request(prompt, 1)], executor)
        executor.get_latest_iteration_stats()
        # The last token differs, so that no prompt equals another.
        requests = [bench.request([*prompt[:-1], n + 1], 1) for n in range(NUM_CHARGED_PROMPTS)]
        bench.ask(requests, executor)
        batches = [s.inflight_batching_stats for s in executor.get_latest_iteration_stats()]
    most = max(batch.num_context_requests for batch in batches)
    tokens = max(batch.num_ctx_tokens for batch in batches)
    answer = "yes" if most <= 3 else "no"
    return Finding(
        "reused_tokens_charged",
        "Do cached tokens count against max_num_tokens?",
        answer,
        f"{NUM_CHARGED_PROMPTS} cached prompts of {length} tokens, a budget of "
        f"{options['max_num_tokens']}: at most {most} of them, and {tokens} context tokens, in one "
        "iteration",
        "yes: keep engine.charges_cached_tokens true, and build with --max_num_tokens of about "
        "max_sequences times the usual context. no: set engine.charges_cached_tokens to false.",
    )


def specdec_stats(bench: Bench) -> Finding:
    prompt = bench.prompt(16, 4)
    drafts = bench.text(prompt, 2)[:1]
    bench.executor.get_latest_iteration_stats()
    bench.ask([bench.request(prompt, 2, drafts)])
    counts = [
        stats.specdec_stats.num_draft_tokens
        for stats in bench.executor.get_latest_iteration_stats()
        if stats.specdec_stats is not None
    ]
    return Finding(
        "specdec_stats",
        "Do the iteration statistics count drafts?",
        "yes" if any(counts) else "no",
        f"after one verification of 1 draft, num_draft_tokens: {counts or 'none'}",
        "Nothing: the adapter counts drafts from the tokens it gets.",
    )


def iteration_latency(bench: Bench) -> Finding:
    """Compare the latency in the statistics with the measured time. Pause between requests."""
    request = bench.request(bench.prompt(16, 9), 1)
    _seconds(bench, request)
    bench.executor.get_latest_iteration_stats()
    seen = []
    for _ in range(2):
        bench.sleep(IDLE_S)
        took_s = _seconds(bench, request)
        entries = bench.executor.get_latest_iteration_stats()
        seen.append((took_s, sum(float(entry.iter_latency_ms) for entry in entries) / 1e3))
    if not all(took_s < IDLE_S / 2 for took_s, _ in seen):
        raise UnsettledError(f"a request of one token took {max(seen)[0]:.2f} s: use an idle GPU")
    took_s, told_s = seen[-1]
    if told_s > IDLE_S / 2:
        answer = "of the iteration before, with idle time"
    else:
        answer = "its own" if told_s > took_s / 2 else "of the iteration before"
    pairs = "; ".join(f"{1e3 * told:.1f} ms for one of {1e3 * took:.1f} ms" for took, told in seen)
    return Finding(
        "iteration_latency",
        "Which iteration's time is iter_latency_ms in the statistics available with a response?",
        answer,
        f"with {IDLE_S:.1f} s between two requests of one iteration: {pairs}",
        "Nothing: the adapter measures passes with its own clock.",
    )


def reuse_after_cancel(bench: Bench) -> Finding:
    """Count reused blocks after a request that ended, and after one that was cancelled."""
    length = NUM_BLOCKS * int(bench.build.get("plugin_config", {}).get("tokens_per_block", 32))
    ended, cancelled = bench.prompt(length + 1, 5), bench.prompt(length + 1, 6)
    bench.ask([bench.request(ended, 1)])
    executor = bench.executor
    number = executor.enqueue_request(bench.request(cancelled, 64, streaming=True))
    executor.await_responses(number, timedelta(seconds=60))
    executor.cancel_request(number)
    bench.finals({number}, executor)
    counts = [_num_reused(bench, prompt) for prompt in (ended, cancelled)]
    if counts[0] == 0:
        raise UnsettledError("no blocks were found even after a request that was not cancelled")
    return Finding(
        "reuse_after_cancel",
        "Are a cancelled request's blocks kept for reuse?",
        "yes" if counts[1] else "no",
        f"blocks found for a prompt of {length + 1} tokens: {counts[0]} after an end, {counts[1]} "
        "after a cancel",
        "yes: a cancelled burst costs only its steps. no: its prompt must be computed again; set a "
        "small engine.decode_burst, so that bursts end before they are cancelled.",
    )


def _num_reused(bench: Bench, prompt: list[int]) -> int:
    (result,) = bench.ask([bench.request(prompt, 1, metrics=True)])
    return int(result.request_perf_metrics.kv_cache_metrics.num_reused_blocks)


def post_processor_positions(bench: Bench) -> Finding:
    """Force one token with a callback, and use it as every draft. Count how often it comes back."""
    k = min(bench.max_draft_len, 3)
    prompt = bench.prompt(16, 7)
    text = bench.text(prompt, k + 1)
    forced = next(t for t in range(5, bench.vocab_size) if t not in text)
    shapes: list[tuple[int, ...]] = []

    def force(request_id: int, logits: Any, tokens: Any, stream: int, client_id: Any) -> None:
        shapes.append(tuple(logits.shape))
        with _on_stream(stream):
            logits[:] = float("-inf")
            logits[..., forced] = 0.0

    request = bench.request(prompt, k + 1, [forced] * k, logits_post_processor=force)
    (result,) = bench.ask([request])
    tokens = list(result.output_token_ids[0])
    num_forced = sum(token == forced for token in tokens)
    answer = "none" if num_forced == 0 else "all" if num_forced == k + 1 else "some"
    return Finding(
        "post_processor_positions",
        "Does a logits_post_processor reach all k + 1 positions of a verification?",
        answer,
        f"k = {k}: {num_forced} of {len(tokens)} tokens were the forced one; shapes seen: {shapes}",
        "all: guided text can be verified. some or none: requests with a callback must run "
        "without drafts, as they do now.",
    )


@contextmanager
def _on_stream(stream: int) -> Iterator[None]:
    """The CUDA stream that the executor uses; 0 means none."""
    context: Any = nullcontext()
    if stream:
        import torch

        external: Any = torch.cuda.ExternalStream
        context = torch.cuda.stream(external(stream))
    with context:
        yield


def cost_of_verification(bench: Bench) -> Finding:
    """For one sequence: compare a verification after cached text with a generated token."""
    k = bench.max_draft_len
    prompt = bench.prompt(min(256, bench.build["max_input_len"] - k - 1), 8)
    num_tokens = 16
    request = bench.request(prompt, num_tokens)
    bench.ask([request])
    whole_s = median(_seconds(bench, request) for _ in range(NUM_TIMED))
    first_s = median(_seconds(bench, bench.request(prompt, 1)) for _ in range(NUM_TIMED))
    token_s = (whole_s - first_s) / (num_tokens - 1)
    drafts = bench.text(prompt, k)
    verify_s = median(_seconds(bench, bench.request(prompt, k + 1, drafts)) for _ in range(9))
    ratio = verify_s / token_s if token_s > 0 else float("inf")
    return Finding(
        "cost_of_verification",
        "What does a verification cost, in generation steps?",
        f"{ratio:.1f}",
        f"{verify_s * 1e3:.2f} ms for {k} drafts on a cached prompt of {len(prompt)} tokens, "
        f"{token_s * 1e3:.2f} ms for a generated token, {first_s * 1e3:.2f} ms for a request of "
        "one token",
        "A verification must generate more tokens than this to be useful. The profile measures the "
        "cost by batch size. If it is above about 3, check max_num_tokens and the block size.",
    )


def _seconds(bench: Bench, request: Any) -> float:
    start_s = bench.now()
    bench.ask([request])
    return bench.now() - start_s


def _name(member: Any) -> str:
    """LENGTH for FinishReason.LENGTH of nanobind, pybind11 or IntEnum."""
    return str(getattr(member, "name", member))


EXPERIMENTS: tuple[Callable[[Bench], Finding], ...] = (
    default_priority,
    finish_of_full_acceptance,
    specdec_stats,
    iteration_latency,
    reuse_after_cancel,
    cost_of_verification,
    reused_tokens_charged,
)

RISKY_EXPERIMENTS: tuple[Callable[[Bench], Finding], ...] = (
    post_processor_positions,
    two_executors,
)
"""They run last, because they are most likely to crash the process in C++ code."""
