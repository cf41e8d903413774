"""Log-probabilities of prompts and answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from endpoint_client import (
    CALLS,
    CHAT,
    HELLO,
    PROMPTS,
    TEXTS,
    WITH_TOOLS,
    events,
    folder,
    http,
    tool_client,
)
from standins import Echo, scored, text_with

from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_gateway.openai.model import Piece

A, B = (PROMPTS.encode(letter, add_special_tokens=False) for letter in "ab")


def test_a_prompt_alone_can_be_scored() -> None:
    prompt = PROMPTS.encode("Hello there")
    logs = {"prompt": scored(*prompt[1:]), "output": scored(300)}
    model = Echo(pieces=[Piece("x", 1, "stop", len(prompt), log_probs=logs)])
    body = {"prompt": "Hello there", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = http(model).post(TEXTS, json=body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello there", "length")
    assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert answer["usage"]["completion_tokens"] == 0
    assert model.asked[0]["max_tokens"] == 1
    for path, more in ((TEXTS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        refused = http().post(path, json={"max_tokens": 0, **more}).json()["error"]
        assert refused["param"] == "max_tokens"


def test_log_probs_of_parts_of_a_character() -> None:
    """ "🙂" is several tokens: one character, and names that differ."""
    prompt = PROMPTS.encode("🙂 hello")
    model = Echo(pieces=[Piece("", 1, "stop", 9, log_probs={"prompt": scored(*prompt[1:])})])
    body = {"prompt": "🙂 hello", "echo": True, "logprobs": 2}
    found = http(model).post(TEXTS, json=body).json()["choices"][0]["logprobs"]
    parts = [token for token in found["tokens"] if token.startswith("bytes:\\x")]
    assert "".join(parts).replace("bytes:", "") == "".join(f"\\x{b:02x}" for b in "🙂".encode())
    assert len(parts) > 1
    assert found["text_offset"][: len(parts) + 1] == [0] * len(parts) + [1]
    assert parts[1] in found["top_logprobs"][1]


def test_events_keep_their_lines_and_their_log_probs() -> None:
    text = "a\u2028b\u2029c\x85d"
    answer = http(text_with(text)).post(CHAT, json={"messages": HELLO, "stream": True}).text
    assert not {"\u2028", "\u2029", "\x85"} & set(answer)
    assert events(answer)[1]["choices"][0]["delta"]["content"] == text
    pieces = [Piece(part, 1, log_probs={"output": scored(300 + i)}) for i, part in enumerate(CALLS)]
    model = Echo(pieces=[*pieces, Piece("", 0, "stop", 5)])
    found = events(tool_client(model).post(CHAT, json=WITH_TOOLS | {"logprobs": True}).text)
    logs = [one["choices"][0]["logprobs"] for one in found[:-1]]
    assert sum(len(one["content"]) for one in logs if one) == len(CALLS)


def test_log_probs_of_a_chat() -> None:
    tokens = PROMPTS.encode("yes é", add_special_tokens=False)
    model = Echo(pieces=[Piece("yes é", 2, "stop", 5, log_probs={"output": scored(*tokens)})])
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    choice = http(model).post(CHAT, json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "yes é"
    assert [one["logprob"] for one in content] == [-0.5] * len(tokens)
    assert [len(one["top_logprobs"]) for one in content] == [2] * len(tokens)
    assert model.asked[0]["return_token_log_probs"] == 2
    off = http(Echo()).post(CHAT, json=body | {"logprobs": False})
    assert off.status_code == 400
    none = http(Echo()).post(CHAT, json={"messages": HELLO, "logprobs": False, "top_logprobs": 0})
    assert none.status_code == 200
    assert none.json()["choices"][0]["logprobs"] is None


def test_log_probs_with_echo() -> None:
    """Those of the prompt come first; its first token has none."""
    prompt = PROMPTS.encode("Hello there")
    logs = {"prompt": scored(*prompt[1:]), "output": scored(300)}
    model = Echo(pieces=[Piece("x", 1, log_probs=logs), Piece("", 0, "stop", len(prompt))])
    for given in ("Hello there", prompt, [prompt]):
        body = {"prompt": given, "echo": True, "logprobs": 1, "stream": True}
        found = events(http(model).post(TEXTS, json=body).text)
        first = found[0]["choices"][0]
        assert first["text"] == "Hello therex"
        logs = first["logprobs"]
        assert logs["token_logprobs"] == [None, *[-0.5] * len(prompt)]
        assert "".join(logs["tokens"][: len(prompt)]) == "Hello there"
        assert logs["text_offset"][len(prompt)] == len("Hello there")
        assert model.asked[-1]["return_prompt_log_probs"]
        assert (model.asked[-1]["input_ids"], model.asked[-1]["text_input"]) == (prompt, "")


@pytest.mark.parametrize(
    ("prompt", "offsets"),
    [("a<|end|>b", [0, 0, 1, 8, 9, 10, 10]), ([0, *A, 0, *B], [0, 7, 8, 15, 16, 17, 17])],
)
def test_offsets_are_those_of_the_text(
    tmp_path: Path, prompt: str | list[int], offsets: list[int]
) -> None:
    """A text has the special tokens that its client wrote: none that the tokenizer adds before it,
    and none that the model generates. Token 0 is <|end|>, of seven characters."""
    tokens = [0, *A, 0, *B]
    logs = {"prompt": scored(*tokens[1:]), "output": scored(*A, 0, *B)}
    model = Echo(pieces=[Piece("ab", 3, "stop", len(tokens), log_probs=logs)])
    client = http(model, Prompts(folder(tmp_path, None, "<|end|>")))
    body = {"prompt": prompt, "echo": True, "logprobs": 1}
    choice = client.post(TEXTS, json=body).json()["choices"][0]
    assert model.asked[0]["input_ids"] == tokens
    assert choice["logprobs"]["text_offset"] == offsets
    assert choice["text"].endswith("bab")
