"""The fake against what TensorRT-LLM's executor is documented to do.

The prompt (3, 4) sums to 7; with 1000 tokens in the vocabulary its text is 7 + 7 t:
position  2   3   4   5   6   7   8
token     21  28  35  42  49  56  63
"""

from datetime import timedelta

import numpy as np
import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_executor import (
    EngineLimits,
    Executor,
    ExternalDraftTokensConfig,
    FinishReason,
    OutputConfig,
    Request,
    SamplingConfig,
)
from smartspec_testing.fake_executor_plain import plain

PROMPT = [3, 4]
GENERATED_ONLY = OutputConfig(exclude_input_from_output=True)
NOW = timedelta(0)


def request(tokens=PROMPT, max_tokens=1, drafts=None, **options):
    config = None if drafts is None else ExternalDraftTokensConfig(drafts)
    return Request(
        tokens,
        max_tokens,
        output_config=GENERATED_ONLY,
        external_draft_tokens_config=config,
        **options,
    )


def read(response):
    """tokens, is_final, finish reason."""
    result = response.result
    return result.output_token_ids[0], result.is_final, result.finish_reasons[0]


def run(*requests, **options):
    """What one `await_responses` brings for these requests."""
    executor = Executor(EngineLimits(), **options)
    executor.enqueue_requests(requests)
    return [read(response) for response in executor.await_responses()]


@pytest.mark.parametrize(
    ("drafts", "max_tokens", "end_id", "tokens", "finish"),
    [
        ([22], 2, None, [21], FinishReason.NOT_FINISHED),
        ([21, 29], 3, None, [21, 28], FinishReason.NOT_FINISHED),
        ([21, 28], 3, None, [21, 28, 35], FinishReason.LENGTH),  # full acceptance
        ([21, 28], 2, None, [21, 28], FinishReason.LENGTH),
        ([21, 28], 9, None, [21, 28, 35], FinishReason.NOT_FINISHED),  # one step all the same
        ([21, 28], 3, 28, [21], FinishReason.END_ID),
        ([22, 28], 3, 21, [], FinishReason.END_ID),
    ],
)
def test_a_verification_is_one_final_step(drafts, max_tokens, end_id, tokens, finish):
    assert run(request(PROMPT, max_tokens, drafts, end_id=end_id)) == [(tokens, True, finish)]


def test_without_drafts_one_request_generates_all():
    assert run(request(max_tokens=3)) == [([21, 28, 35], True, FinishReason.LENGTH)]
    assert run(request(max_tokens=9, end_id=35)) == [([21, 28], True, FinishReason.END_ID)]
    whole = Request(PROMPT, 2)
    assert run(whole) == [([3, 4, 21, 28], True, FinishReason.LENGTH)]


def test_streaming_brings_deltas():
    executor = Executor(EngineLimits())
    executor.enqueue_requests([request(max_tokens=2, streaming=True)])
    steps = [read(executor.await_responses(NOW)[0]) for _ in range(2)]
    assert steps == [
        ([21], False, FinishReason.NOT_FINISHED),
        ([28], True, FinishReason.LENGTH),
    ]


def test_a_text_goes_on_wherever_it_was_cut():
    assert run(request([3, 4, 21, 28], 2)) == [([35, 42], True, FinishReason.LENGTH)]
    # 21 was changed to 22, so this is a prompt of its own: 57 + 28 = 85.
    assert run(request([3, 4, 22, 28], 1)) == [([85], True, FinishReason.LENGTH)]


@pytest.mark.parametrize(
    ("sampling", "token"),
    [
        (SamplingConfig(), 21),
        (SamplingConfig(temperature=1.0, seed=5), 21),  # greedy without top_k and top_p
        (SamplingConfig(top_k=1, temperature=1.0, seed=5), 21),
        (SamplingConfig(top_p=1.0, temperature=1.0, seed=5), 26),
    ],
)
def test_the_seed_shifts_sampled_text(sampling, token):
    assert run(request(sampling_config=sampling))[0][0] == [token]


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: ExternalDraftTokensConfig([]), RuntimeError),
        (lambda: ExternalDraftTokensConfig([np.int32(1)]), TypeError),
        (lambda: Request([np.int64(3)], 1), TypeError),
        (lambda: Request([], 1), RuntimeError),
        (lambda: Request(PROMPT, 0), RuntimeError),
        (lambda: Request(PROMPT, 1, True), TypeError),  # the rest is keyword-only
        (lambda: SamplingConfig(2), RuntimeError),
        (lambda: SamplingConfig(temperature=0.0), RuntimeError),
    ],
)
def test_value_classes_refuse(build, error):
    with pytest.raises(error):
        build()


def test_too_many_drafts_are_an_error_of_their_request():
    executor = Executor(EngineLimits(max_draft_len=2))
    first, second = executor.enqueue_requests([request(), request(max_tokens=4, drafts=[1, 2, 3])])
    (refused,) = executor.await_responses(NOW)
    assert refused.request_id == second
    assert "max_draft_len 2" in refused.error_msg
    assert [response.request_id for response in executor.await_responses()] == [first]


def test_drafts_beyond_max_input_len_are_dropped():
    """2 + 3 tokens into 4: the drafts 21, 28 are left, and 3 tokens come instead of 4."""
    executor = Executor(EngineLimits(max_input_len=4))
    executor.enqueue_requests([request(max_tokens=4, drafts=[21, 28, 35])])
    assert read(executor.await_responses()[0])[0] == [21, 28, 35]


@pytest.mark.parametrize(("drafts", "num_tokens"), [(None, 4), ([22, 28], 1)])
def test_max_tokens_is_cut_to_what_max_seq_len_leaves(drafts, num_tokens):
    """2 + max_tokens + reserve in 14: without drafts the reserve is 8, which leaves 4."""
    executor = Executor(EngineLimits(max_seq_len=14))
    executor.enqueue_requests([request(max_tokens=6, drafts=drafts)])
    assert len(read(executor.await_responses()[0])[0]) == num_tokens


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (EngineLimits(max_num_tokens=3), "4 tokens exceed max_num_tokens 3"),
        (EngineLimits(max_input_len=1), "exceeds max_input_len 1"),
        (EngineLimits(max_seq_len=4), "no room to generate"),
    ],
)
def test_a_request_that_can_never_run_is_an_error_of_its_own(limits, message):
    executor = Executor(limits)
    (refused,) = executor.enqueue_requests([request(max_tokens=3, drafts=[21, 28], client_id=7)])
    assert executor.get_num_responses_ready() == 1
    assert executor.get_num_responses_ready(refused + 1) == 0
    (response,) = executor.await_responses()
    assert response.has_error()
    assert (response.request_id, response.client_id) == (refused, 7)
    assert message in response.error_msg
    with pytest.raises(RuntimeError):
        _ = response.result


def test_whole_prompts_share_max_num_tokens():
    """Each counts 2 + 2; in 11 tokens fit two, and the third is an iteration later."""
    executor = Executor(EngineLimits(max_num_tokens=11))
    ids = executor.enqueue_requests([request(max_tokens=3, drafts=[21, 28])] * 3)
    assert [r.request_id for r in executor.await_responses()] == ids[:2]
    assert [r.request_id for r in executor.await_responses()] == ids[2:]


def test_who_does_not_fit_holds_up_those_behind():
    """They count 4, 9 and 2 of 11: the third would fit beside the first, but waits its turn."""
    executor = Executor(EngineLimits(max_num_tokens=11))
    small, large = request(max_tokens=3, drafts=[21, 28]), request(list(range(9)))
    ids = executor.enqueue_requests([small, large, request()])
    assert [r.request_id for r in executor.await_responses()] == ids[:1]
    assert [r.request_id for r in executor.await_responses()] == ids[1:]


def test_batch_size_limits_the_rows():
    executor = Executor(EngineLimits(max_batch_size=1))
    first, second = executor.enqueue_requests([request(max_tokens=2), request()])
    assert [r.request_id for r in executor.await_responses()] == [first]
    assert [r.request_id for r in executor.await_responses()] == [second]


def test_requests_held_back_finish_at_different_times():
    executor = Executor(EngineLimits(), hold_back_prob=0.5, seed=3)
    executor.enqueue_requests([request()] * 8)
    batches = []
    while sum(batches) < 8:
        batches.append(len(executor.await_responses()))
    assert len(batches) > 1


def test_an_iteration_costs_its_charge():
    """1 s a token. Context: 2 + 2 and 2 tokens in 2 rows, 6 s; then 1 generating row, 1 s."""
    clock = VirtualClock()
    seconds = ((1.0, 4.0), (2.0, 8.0))
    cost = CostModel(target=PassTable(rows=(1, 2), tokens_per_row=(1, 4), seconds=seconds))
    executor = Executor(EngineLimits(), cost=cost, clock=clock)
    executor.enqueue_requests([request(max_tokens=3, drafts=[22, 28]), request(max_tokens=2)])
    executor.await_responses()
    assert clock.now() == pytest.approx(6.0)
    executor.await_responses()
    assert clock.now() == pytest.approx(7.0)


@pytest.mark.parametrize(("cache_size", "num_replayed"), [(0, 6), (1, 6), (2, 7)])
def test_iterations_of_a_known_shape_replay_a_graph(cache_size, num_replayed):
    """Bursts of 4 tokens for 2, 1 and 2 sequences: a context, which takes no graph, and 3
    iterations. The first of a shape leaves its graph, and a cache of one keeps the last alone.
    Launching takes 1 s, so that 12 iterations take 12 s less one for each replay."""
    config = plain("ExecutorConfig")()
    knobs = config.extended_runtime_perf_knob_config
    knobs.cuda_graph_mode, knobs.cuda_graph_cache_size = True, cache_size
    clock = VirtualClock()
    free = CostModel(PassTable((1,), (1,), ((0.0,),)))
    executor = Executor(EngineLimits(), None, config, cost=free, launch_s=1.0, clock=clock)
    for rows in (2, 1, 2):
        executor.enqueue_requests([request(max_tokens=4)] * rows)
        while executor._scheduler.jobs:
            executor.await_responses()
    assert executor.num_replayed == num_replayed
    assert clock.now() == pytest.approx(12.0 - num_replayed)


def test_timeout_passes_on_the_clock():
    """Tokens take 1 s each: after 2.5 s the third iteration is done, at 3 s, and 5 are to come."""
    clock = VirtualClock()
    cost = CostModel(target=PassTable(rows=(1,), tokens_per_row=(1,), seconds=((1.0,),)))
    executor = Executor(EngineLimits(), cost=cost, clock=clock)
    assert executor.await_responses(timedelta(seconds=0.5)) == []
    assert clock.now() == pytest.approx(0.5)
    executor.enqueue_requests([request(max_tokens=8)])
    assert executor.await_responses(timedelta(seconds=2.5)) == []
    assert clock.now() == pytest.approx(3.5)
    assert len(read(executor.await_responses()[0])[0]) == 8
    with pytest.raises(RuntimeError, match="for ever"):
        executor.await_responses()


def test_a_cancel_lets_one_more_response_come():
    executor = Executor(EngineLimits())
    (number,) = executor.enqueue_requests([request(max_tokens=9, streaming=True)])
    executor.await_responses()
    executor.cancel_request(number)
    late, last = executor.await_responses()
    assert read(late) == ([28], False, FinishReason.NOT_FINISHED)
    assert read(last) == ([], True, FinishReason.CANCELLED)
    executor.cancel_request(number)
    assert executor.await_responses(NOW) == []


def test_a_waiting_request_is_cancelled_without_tokens():
    executor = Executor(EngineLimits(max_batch_size=1))
    first, second = executor.enqueue_requests([request(max_tokens=2, streaming=True), request()])
    executor.cancel_request(second)
    responses = executor.await_responses()
    assert [r.request_id for r in responses] == [first, second]
    assert read(responses[1]) == ([], True, FinishReason.CANCELLED)


def test_after_shutdown_every_call_raises():
    executor = Executor(EngineLimits())
    assert executor.can_enqueue_requests()
    executor.shutdown()
    assert not executor.can_enqueue_requests()
    calls = [
        lambda: executor.enqueue_requests([request()]),
        lambda: executor.await_responses(NOW),
        lambda: executor.cancel_request(1),
        executor.get_num_responses_ready,
        executor.shutdown,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="shut down"):
            call()


def test_hold_back_prob_of_one_would_never_end():
    with pytest.raises(ValueError, match="hold_back_prob"):
        Executor(EngineLimits(), hold_back_prob=1.0)
