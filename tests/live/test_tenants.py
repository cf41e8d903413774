"""Drafts from what others have generated, behind a real Triton: by API key, and by `tenant`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servers import TINY, fake_config, serving
from wire import generate

import openai
from smartspec_launch.address import free_address
from smartspec_launch.gateway import OpenAi
from smartspec_launch.triton_server import TritonServer
from smartspec_py.config import LookupConfig

pytestmark = pytest.mark.triton

MAX_TOKENS = 24
OPTIONS = {"speculation_policy": "fixed:4", "proposer": "prompt_lookup"}
"""The fake engine writes the same text after the same prompt, and nothing twice in it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "keys").write_text("anna\nben\ncarl\n")
    config = fake_config().model_copy(update={"lookup": LookupConfig(history_tokens=1000)})
    asked = OpenAi(free_address().http_port, TINY / "target", api_key_file=folder / "keys")
    with serving(config, Path(folder), openai=asked) as running:
        yield running


def test_nothing_crosses_api_keys(server: TritonServer) -> None:
    assert [num_accepted(server, key) for key in ("anna", "ben")] == [0, 0]
    assert [num_accepted(server, key) > 10 for key in ("anna", "ben")] == [True, True]
    assert num_accepted(server, "carl") == 0
    with pytest.raises(openai.BadRequestError, match="tenant"):
        num_accepted(server, "carl", tenant="anna")


def num_accepted(server: TritonServer, key: str, **more: str) -> int:
    """Drafts that were accepted of a request with this API key."""
    assert server.openai is not None
    url = server.openai.url(server.address)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        found = client.completions.create(
            model="smartspec",
            prompt="One two three",
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            extra_body={**OPTIONS, "return_spec_metrics": "summary", **more},
        )
    assert found.usage is not None
    assert found.usage.completion_tokens == MAX_TOKENS
    assert found.model_extra is not None
    metrics = found.model_extra["metrics"].get("speculative_decoding", {})
    return int(metrics.get("num_accepted_draft_tokens", 0))


def test_nothing_crosses_the_field_tenant(server: TritonServer) -> None:
    """Nor between it and requests that name none."""

    def accepted(**tenant: str) -> int:
        fields = {"text_input": "Four five six", "max_tokens": MAX_TOKENS, "temperature": 0.0}
        found = generate(server, **fields, **OPTIONS, **tenant)
        return int(found["total_accepted_draft_tokens"])

    assert [accepted(tenant="a"), accepted(tenant="b"), accepted()] == [0, 0, 0]
    assert accepted(tenant="a") > 10
    assert accepted() > 10
