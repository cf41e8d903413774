"""A real chat model with its head, in real Triton; skipped where it was not downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from servers import serving
from wire import generate

import openai
from smartspec_bench.real_model import FILE, HEAD
from smartspec_bench.texts import prompt
from smartspec_launch.address import free_address
from smartspec_launch.gateway import OpenAi
from smartspec_launch.triton_server import TritonServer
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.config import LimitsConfig, LocalEngineConfig, ServerConfig
from smartspec_py.engines.checkpoints.gguf.folder import model_folder

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        not FILE.is_file(), reason="python -m smartspec_bench.real_model was not run"
    ),
]
JAPAN = {"role": "user", "content": "What is the capital of Japan?"}


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[TritonServer, openai.OpenAI]]:
    engine = LocalEngineConfig(model=str(FILE), heads=str(HEAD))
    limits = LimitsConfig(max_sequences=4, profile_s=0.0)
    endpoint = OpenAi(free_address().http_port, model_folder(FILE))
    folder = tmp_path_factory.mktemp("real")
    with serving(ServerConfig(engine=engine, limits=limits), folder, openai=endpoint) as server:
        url = endpoint.url(server.address)
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as found:
            yield server, found


@pytest.fixture
def client(served: tuple[TritonServer, openai.OpenAI]) -> openai.OpenAI:
    return served[1]


def answer(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    given = {"max_tokens": 64, "temperature": 0.0} | fields
    return client.chat.completions.create(model=MODEL_NAME, messages=messages, **given)


def test_it_answers_and_ends(client: openai.OpenAI) -> None:
    choice = answer(client, [JAPAN]).choices[0]
    assert "Tokyo" in choice.message.content
    assert choice.finish_reason == "stop"
    stream = answer(client, [JAPAN], stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in stream) == choice.message.content


def test_it_reads_the_turns_before(client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Name three fruits. \N{GRINNING FACE}"},
        {"role": "assistant", "content": "Apple, pear and plum."},
        {"role": "user", "content": "Write the names of these three fruits again."},
    ]
    kinds = ({}, {"reuse_prefix": False})
    found = {answer(client, messages, extra_body=one).choices[0].message.content for one in kinds}
    assert len(found) == 1
    assert "plum" in found.pop().lower()


@pytest.mark.parametrize("workload", ["chat", "sql"])
def test_texts_do_not_depend_on_drafts(client: openai.OpenAI, workload: str) -> None:
    messages = [{"role": "user", "content": prompt(workload, 1)}]
    policies = ("none", "goodput", "fixed:5")
    found = [
        answer(client, messages, max_tokens=32, extra_body={"speculation_policy": one})
        .choices[0]
        .message.content
        for one in policies
    ]
    assert len(set(found)) == 1


def test_the_head_drafts(served: tuple[TritonServer, openai.OpenAI]) -> None:
    """If it fails, only its drafts are lost, and the text shows nothing."""
    text = "The numbers from one to twenty are: one, two, three,"
    asked = {"max_tokens": 32, "speculation_policy": "fixed:3", "proposer": "heads"}
    last = generate(served[0], text_input=text, **asked)
    assert last["total_draft_tokens"] > 0
    assert last["total_accepted_draft_tokens"] > 0


def test_a_long_prompt(client: openai.OpenAI) -> None:
    """It is read in several chunks."""
    text = "The harbour was calm and the boats stayed. " * 160
    messages = [{"role": "user", "content": f"{text}\n\nWhat stayed? Answer in one word."}]
    found = answer(client, messages, max_tokens=8)
    assert 1_350 < found.usage.prompt_tokens < 2_000
    assert found.choices[0].message.content
