"""The fake executor keeps the documented rules. Nothing here says anything about the real one.

The prompt (3, 4) sums to 7; with 1000 tokens in the vocabulary its text is 7 + 7 t:
position  2   3   4   5   6
token     21  28  35  42  49
"""

from datetime import timedelta

import numpy as np
import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_executor import (
    DraftExecutor,
    EngineLimits,
    Executor,
    ExternalDraftTokensConfig,
    FinishReason,
    Request,
    SamplingConfig,
)

PROMPT = [3, 4]
COST = CostModel(PassTable((1,), (1, 100), ((1.0, 100.0),)))
"""One second per token that is not cached."""


def executor(*, cost=None, limits=EngineLimits(), **options):  # noqa: B008 - it is frozen
    return Executor(limits, cost=cost, clock=VirtualClock(), **options)


def verify(*drafts, prompt=PROMPT, **options):
    config = ExternalDraftTokensConfig(list(drafts))
    return Request(prompt, len(drafts) + 1, external_draft_tokens_config=config, **options)


def ask(found, *requests):
    """All responses, and the requests' ids."""
    ids = found.enqueue_requests(requests)
    responses = []
    while found.num_held or found._ready:
        responses += found.await_responses(timedelta(seconds=1))
    return responses, ids


@pytest.mark.parametrize(
    ("request_", "tokens", "finish"),
    [
        (Request(PROMPT, 3), [21, 28, 35], FinishReason.LENGTH),
        (Request(PROMPT, 9, end_id=35), [21, 28], FinishReason.END_ID),
        (Request(PROMPT, 9, stop_words=[[28]]), [21, 28], FinishReason.STOP_WORDS),
        (Request(PROMPT, 2, bad_words=[[21], [4, 22]]), [23, 28], FinishReason.LENGTH),
        (verify(21, 28), [21, 28, 35], FinishReason.LENGTH),
        (verify(21, 29), [21, 28], FinishReason.NOT_FINISHED),
        (verify(22, 28), [21], FinishReason.NOT_FINISHED),
        (verify(21, 28, end_id=28), [21], FinishReason.END_ID),
    ],
)
def test_tokens_and_finish_reasons(request_, tokens, finish):
    ([response], [request_id]) = ask(executor(), request_)
    assert (response.request_id, response.has_error()) == (request_id, False)
    assert response.result.is_final
    assert response.result.output_token_ids == [tokens]
    assert response.result.finish_reasons == [finish]


def test_a_stream_has_one_token_per_response_and_the_next_request_goes_on():
    found = executor()
    responses, _ = ask(found, Request(PROMPT, 2, streaming=True))
    assert [r.result.output_token_ids for r in responses] == [[[21]], [[28]]]
    assert [r.result.is_final for r in responses] == [False, True]
    ([response], _) = ask(found, verify(35, prompt=[3, 4, 21, 28]))
    assert response.result.output_token_ids == [[35, 42]]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (verify(*range(9)), "max_draft_len"),
        (Request(list(range(30)), 1), "max_num_tokens"),
        (Request(list(range(13)), 1), "max_seq_len"),
    ],
)
def test_a_request_that_cannot_run_is_an_error_response(request_, words):
    limits = EngineLimits(max_num_tokens=29, max_seq_len=20 if words == "max_seq_len" else 4096)
    responses, _ = ask(executor(limits=limits), request_, Request(PROMPT, 1))
    assert words in responses[0].error_msg
    assert responses[1].result.output_token_ids == [[21]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Request([], 1),
        lambda: Request(PROMPT, 0),
        lambda: Request([np.int64(3)], 1),
        lambda: SamplingConfig(min_p=0.1),
        lambda: ExternalDraftTokensConfig([]),
    ],
)
def test_what_the_bindings_lack_raises(make):
    with pytest.raises((RuntimeError, TypeError)):
        make()


def test_waiting_requests_keep_their_order_and_fit_the_limits():
    """Of three requests with 2 tokens each, two fit into 4 tokens, and one row into a batch."""
    requests = [Request([n, n + 500], 1) for n in range(3)]
    for limits in (EngineLimits(max_num_tokens=4), EngineLimits(max_batch_size=2)):
        found = executor(limits=limits)
        found.enqueue_requests(requests)
        first = found.await_responses(timedelta(0))
        assert [response.request_id for response in first] == [1, 2]
        assert len(found.await_responses(timedelta(0))) == 1


def test_a_cancel_takes_effect_after_the_next_iteration():
    found = executor()
    found.enqueue_requests([Request(PROMPT, 9, streaming=True)])
    found.await_responses(timedelta(0))
    found.cancel_request(1)
    found.cancel_request(77)
    late, last = found.await_responses(timedelta(0))
    assert late.result.output_token_ids == [[28]]
    assert last.result.output_token_ids == [[]]
    assert last.result.finish_reasons == [FinishReason.CANCELLED]
    assert not found.num_held


def test_only_tokens_that_are_not_cached_take_time():
    """2 tokens of the prompt; then 1 and 2 drafts. Another salt finds nothing."""
    found = executor(cost=COST)
    for request, seconds in (
        (Request(PROMPT, 1), 2.0),
        (verify(28, 35, prompt=[3, 4, 21]), 3.0),
        (Request(PROMPT, 1, cache_salt_id=5), 2.0),
        (Request(PROMPT, 1, cache_salt_id=5), 1.0),
    ):
        start_s = found._clock.now()
        ask(found, request)
        assert found._clock.now() - start_s == pytest.approx(seconds)


def test_a_draft_executor_continues_the_target_s_text():
    target = executor()
    ask(target, Request(PROMPT, 1))
    draft = DraftExecutor(
        EngineLimits(max_draft_len=0), clock=VirtualClock(), accept_prob=0.5, texts=target.texts
    )
    ([response], _) = ask(draft, Request([3, 4, 21], 200))
    expected = [(7 + 7 * t) % 1000 for t in range(3, 203)]
    drafted = response.result.output_token_ids[0]
    wrong = {found - token for found, token in zip(drafted, expected, strict=True)}
    assert wrong <= {0, 1, -999}
    num_right = sum(map(int.__eq__, drafted, expected))
    assert 60 < num_right < 140  # 100 of 200, with a standard deviation of 7


def test_after_shutdown_calls_raise():
    found = executor()
    found.shutdown()
    assert not found.can_enqueue_requests()
    with pytest.raises(RuntimeError, match="shut down"):
        found.enqueue_requests([Request(PROMPT, 1)])
