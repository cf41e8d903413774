"""Text over the real wire: both transports, streamed or not, under every policy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException
from wire import generate, generate_stream, grpc_inputs, grpc_stream

from smartspec_bench import texts
from smartspec_launch.triton_server import TritonServer
from smartspec_py.api.contract import OUTPUTS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.triton

POLICIES = ("none", "fixed:1", "fixed:4", "goodput")


def test_the_start_is_told_as_data(local_server: TritonServer) -> None:
    """What is served."""
    assert local_server.context_len == 512
    facts = local_server.facts
    assert facts["proposers"] == ["draft_model", "prompt_lookup"]
    assert (facts["model"], facts["dtype"], facts["threads"]) == ("target", "float32", 1)
    assert facts["policy"] == "goodput"


def test_the_documented_request_is_answered_as_it_says(local_server: TritonServer) -> None:
    text = (ROOT / "docs/start/your-own-pair.md").read_text(encoding="utf-8")
    found = re.search(
        r"generate -d '(.+?)'\n```.*?`text_output`:\n\n```text\n(.+?)\n```", text, re.DOTALL
    )
    assert found is not None
    response = generate(local_server, **json.loads(found[1]))
    assert response["text_output"] == found[2]
    assert response["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("workload", "temperature"), list(zip(texts.TINY, (0.0, 1.0, 0.0, 1.0), strict=True))
)
def test_one_text_whatever_the_way(
    local_server: TritonServer, workload: str, temperature: float
) -> None:
    """HTTP at once, HTTP streamed and gRPC streamed, each policy: the same text."""
    fields = {
        "text_input": texts.prompt(workload, 0),
        "max_tokens": 40,
        "temperature": temperature,
        "seed": 3,
    }
    found = set()
    for policy in POLICIES:
        found.add(generate(local_server, **fields, speculation_policy=policy)["text_output"])
    found.add("".join(r["text_output"] for r in generate_stream(local_server, **fields)))
    results = grpc_stream(local_server, grpc_inputs({**fields, "stream": True}))
    found.add(b"".join(r.as_numpy("text_output").item() for r in results).decode())
    assert len(found) == 1


def test_tritons_http_client_works_without_administration(local_server: TritonServer) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{local_server.address.http_port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("smartspec")
        assert client.get_server_metadata()["name"] == "triton"
        assert client.get_model_metadata("smartspec")["name"] == "smartspec"
        assert client.get_model_config("smartspec")["backend"] == "smartspec_py"
        assert client.get_inference_statistics("smartspec")["model_stats"]
        with pytest.raises(InferenceServerException, match="not served"):
            client.unload_model("smartspec")


TIMES = ("arrival", "first_scheduled", "first_token", "last_token")
ON_DEMAND = {
    "cum_log_probs",
    "output_log_probs",
    "metrics",
    "explanation",
    "no_speculation",
    "output_ids",
    "token_log_probs",
    "proposer",
    *(f"{name}_time_ns" for name in TIMES),
    *(f"kv_cache_{name}_blocks" for name in ("alloc_new", "reused", "alloc_total")),
}


def test_counts_add_up(local_server: TritonServer) -> None:
    fields = {"text_input": "Question: who?\nAnswer:", "max_tokens": 24, "end_id": -1}
    responses = generate_stream(local_server, **fields, speculation_policy="fixed:4")
    last = responses[-1]
    assert set(last) == {spec.name for spec in OUTPUTS} - ON_DEMAND | {
        "model_name",
        "model_version",
    }
    assert sum(r["num_output_tokens"] for r in responses) == 24
    assert last["finish_reason"] == "length"
    assert all(r["finish_reason"] == "" for r in responses[:-1])
    assert last["num_input_tokens"] > 0
    assert sum(r["num_input_tokens"] for r in responses[:-1]) == 0
    # The first token is the prompt's; each step brings its accepted drafts and one more.
    assert 1 + last["num_steps"] + last["total_accepted_draft_tokens"] == 24
    rate = last["total_accepted_draft_tokens"] / last["total_draft_tokens"]
    assert last["acceptance_rate"] == pytest.approx(rate, abs=1e-6)


def test_what_is_asked_for_is_there(local_server: TritonServer) -> None:
    """Log-probabilities of all tokens add up to the last sum; the record adds up to the counts."""
    fields = {"text_input": "Question: who?\nAnswer:", "max_tokens": 24, "end_id": -1}
    responses = generate_stream(
        local_server,
        **fields,
        speculation_policy="fixed:4",
        return_log_probs=True,
        return_token_log_probs=1,
        return_output_ids=True,
        return_perf_metrics=True,
        return_spec_metrics="detailed",
        stop_words=["never there"],
    )
    last = responses[-1]
    assert set(last) >= ON_DEMAND - {"no_speculation", "explanation"}
    log_probs = [p for r in responses for p in _as_list(r["output_log_probs"])]
    assert len(log_probs) == 24
    assert all(p <= 0 for p in log_probs)
    entries = [e for r in responses for e in json.loads(r["token_log_probs"]).get("output", [])]
    assert [value for _, value, _ in entries] == pytest.approx(log_probs)
    tokens = [token for r in responses for token in _as_list(r["output_ids"])]
    assert tokens == [token for token, _, _ in entries]
    assert last["cum_log_probs"] == pytest.approx(sum(log_probs), rel=1e-5)
    times = [last[f"{name}_time_ns"] for name in TIMES]
    assert times == sorted(times)
    assert times[0] > 0
    record = json.loads(last["metrics"])["speculative_decoding"]
    assert record["num_draft_tokens"] == last["total_draft_tokens"]
    assert record["num_accepted_draft_tokens"] == last["total_accepted_draft_tokens"]
    assert sum(record["per_step_drafted"]) == last["total_draft_tokens"]


def _as_list(value: float | list[float]) -> list[float]:
    """Triton writes a tensor of one element as a bare number."""
    return value if isinstance(value, list) else [value]


def test_a_prompt_that_was_read_before_is_taken_over(local_server: TritonServer) -> None:
    prompt = texts.prompt("tiny-summarize", 5)
    fields = {"text_input": prompt, "max_tokens": 12, "temperature": 0.8, "seed": 3}
    alone = generate(local_server, **fields, reuse_prefix=False)
    first = generate(local_server, **fields)
    again = generate(local_server, **fields)
    assert alone["num_cached_tokens"] == first["num_cached_tokens"] == 0
    assert again["num_cached_tokens"] == first["num_input_tokens"] - 1
    assert again["text_output"] == first["text_output"]


def test_seed_is_drawn_and_echoed(local_server: TritonServer) -> None:
    """A second request with the seed that the first reports has the same text."""
    fields = {"text_input": "Write about the sea.\nAnswer:", "max_tokens": 30, "temperature": 1.2}
    first = generate(local_server, **fields)
    assert first["seed"] > 0
    assert generate(local_server, **fields)["seed"] != first["seed"]
    again = generate(local_server, **fields, seed=first["seed"])
    assert again["text_output"] == first["text_output"]


def test_stop_words_end_the_text_before_them(local_server: TritonServer) -> None:
    fields = {"text_input": texts.prompt("tiny-sql", 1), "max_tokens": 40}
    text = generate(local_server, **fields)["text_output"]
    word = text[6:9]
    stopped = generate(local_server, **fields, stop_words=[word, "never there"])
    assert stopped["text_output"] == text[: text.index(word)]
    assert stopped["finish_reason"] == "stop"
