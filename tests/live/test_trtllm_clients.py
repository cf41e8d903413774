"""What TensorRT-LLM's own gRPC clients send and how they read the answer, on both aliases.

Its `end_to_end_grpc_client.py` and `speculative_decoding_test.py` name the outputs that they want,
take the text as `output[0]` and counts as `array[0][0]`, of every response.
"""

from __future__ import annotations

import queue
from typing import Any

import pytest
import tritonclient.grpc as triton
from wire import grpc_inputs

from smartspec_launch.pbtxt import ALIASES
from smartspec_launch.triton_server import TritonServer

pytestmark = pytest.mark.triton

TIMEOUT_S = 60.0
PROMPT = "Question: where is the lamp?\nAnswer:"
SENT = {"text_input": PROMPT, "max_tokens": 24, "beam_width": 1, "temperature": 0.0}
DRAFTING = {"num_draft_tokens": 5, "use_draft_logits": False}
PERF = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)


def ask(server: TritonServer, model: str, fields: dict[str, Any], wanted: tuple[str, ...]) -> Any:
    """All responses: the stream is closed at once, and the server ends it after the last."""
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    outputs = [triton.InferRequestedOutput(name) for name in ("text_output", *wanted)]
    with triton.InferenceServerClient(server.address.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(model, grpc_inputs(fields), outputs=outputs)
        client.stop_stream()
    answers = list(arrived.queue)
    assert [error for _, error in answers if error is not None] == []
    return [result for result, _ in answers]


@pytest.mark.parametrize("has_perf_metrics", [False, True])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_clients_read_their_answers(
    local_server: TritonServer, is_streaming: bool, has_perf_metrics: bool
) -> None:
    """From both aliases, with drafts and without: one text, which a stream has without prompt."""
    fields = SENT | {"stream": is_streaming, "exclude_input_in_output": False}
    fields |= {"return_perf_metrics": True} if has_perf_metrics else {}
    wanted = PERF if has_perf_metrics else ()
    texts = set()
    for model in ALIASES:
        for drafting in ({}, DRAFTING):
            results = ask(local_server, model, fields | drafting, wanted)
            texts.add("".join(r.as_numpy("text_output")[0].decode() for r in results))
            counts = [{name: r.as_numpy(name)[0][0] for name in wanted} for r in results]
            assert all(last["last_token_time_ns"] > 0 for last in counts[-1:] if last)
            assert is_streaming or len(results) == 1
    (text,) = texts
    assert text.startswith(PROMPT) != is_streaming


def test_shapes_are_those_of_tensorrt_llm(local_server: TritonServer) -> None:
    """A batch of one text of one beam, as its postprocessing and its backend send them."""
    shapes = dict.fromkeys((*PERF, "num_input_tokens", "num_output_tokens"), (1, 1))
    shapes |= {"text_output": (1,), "cum_log_probs": (1, 1), "output_log_probs": (1, 1, 24)}
    fields = SENT | {"return_perf_metrics": True, "return_log_probs": True, "end_id": -1}
    (result,) = ask(local_server, "ensemble", fields, tuple(shapes)[:-3] + tuple(shapes)[-2:])
    assert {name: result.as_numpy(name).shape for name in shapes} == shapes
