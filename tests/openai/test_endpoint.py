"""The endpoint's routes with a model that answers from memory. See tests/live/test_openai.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from smartspec_openai.answers import pieces_of
from smartspec_openai.app import Settings, create_app
from smartspec_openai.errors import ApiError
from smartspec_openai.prompts import PromptError, Prompts
from smartspec_openai.triton import Piece

TINY = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
PROMPTS = Prompts(TINY)
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "Hello!"}]


class Echo:
    """Answers "one two" in two pieces. asked: the tensors of each request, in order.

    error: raised after num_before pieces. num_cancelled: requests that were closed early.
    """

    def __init__(self, error: ApiError | None = None, num_before: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.error, self.num_before = error, num_before
        self.num_cancelled = 0
        self.is_slow = False

    async def generate(self, tensors: Mapping[str, tuple[str, Any]]) -> AsyncIterator[Piece]:
        self.asked.append({name: value for name, (_, value) in tensors.items()})
        pieces = [Piece("one", 1), Piece(" two", 2, "stop", 7, '{"speculative_decoding":{}}')]
        try:
            for number, piece in enumerate(pieces):
                if self.error is not None and number == self.num_before:
                    raise self.error
                yield piece
                if self.is_slow:
                    await asyncio.sleep(60)
        except (GeneratorExit, asyncio.CancelledError):
            self.num_cancelled += 1
            raise

    async def is_ready(self) -> bool:
        return self.error is None

    async def close(self) -> None:
        pass


def client(model: Echo | None = None, **settings: Any) -> TestClient:
    given = {"name": "smartspec", "context_len": 512, **settings}
    return TestClient(create_app(model or Echo(), PROMPTS, Settings(**given)))


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_chat_becomes_the_models_prompt() -> None:
    model = Echo()
    body = {
        "messages": [*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO],
        "stop": "x",
        "seed": -1,
        "n": 2,
        "max_completion_tokens": 9,
        "logit_bias": {"300": 5},
        "tpot_slo_ms": 30,
        "speculation_policy": "fixed:2",
    }
    answer = client(model).post("/v1/chat/completions", json=body).json()
    prompt = b"Task: chat\nUser: Hello!\nAssistant: Hi.\nUser: Hello!\nAnswer:"
    first, second = model.asked
    assert first["text_input"] == second["text_input"] == prompt
    assert (first["seed"], second["seed"]) == (2**64 - 1, 0)
    assert (first["max_tokens"], first["stop_words"]) == (9, [b"x"])
    assert PROMPTS.encode(first["embedding_bias_words"][0].decode()) == [300]
    assert first["embedding_bias_weights"] == [5.0]
    assert (first["tpot_slo_ms"], first["speculation_policy"]) == (30.0, "fixed:2")
    assert answer["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["one two"] * 2
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 2
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
    assert answer["speculative_decoding"] == {}


def test_without_max_tokens_the_context_is_used() -> None:
    model = Echo()
    client(model).post("/v1/completions", json={"prompt": "Hello there"})
    assert model.asked[0]["max_tokens"] == 512 - len(PROMPTS.encode("Hello there"))


def test_streams_end_with_usage_and_done() -> None:
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    found = events(client().post("/v1/chat/completions", json=body).text)
    one, two, usage, done = found
    assert one["choices"][0]["delta"] == {"role": "assistant", "content": "one"}
    assert two["choices"][0]["delta"] == {"content": " two"}
    assert two["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
    assert done == "[DONE]"


def test_several_prompts_and_echo() -> None:
    body = {"prompt": ["a", "b"], "echo": True, "n": 2}
    answer = client().post("/v1/completions", json=body).json()
    assert [c["text"] for c in answer["choices"]] == ["aone two"] * 2 + ["bone two"] * 2
    assert answer["usage"]["prompt_tokens"] == 14
    stream = client().post("/v1/completions", json={"prompt": "a", "echo": True, "stream": True})
    assert [one["choices"][0]["text"] for one in events(stream.text)[:-1][:2]] == ["aone", " two"]


@pytest.mark.parametrize(
    ("changed", "param", "part"),
    [
        ({"temperature": 3}, "temperature", "got 3"),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"max_tokens": 2**40}, "max_tokens", "got 1099511627776"),
        ({"top_k": 2**40}, "top_k", "got"),
        ({"max_token": 3}, "max_token", "similar: max_tokens"),
        ({"tools": []}, "tools", "not supported"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "text"),
        ({"n": 17}, "n", "got 17"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "robot"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages", "only the roles"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens", "only one"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "got token '9999'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "surrogates"),
    ],
)
def test_wrong_fields_are_named(changed: dict[str, Any], param: str | None, part: str) -> None:
    model = Echo()
    body = json.dumps({"messages": HELLO, **changed}).encode()
    answer = client(model).post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert part in error["message"]
    assert not model.asked


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"prompt": %s}' % (b"[" * 9_000)])
def test_bodies_that_are_no_request(body: bytes) -> None:
    answer = client().post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_errors_of_the_model() -> None:
    refused = ApiError(400, "prompt: got 9 tokens, must be at most 8 tokens", "prompt")
    for stream in (False, True):
        body = {"messages": HELLO, "stream": stream}
        answer = client(Echo(refused)).post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"
        assert answer.json()["error"]["message"].startswith("messages: got 9 tokens")
    full = ApiError(503, "the queue is full", retry_after_s=1)
    answer = client(Echo(full)).post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    late = client(Echo(full, num_before=1))
    found = events(late.post("/v1/completions", json={"prompt": "x", "stream": True}).text)
    assert found[0]["choices"][0]["text"] == "one"
    assert found[1] == full.body, "no [DONE] after an error"


def test_chunks_have_counts_if_asked() -> None:
    body = {"messages": HELLO, "stream": True, "return_spec_metrics": "detailed"}
    first = events(client().post("/v1/chat/completions", json=body).text)[0]
    assert first["choices"][0]["speculation"] == {
        "num_tokens": 1,
        "num_steps": 0,
        "num_drafted": 0,
        "num_accepted": 0,
    }


def test_the_page_needs_nothing_from_elsewhere() -> None:
    found = client(api_keys=("key",)).get("/")
    assert found.status_code == 200
    assert "https:" not in found.text
    assert "http:" not in found.text
    assert "default-src 'self'" in found.headers["content-security-policy"]


def test_too_many_requests_are_refused() -> None:
    answer = client(max_requests=0).post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


def test_api_keys() -> None:
    asked = client(api_keys=("first", "second"))
    assert asked.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics"):
        assert asked.get(path).status_code == 401
    for key, status in (("second", 200), ("third", 401), ("sécond", 401)):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert asked.get("/v1/models", headers=headers).status_code == status


def test_models_tokens_and_health() -> None:
    asked = client()
    (model,) = asked.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("smartspec", 512)
    tokens = asked.post("/tokenize", json={"prompt": "Hello there"}).json()["tokens"]
    assert asked.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "Hello there"}
    wrong = asked.post("/detokenize", json={"tokens": [99_999]}).json()["error"]
    assert wrong["message"] == "tokens: got 99999, must be in 0..2047"
    assert client(Echo(ApiError(503, ""))).get("/health").status_code == 503
    missing = asked.post("/v1/completions", json={"prompt": "x", "model": "gpt"})
    assert missing.status_code == 404
    assert "'smartspec'" in missing.json()["error"]["message"]


def test_closing_the_pieces_cancels_all_requests() -> None:
    model = Echo()
    model.is_slow = True

    async def run() -> None:
        pieces = pieces_of(model, [{}, {}, {}])
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert model.num_cancelled == 3


def folder(path: Path, template: str | list[Any] | None, bos: str | None = None) -> Path:
    """A model's directory with the shipped tokenizer, which begins texts with `bos` if given."""
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    if bos is not None:
        token = {"type_id": 0, "id": bos}
        single = [{"SpecialToken": token}, {"Sequence": {"id": "A", "type_id": 0}}]
        special = {bos: {"id": bos, "ids": [0], "tokens": [bos]}}
        kind = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [],
            "special_tokens": special,
        }
        tokenizer["post_processor"] = kind
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": bos, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_begin_token_is_not_doubled(tmp_path: Path) -> None:
    """Llama's templates begin with the token that its tokenizer also adds."""
    template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    prompts = Prompts(folder(tmp_path, template, "<|end|>"))
    assert prompts.of_chat(HELLO, {}) == "[Hello!]"
    assert prompts.encode(prompts.of_chat(HELLO, {})).count(0) == 1


def test_templates_of_a_model(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ x }}"}]
    assert Prompts(folder(tmp_path, named)).of_chat(HELLO, {"x": 5}) == "d5"
    none = Prompts(folder(tmp_path, None))
    with pytest.raises(ApiError, match="--chat-template"):
        none.of_chat(HELLO, {})
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert Prompts(tmp_path, own).of_chat(HELLO, {}) == "own"
    with pytest.raises(PromptError, match=r"gone\.jinja"):
        Prompts(tmp_path, tmp_path / "gone.jinja")
