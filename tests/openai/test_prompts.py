"""Prompts of a model: its tokenizer, and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from endpoint_client import CHAT, HELLO, TEXTS, TOOL, folder, http
from standins import TINY, Echo

from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.prompts import PromptError, Prompts

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_models_tokens_and_health() -> None:
    asked = http()
    (model,) = asked.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("smartspec", 512)
    assert asked.get("/v1/models/smartspec").json() == model
    assert asked.get("/v1/models/gpt").json()["error"]["param"] == "model"
    tokens = asked.post("/tokenize", json={"prompt": "Hello there"}).json()["tokens"]
    assert asked.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "Hello there"}
    wrong = asked.post("/detokenize", json={"tokens": [99_999]}).json()["error"]
    assert wrong["message"] == "tokens: got 99999, must be in 0..2047"
    assert http(Echo(ApiError(503, ""))).get("/health").status_code == 503
    missing = asked.post(TEXTS, json={"prompt": "x", "model": "gpt"})
    assert missing.status_code == 404
    assert "'smartspec'" in missing.json()["error"]["message"]


def test_tokens_behind_a_gap_of_ids_exist(tmp_path: Path) -> None:
    """As those of Phi-4-mini: it has fewer tokens than its highest id says."""
    document = json.loads((TINY / "tokenizer.json").read_text())
    highest = max(document["model"]["vocab"].values(), default=0) + 100
    last = {"content": "<|last|>", "id": highest, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document["added_tokens"].append(last | flags)
    document["model"]["vocab"]["<|last|>"] = highest
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    prompts = Prompts(tmp_path)
    assert prompts.decode([highest]) == "<|last|>"
    assert prompts.word(str(highest)) == "<|last|>"
    with pytest.raises(ApiError, match=f"must be in 0..{highest}"):
        prompts.decode([highest + 1])


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, "prompt", "must be given, or messages"),
        ({"prompt": "a", "messages": HELLO}, "prompt", "not together with messages"),
        ({"prompt": "a", "tools": [TOOL]}, "tools", "only with messages"),
        ({"messages": []}, "messages", "length 1 or more"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens", "must be false"),
        ({"messages": HELLO, "continue_final_message": True}, "add_generation_prompt", "must be"),
        (
            {
                "messages": [*HELLO, {"role": "assistant", "content": "a", "tool_calls": [CALL]}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            "messages",
            "got tool calls in the last message, whose text is to be continued",
        ),
        ({"messages": HELLO, "chat_template": "x"}, "chat_template", "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_tokenized(body: dict[str, Any], param: str, part: str) -> None:
    answer = http().post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert part in answer.json()["error"]["message"]


def test_tokens_of_messages_are_those_of_the_chat() -> None:
    model = Echo()
    asked = http(model)
    asked.post(CHAT, json={"messages": HELLO})
    tokens = asked.post("/tokenize", json={"messages": HELLO, "model": "smartspec"}).json()[
        "tokens"
    ]
    assert tokens == model.asked[0]["input_ids"]
    bare = {"prompt": "Hello", "add_special_tokens": False, "return_token_strs": True}
    assert asked.post("/tokenize", json=bare).json()["token_strs"][0]


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
    own.write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(PromptError, match=r"own\.jinja, line 2: "):
        Prompts(tmp_path, own)
