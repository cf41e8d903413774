"""Fields of requests that the fake acts on, or refuses; made from a directory; errors.

The prompt (3, 4) sums to 7; with 1000 tokens in the vocabulary its text is 7 + 7 t:
position  2   3   4   5   6   7   8
token     21  28  35  42  49  56  63
"""

import json
import math
import re
from datetime import timedelta

import pytest
import torch

from smartspec_testing import fake_executor
from smartspec_testing.clock import VirtualClock
from smartspec_testing.fake_executor import (
    Behaviour,
    DoubleBindings,
    EngineLimits,
    Executor,
    ExternalDraftTokensConfig,
    FinishReason,
    OutputConfig,
    Request,
    SamplingConfig,
)

PROMPT = [3, 4]


def request(tokens=PROMPT, max_tokens=3, drafts=None, output=(), **options):
    return Request(
        tokens,
        max_tokens,
        output_config=OutputConfig(exclude_input_from_output=True, **dict(output)),
        external_draft_tokens_config=drafts and ExternalDraftTokensConfig(drafts),
        **options,
    )


def run(asked, **options):
    """The one result."""
    executor = Executor(EngineLimits(), **options)
    executor.enqueue_requests([asked])
    (response,) = executor.await_responses()
    return response.result


@pytest.mark.parametrize(
    ("options", "tokens", "finish"),
    [
        ({"stop_words": [[28]]}, [21, 28], FinishReason.STOP_WORDS),
        ({"stop_words": [[4, 21]]}, [21], FinishReason.STOP_WORDS),  # begun in the prompt
        ({"stop_words": [[21, 35]]}, [21, 28, 35], FinishReason.LENGTH),
        ({"bad_words": [[28]]}, [21, 29, 35], FinishReason.LENGTH),
        ({"bad_words": [[28], [29]]}, [21, 30, 35], FinishReason.LENGTH),
        ({"bad_words": [[21, 28]]}, [21, 29, 35], FinishReason.LENGTH),
        ({"bad_words": [[22, 28]]}, [21, 28, 35], FinishReason.LENGTH),
        ({"drafts": [21, 28, 36], "max_tokens": 4}, [21, 28, 35], FinishReason.NOT_FINISHED),
        (
            {"drafts": [21, 28, 35], "stop_words": [[28]], "max_tokens": 4},
            [21, 28],
            FinishReason.STOP_WORDS,
        ),
        ({"drafts": [21, 29], "bad_words": [[28]]}, [21, 29, 35], FinishReason.LENGTH),
    ],
)
def test_words(options, tokens, finish):
    result = run(request(**options))
    assert (result.output_token_ids[0], result.finish_reasons[0]) == (tokens, finish)


def test_min_tokens_put_off_the_end_token():
    sampling = SamplingConfig(min_tokens=2)
    result = run(request(max_tokens=5, end_id=28, sampling_config=sampling))
    assert result.output_token_ids[0] == [21, 29, 35, 42, 49]
    sampling = SamplingConfig(min_tokens=1)
    result = run(request(max_tokens=5, end_id=28, sampling_config=sampling))
    assert (result.output_token_ids[0], result.finish_reasons[0]) == ([21], FinishReason.END_ID)


@pytest.mark.parametrize("options", [{"bad_words": [[28], [29]]}, {"bad_words": [[21, 28]]}])
def test_a_text_with_replaced_tokens_goes_on_wherever_it_was_cut(options):
    whole = run(request(max_tokens=6, **options)).output_token_ids[0]
    for cut in range(1, 6):
        rest = run(request(PROMPT + whole[:cut], 6 - cut, **options)).output_token_ids[0]
        assert whole[:cut] + rest == whole


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        # A presence of 11 exceeds the peaks of 10 and 11, but not that of 12 at position 5.
        ({"presence_penalty": 11.0}, [21, 28, 35]),
        ({"repetition_penalty": 2.0}, [21, 28, 35]),
        ({"bias": {28: -20.0}}, [21, 29, 35]),
        ({"bias": {500: 11.5}}, [21, 500, 500]),  # peaks of 12, 10 and 11
        ({"bias": {500: 11.5}, "presence_penalty": 1.0}, [21, 500, 35]),  # once 500 is known
        ({"bias": {500: 11.5}, "frequency_penalty": 0.4}, [21, 500, 500]),
        ({"bias": {500: 11.5}, "frequency_penalty": 0.6}, [21, 500, 35]),
        ({"bias": {500: 11.5}, "repetition_penalty": 1.5}, [21, 500, 35]),
        # Penalties come after the temperature: 23 - 1 exceeds 22.
        (
            {"bias": {500: 11.5}, "presence_penalty": 0.9, "temperature": 0.5, "top_k": 1},
            [21, 500, 500],
        ),
    ],
)
def test_bias_and_penalties(options, tokens):
    bias = torch.zeros(1000)
    for token, value in options.pop("bias", {}).items():
        bias[token] = value
    sampling = SamplingConfig(**options)
    asked = {"embedding_bias": bias, "sampling_config": sampling}
    whole = run(request(max_tokens=6, **asked)).output_token_ids[0]
    assert whole[:3] == tokens
    for cut in range(1, 6):
        rest = run(request(PROMPT + whole[:cut], 6 - cut, **asked)).output_token_ids[0]
        assert whole[:cut] + rest == whole


def test_penalties_count_the_prompt():
    """28 is in the prompt (28, 5), whose text begins with 33 + 14, with a peak of 12."""
    bias = torch.zeros(1000)
    bias[28] = 12.5
    for penalty, token in ((0.0, 28), (3.0, 47)):
        sampling = SamplingConfig(frequency_penalty=penalty)
        asked = request([28, 5], 1, embedding_bias=bias, sampling_config=sampling)
        assert run(asked).output_token_ids[0] == [token]


def test_generation_logits_are_the_model_s_and_turned_where_text_is_streamed():
    executor = Executor(EngineLimits())
    asked = {"bad_words": [[28]], "output": {"return_generation_logits": True}}
    executor.enqueue_request(request(streaming=True, **asked))
    found = [executor.await_responses()[0].result for _ in range(3)]
    assert [result.output_token_ids[0] for result in found] == [[21], [29], [35]]
    assert [tuple(result.generation_logits.shape) for result in found] == [(1, 1, 1000)] * 3
    assert [int(result.generation_logits.argmax()) for result in found] == [21, 28, 35]
    whole = run(request(**asked)).generation_logits
    assert whole.shape == (1, 3, 1000)


@pytest.mark.parametrize(
    ("max_draft_len", "normalizes", "is_zero"),
    [(8, False, True), (0, True, True), (0, False, False)],
)
def test_log_probs_are_missing_where_the_sources_write_none(max_draft_len, normalizes, is_zero):
    """Each response has those of all tokens so far."""
    config = fake_executor.ExecutorConfig(normalize_log_probs=normalizes)
    executor = Executor(EngineLimits(max_draft_len=max_draft_len), None, config)
    executor.enqueue_request(request(streaming=True, output={"return_log_probs": True}))
    found = [executor.await_responses()[0].result.log_probs[0] for _ in range(3)]
    assert [len(values) for values in found] == [1, 2, 3]
    assert all((value == 0.0) == is_zero for value in found[-1])


def test_log_probs_are_those_of_the_logits():
    asked = request(output={"return_log_probs": True, "return_generation_logits": True})
    config = fake_executor.ExecutorConfig(normalize_log_probs=False, gather_generation_logits=True)
    executor = Executor(EngineLimits(max_draft_len=0), None, config)
    executor.enqueue_requests([asked])
    (response,) = executor.await_responses()
    result = response.result
    assert result.generation_logits.shape == (1, 3, 1000)
    assert result.generation_logits[0].argmax(-1).tolist() == [21, 28, 35]
    table = result.generation_logits[0].double().log_softmax(-1)
    expected = [float(table[i, token]) for i, token in enumerate([21, 28, 35])]
    assert result.log_probs[0] == pytest.approx(expected, abs=1e-6)
    assert result.cum_log_probs == pytest.approx([math.fsum(expected)], abs=1e-5)


def test_perf_metrics_of_a_verification():
    result = run(request(drafts=[21, 29], output={"return_perf_metrics": True}))
    metrics = result.request_perf_metrics
    assert metrics.speculative_decoding.total_draft_tokens == 2
    assert metrics.speculative_decoding.total_accepted_draft_tokens == 1
    assert metrics.speculative_decoding.acceptance_rate == 0.5
    assert (metrics.first_iter, metrics.last_iter) == (1, 1)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"sampling_config": SamplingConfig(no_repeat_ngram_size=2)}, "no_repeat_ngram_size"),
        ({"lora_config": object()}, "lora_config"),
    ],
)
def test_what_would_change_the_text_is_refused_by_name(options, name):
    with pytest.raises(RuntimeError, match=name):
        run(request(**options))


def test_neutral_values_are_taken():
    sampling = SamplingConfig(repetition_penalty=1.0, presence_penalty=0.0, top_p_min=0.1)
    assert run(request(sampling_config=sampling)).output_token_ids[0] == [21, 28, 35]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits": torch.zeros(2, 10)}, r"logits must be \[1, vocab_size\]"),
        ({"logits": torch.zeros(10)}, "logits must be"),
        ({"acceptance_threshold": 0.0}, "acceptance_threshold"),
        ({"acceptance_threshold": 1.5}, "acceptance_threshold"),
        ({"fast_logits": True}, "fast_logits"),
    ],
)
def test_draft_configs_are_checked(options, message):
    with pytest.raises(RuntimeError, match=message):
        ExternalDraftTokensConfig([5], **options)
    assert ExternalDraftTokensConfig([5], torch.zeros(1, 10), 1.0).tokens == [5]


def test_the_request_type_bears_another_name_as_attribute():
    kind = fake_executor.RequestType.REQUEST_TYPE_CONTEXT_ONLY
    assert Request(PROMPT, 1, type=kind).request_type is kind


def test_higher_priority_comes_first():
    executor = Executor(EngineLimits(max_batch_size=1))
    ids = executor.enqueue_requests([request(), request(priority=0.9), request(priority=0.9)])
    order = [executor.await_responses()[0].request_id for _ in ids]
    assert order == [ids[1], ids[2], ids[0]]


def test_responses_of_one_request_or_of_each():
    executor = Executor(EngineLimits())
    first, second, third = executor.enqueue_requests([request()] * 3)
    assert [r.request_id for r in executor.await_responses(second)] == [second]
    assert executor.get_num_responses_ready() == 2
    groups = executor.await_responses([third, first], timedelta(0))
    assert [[r.request_id for r in group] for group in groups] == [[third], [first]]
    assert executor.await_responses(id=first, timeout=timedelta(0)) == []


def test_streaming_can_bring_all_so_far():
    executor = Executor(EngineLimits())
    executor.enqueue_request(request(streaming=True, return_all_generated_tokens=True))
    texts = [executor.await_responses()[0].result.output_token_ids[0] for _ in range(3)]
    assert texts == [[21], [21, 28], [21, 28, 35]]


def test_a_response_that_was_on_its_way_survives_the_cancel():
    """It had ended before: the cancel finds nothing, and its result stays."""
    executor = Executor(EngineLimits())
    first, second = executor.enqueue_requests([request(max_tokens=1), request(max_tokens=2)])
    executor.await_responses(second)
    executor.cancel_request(first)
    (late,) = executor.await_responses(first)
    assert late.result.finish_reasons == [FinishReason.LENGTH]


def test_errors_are_injected_from_the_seed():
    def failed(seed):
        executor = Executor(EngineLimits(), error_prob=0.5, seed=seed)
        executor.enqueue_requests([request(max_tokens=1)] * 12)
        return [response.has_error() for response in executor.await_responses()]

    assert 0 < sum(failed(1)) < 12
    assert failed(1) == failed(1) != failed(2)
    with pytest.raises(ValueError, match="error_prob"):
        Executor(EngineLimits(), error_prob=1.5)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.NOT_FINISHED])
def test_the_reason_of_full_acceptance_is_a_switch(reason):
    behaviour = Behaviour(finish_of_full_acceptance=reason)
    result = run(request(drafts=[21, 28]), behaviour=behaviour)
    assert (result.output_token_ids[0], result.finish_reasons[0]) == ([21, 28, 35], reason)


@pytest.mark.parametrize(("all_positions", "tokens"), [(True, [9, 9, 9]), (False, [9, 28])])
def test_a_post_processor_sees_all_positions_or_the_first(all_positions, tokens):
    def force_nine(request_id, logits, token_ids, stream, client_id):
        logits[..., 9] = 99.0

    drafts = [9, 9] if all_positions else [9, 29]
    behaviour = Behaviour(processes_all_positions=all_positions)
    result = run(request(drafts=drafts, logits_post_processor=force_nine), behaviour=behaviour)
    assert result.output_token_ids[0] == tokens


def write_engine(directory, mode=2, **build):
    directory.mkdir()
    limits = {"max_batch_size": 4, "max_num_tokens": 64, "max_input_len": 32, "max_seq_len": 40}
    document = {
        "build_config": limits | {"max_draft_len": 2, "speculative_decoding_mode": mode} | build,
        "pretrained_config": {"vocab_size": 50},
    }
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def test_an_executor_from_a_directory(tmp_path):
    """With 50 tokens in the vocabulary the text goes on with 21, 28, 35, 42, 49, 6."""
    engine = write_engine(tmp_path / "target")
    bindings = DoubleBindings(clock=VirtualClock())
    config = bindings.ExecutorConfig(max_queue_size=2, max_batch_size=1)
    with bindings.Executor(str(engine), bindings.ModelType.DECODER_ONLY, config) as executor:
        executor.enqueue_requests([request(max_tokens=6), request(), request()])
        refused, first = executor.await_responses(), executor.await_responses()
        assert [r.error_msg for r in refused] == ["the queue is full: max_queue_size is 2"]
        assert [r.result.output_token_ids for r in first] == [[[21, 28, 35, 42, 49, 6]]]
        for asked, reason in (
            ({"drafts": [1, 2, 3]}, "max_draft_len 2"),
            ({"output": {"return_generation_logits": True}}, "gather_generation_logits"),
            ({"output": {"return_context_logits": True}}, "return_context_logits"),
            ({"embedding_bias": torch.zeros(51)}, r"\[50\], got \(51,\)"),
        ):
            executor.enqueue_request(request(**asked))
            (refused,) = executor.await_responses()
            assert re.search(reason, refused.error_msg)
    assert not executor.can_enqueue_requests()


def test_engines_that_take_no_drafts_and_none_at_all(tmp_path):
    bindings = DoubleBindings()
    engine = write_engine(tmp_path / "draft", mode=1)
    executor = bindings.Executor(engine, bindings.ModelType.DECODER_ONLY, bindings.ExecutorConfig())
    executor.enqueue_request(request(drafts=[1]))
    assert "max_draft_len 0" in executor.await_responses()[0].error_msg
    with pytest.raises(RuntimeError, match="File does not exist"):
        bindings.Executor(tmp_path / "nothing", None, bindings.ExecutorConfig())


def test_iteration_statistics_count_the_batch():
    """Two contexts of 2 and 2 + 2 tokens; then the first generates beside nobody."""
    executor = Executor(EngineLimits(), behaviour=Behaviour(fills_specdec_stats=True))
    executor.enqueue_requests([request(max_tokens=2), request(drafts=[21, 29])])
    executor.await_responses()
    executor.await_responses()
    first, second, last = executor.get_latest_iteration_stats()
    batch = first.inflight_batching_stats
    assert (batch.num_context_requests, batch.num_gen_requests, batch.num_ctx_tokens) == (2, 0, 6)
    assert (first.specdec_stats.num_draft_tokens, second.specdec_stats.num_accepted_tokens) == (
        2,
        1,
    )
    assert first.num_new_active_requests == 2
    batch = second.inflight_batching_stats
    assert (batch.num_context_requests, batch.num_gen_requests) == (0, 1)
    assert json.loads(second.to_json_str())["iter"] == 2
    assert (last.num_active_requests, last.iter_latency_ms) == (0, 0.0)


def test_names_that_the_bindings_lack_are_not_there():
    with pytest.raises(AttributeError, match="BatchManager"):
        _ = fake_executor.BatchManager
    assert not hasattr(DoubleBindings(), "BatchManager")
