"""LoRA adapters behind a real Triton: by a tensor on its port, and as models of OpenAI's API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from wire import generate, generate_stream, grpc_inputs, grpc_stream, post

import openai
from smartspec_launch.triton_server import TritonServer

pytestmark = pytest.mark.triton

PROMPT = "Task: chat\nUser: The simple museum is beautiful. What should we do?\nAnswer:"
ASKED = {"text_input": PROMPT, "max_tokens": 16}
CLIENTS = Path(__file__).parents[2] / "clients"


def test_a_tensor_chooses_the_adapter(lora_server: TritonServer) -> None:
    plain = generate(lora_server, **ASKED)["text_output"]
    text = generate(lora_server, **ASKED, lora_name="sql")["text_output"]
    assert text != plain
    streamed = generate_stream(lora_server, **ASKED, lora_name="sql")
    assert "".join(one["text_output"] for one in streamed) == text
    inputs = grpc_inputs({**ASKED, "lora_name": "sql"})
    results = [result.as_numpy("text_output") for result in grpc_stream(lora_server, inputs)]
    assert b"".join(one.item() for one in results if one is not None).decode() == text
    status, body = post(lora_server, {**ASKED, "lora_name": "gpt"}, "generate")
    assert status == 400
    assert "lora_name: got 'gpt', must be sql" in body


def test_a_model_of_openai_is_the_adapter(lora_server: TritonServer) -> None:
    assert lora_server.openai is not None
    url = lora_server.openai.url(lora_server.address)
    text = generate(lora_server, **ASKED, lora_name="sql")["text_output"]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        assert [model.id for model in client.models.list()] == ["smartspec", "sql"]
        found = client.completions.create(
            model="sql", prompt=PROMPT, max_tokens=16, temperature=0.0
        )
        assert (found.model, found.choices[0].text) == ("sql", text)
        with pytest.raises(openai.NotFoundError, match="model: got 'gpt', must be 'smartspec' or"):
            client.completions.create(model="gpt", prompt=PROMPT)


@pytest.mark.parametrize("client", ["http_stream.py", "grpc_stream.py"])
def test_the_clients(lora_server: TritonServer, client: str) -> None:
    address = lora_server.address
    url = address.http_url if client.startswith("http") else address.grpc_url
    text = generate(lora_server, **ASKED, lora_name="sql")["text_output"]
    command = [sys.executable, str(CLIENTS / client), PROMPT, "--url", url, "--max-tokens", "16"]
    done = subprocess.run([*command, "--lora", "sql"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(text)
