"""KV cache blocks of the fake: prefix hits, eviction, waiting for room, and that none is lost.

Blocks have 4 tokens. The prompt 1 2 3 4 5 with two tokens generated holds 7 tokens in 2 blocks; the
last one was never read, so 6 stay known: the block 1 2 3 4 and a tail of 2.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_testing import fake_executor
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_executor import (
    Behaviour,
    EngineLimits,
    Executor,
    ExternalDraftTokensConfig,
    OutputConfig,
    Request,
)
from smartspec_testing.fake_executor_blocks import BlockPool

SECOND_A_TOKEN = CostModel(
    target=PassTable(rows=(1, 2), tokens_per_row=(1, 4), seconds=((1.0, 4.0), (2.0, 8.0)))
)
LIMITS = EngineLimits(max_draft_len=4, tokens_per_block=4, num_blocks=8)
PROMPT = [1, 2, 3, 4, 5]
MEASURED = OutputConfig(return_perf_metrics=True)


def config(**options):
    return fake_executor.ExecutorConfig(kv_cache_config=fake_executor.KvCacheConfig(), **options)


def run(executor, *requests):
    executor.enqueue_requests(requests)
    responses = []
    while executor._scheduler.jobs or executor.get_num_responses_ready():
        responses += executor.await_responses()
    return responses


def test_the_pool_finds_whole_blocks_and_the_beginning_of_one():
    pool = BlockPool(num_blocks=8, tokens_per_block=4)
    first = pool.allocate([1, 2, 3, 4, 5, 6], 8)
    assert (first.num_own, first.num_cached) == (2, 0)
    pool.free(first, [1, 2, 3, 4, 5, 6], stores=True)
    assert pool.num_free_blocks == 8
    second = pool.allocate([1, 2, 3, 4, 5, 9], 8)
    assert (len(second.shared), second.num_own, second.num_cached) == (1, 1, 5)
    assert pool.num_held_blocks == 2
    assert pool.num_cached([1, 2, 3, 4], salt=7) == 0  # another salt shares nothing


def test_the_last_token_is_always_computed():
    pool = BlockPool(8, 4)
    pool.free(pool.allocate([1, 2, 3, 4], 4), [1, 2, 3, 4], stores=True)
    assert pool.num_cached([1, 2, 3, 4]) == 3
    assert pool.num_cached([1, 2, 3, 4, 5]) == 4


def test_without_partial_reuse_only_whole_blocks_are_found():
    pool = BlockPool(8, 4, reuses_partially=False)
    pool.free(pool.allocate([1, 2, 3, 4, 5, 6], 8), [1, 2, 3, 4, 5, 6], stores=True)
    assert pool.num_cached([1, 2, 3, 4, 5, 6, 7]) == 4


def test_the_block_used_longest_ago_is_evicted_and_tails_first():
    """3 blocks: two of the text 1..8, one of 11..14. The next needs two: the tail 5..8 goes, and
    its beginning, but not 11..14, which was asked for last."""
    pool = BlockPool(3, 4)
    pool.free(pool.allocate(list(range(1, 9)), 8), list(range(1, 9)), stores=True)
    pool.free(pool.allocate([11, 12, 13, 14], 4), [11, 12, 13, 14], stores=True)
    pool.allocate([21, 22, 23, 24], 5)
    assert pool.num_cached([1, 2, 3, 4, 5]) == 0
    assert pool.num_cached([11, 12, 13, 14, 15]) == 4


def test_nothing_is_stored_where_reuse_is_off():
    limits = replace(LIMITS, max_draft_len=0)
    kv_cache = fake_executor.KvCacheConfig(enable_block_reuse=False)
    executor = Executor(limits, None, fake_executor.ExecutorConfig(kv_cache_config=kv_cache))
    run(executor, Request(PROMPT, 2))
    (response,) = run(executor, Request(PROMPT, 2, output_config=MEASURED))
    assert response.result.request_perf_metrics.kv_cache_metrics.num_reused_blocks == 0
    with pytest.raises(RuntimeError, match="enable_block_reuse"):
        Executor(LIMITS, None, fake_executor.ExecutorConfig(kv_cache_config=kv_cache))


def test_cached_tokens_cost_no_time_but_are_charged():
    """The first pass computes 5 tokens, the second 1 more: 4 of 5 are known. Both are charged 5."""
    clock = VirtualClock()
    executor = Executor(LIMITS, cost=SECOND_A_TOKEN, clock=clock)
    run(executor, Request(PROMPT, 1))
    assert clock.now() == pytest.approx(5.0)
    (response,) = run(executor, Request(PROMPT, 1, output_config=MEASURED))
    assert clock.now() == pytest.approx(6.0)
    first, _, second, _ = executor.get_latest_iteration_stats()
    assert second.inflight_batching_stats.num_ctx_tokens == 5
    assert (first.kv_cache_stats.reused_blocks, second.kv_cache_stats.reused_blocks) == (0, 1)
    metrics = response.result.request_perf_metrics
    assert metrics.kv_cache_metrics.num_reused_blocks == 1
    assert metrics.kv_cache_metrics.kv_cache_hit_rate == 0.5
    assert metrics.timing_metrics.last_token_time.total_seconds() == pytest.approx(6.0)
    assert executor.get_latest_iteration_stats() == []


def test_statistics_have_the_time_of_the_iteration_before_and_idle_time():
    """A pass of 5 s, idle for 7 s, and twice one of 1 s for the token that is computed again. An
    entry of no time is there with each last response; the true time comes with the next iteration,
    and has what was idle before the iteration in it."""
    clock = VirtualClock()
    executor = Executor(LIMITS, cost=SECOND_A_TOKEN, clock=clock)

    def times_s():
        return [entry.iter_latency_ms / 1e3 for entry in executor.get_latest_iteration_stats()]

    run(executor, Request(PROMPT, 1))
    assert times_s() == [0.0, 0.0]
    clock.sleep(7.0)
    run(executor, Request(PROMPT, 1))
    assert times_s() == pytest.approx([5.0, 0.0])
    run(executor, Request(PROMPT, 1))
    assert times_s() == pytest.approx([8.0, 0.0])
    own = Executor(
        LIMITS, cost=SECOND_A_TOKEN, clock=clock, behaviour=Behaviour(lags_latency=False)
    )
    clock.sleep(7.0)
    run(own, Request(PROMPT, 1))
    (entry,) = own.get_latest_iteration_stats()
    assert entry.iter_latency_ms == pytest.approx(5000.0)


@pytest.mark.parametrize(("charges", "num_together"), [(True, 1), (False, 2)])
def test_whether_reused_tokens_are_charged(charges, num_together):
    """Two cached prompts of 5 in a budget of 8: both fit only where cached tokens are free."""
    limits = replace(LIMITS, max_num_tokens=8)
    executor = Executor(limits, behaviour=Behaviour(charges_reused_tokens=charges))
    run(executor, Request(PROMPT, 1))
    executor.enqueue_requests([Request(PROMPT, 1)] * 2)
    assert len(executor.await_responses()) == num_together


def test_requests_wait_for_blocks_and_none_is_lost():
    """5 + 3 tokens and no drafts take 2 blocks; of 5 blocks the third gets none at first."""
    executor = Executor(replace(LIMITS, num_blocks=5))
    ids = executor.enqueue_requests([Request([n] * 5, 3) for n in (1, 2, 3)])
    assert [r.request_id for r in executor.await_responses()] == ids[:2]
    assert executor.num_held_blocks == 0
    assert [r.request_id for r in executor.await_responses()] == ids[2:]
    assert (executor.num_held_blocks, executor.num_free_blocks) == (0, 5)


def test_a_request_larger_than_the_cache_is_an_error():
    (response,) = run(Executor(replace(LIMITS, num_blocks=2)), Request(PROMPT, 8))
    assert "4 blocks exceed the 2" in response.error_msg


@pytest.mark.parametrize(("keeps", "num_reused"), [(False, 0), (True, 1)])
def test_blocks_of_a_cancelled_request(keeps, num_reused):
    executor = Executor(LIMITS, behaviour=Behaviour(keeps_blocks_after_cancel=keeps))
    number = executor.enqueue_request(Request(PROMPT, 9, streaming=True))
    executor.await_responses()
    executor.cancel_request(number)
    executor.await_responses()
    assert executor.num_held_blocks == 0
    (response,) = run(executor, Request(PROMPT, 1, output_config=MEASURED))
    assert response.result.request_perf_metrics.kv_cache_metrics.num_reused_blocks == num_reused


@pytest.mark.parametrize(
    ("num_input", "num_left"),
    [
        (9, 3),  # 8 and 1: 3 of the last block's 4 tokens are left
        (11, 1),
        (12, 0),  # ends on the edge of a block
        (6, 4),  # fits whole beside its drafts, so that nothing is dropped
    ],
)
def test_chunks_drop_drafts_that_leave_the_last_block(num_input, num_left):
    """In 11 tokens fit 2 blocks. Drafts that are dropped cannot be accepted, and none is wrong."""
    tokens = [1] * num_input
    key = sum(tokens)
    drafts = [(key + 7 * (num_input + i)) % 1000 for i in range(4)]
    limits = replace(LIMITS, max_num_tokens=11)
    executor = Executor(limits, None, config(enable_chunked_context=True))
    request = Request(
        tokens,
        5,
        output_config=OutputConfig(exclude_input_from_output=True, return_perf_metrics=True),
        external_draft_tokens_config=ExternalDraftTokensConfig(drafts),
    )
    (response,) = run(executor, request)
    speculative = response.result.request_perf_metrics.speculative_decoding
    assert speculative.total_draft_tokens == num_left
    assert speculative.total_accepted_draft_tokens == num_left
    is_plain = num_left == 0  # then it goes on token by token
    assert len(response.result.output_token_ids[0]) == (5 if is_plain else num_left + 1)


TRAFFIC = st.lists(
    st.tuples(
        st.integers(0, 2),  # which prompt
        st.integers(1, 12),  # its length
        st.integers(1, 6),  # max_tokens
        st.integers(0, 4),  # drafts
        st.booleans(),  # cancelled in the middle
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(TRAFFIC, st.booleans(), st.sampled_from([0.0, 0.3]))
def test_no_block_is_ever_lost(traffic, is_chunked, error_prob):
    """Whatever comes, is cancelled or fails: at the end every request was answered once."""
    limits = replace(LIMITS, max_num_tokens=20, num_blocks=12, max_batch_size=3)
    executor = Executor(
        limits,
        None,
        config(enable_chunked_context=is_chunked),
        error_prob=error_prob,
        behaviour=Behaviour(keeps_blocks_after_cancel=True),
    )
    finals = []
    for key, length, max_tokens, num_drafts, is_cancelled in traffic:
        drafts = ExternalDraftTokensConfig([5] * num_drafts) if num_drafts else None
        tokens = [key * 100 + i for i in range(length)]
        request = Request(tokens, max_tokens, external_draft_tokens_config=drafts)
        number = executor.enqueue_request(request)
        executor._iterate()
        assert 0 <= executor.num_held_blocks <= 12
        if is_cancelled:
            executor.cancel_request(number)
    while executor._scheduler.jobs or executor.get_num_responses_ready():
        finals += executor.await_responses()
    assert sorted(r.request_id for r in finals) == list(range(1, len(traffic) + 1))
    assert executor.num_held_blocks == 0
    assert executor.num_free_blocks == 12
