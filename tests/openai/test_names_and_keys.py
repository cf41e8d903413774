"""Names of models and adapters, API keys, and the tenants that they are."""

from __future__ import annotations

import pytest
from anthropic.pagination import SyncPage
from anthropic.types import ModelInfo
from endpoint_client import CHAT, HELLO, TEXTS, http
from standins import Echo


def test_api_keys() -> None:
    asked = http(api_keys=("first", "second"))
    assert asked.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics"):
        assert asked.get(path).status_code == 401
    for key, status in (("second", 200), ("third", 401), ("sécond", 401)):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert asked.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("header", ["Authorization: Bearer ", "x-api-key: "])
def test_each_api_key_is_a_tenant(header: str) -> None:
    """The model gets a hash of the key. A client cannot name another tenant."""
    model, (name, before) = Echo(), header.split(": ")
    asked = http(model, api_keys=("first", "second"))
    body = {"model": "smartspec", "messages": HELLO, "n": 2, "seed": 1}
    for key in ("first", "second", "first"):
        assert asked.post(CHAT, json=body, headers={name: before + key}).status_code == 200
    tenants = [fields["tenant"] for fields in model.asked]
    assert tenants[:2] == tenants[4:]
    assert len(set(tenants)) == 2
    assert not {"first", "second"} & set(tenants)
    refused = asked.post(CHAT, json={**body, "tenant": "x"}, headers={name: before + "first"})
    assert refused.status_code == 400
    assert http(model).post(CHAT, json=body).status_code == 200
    assert "tenant" not in model.asked[-1]


ADAPTER_BODIES = {
    CHAT: {"messages": HELLO},
    TEXTS: {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
}


@pytest.mark.parametrize("path", ADAPTER_BODIES)
def test_adapters_are_chosen_as_models(path: str) -> None:
    model, body = Echo(), ADAPTER_BODIES[path]
    asked = http(model, adapters=("sql", "chat"))
    for name in ("sql", "smartspec"):
        assert asked.post(path, json={**body, "model": name}).json()["model"] == name
    assert asked.post(path, json=body).json()["model"] == "smartspec"
    assert [fields.get("lora_name") for fields in model.asked] == ["sql", None, None]
    missing = asked.post(path, json={**body, "model": "gpt"})
    assert missing.status_code == 404
    words = "model: got 'gpt', must be 'smartspec' or 'sql' or 'chat'"
    assert missing.json()["error"]["message"] == words


def test_the_served_names() -> None:
    """Each is listed and accepted on every route, and so is `smartspec`; adapters have a parent."""
    model = Echo()
    name = "Qwen/Q-1B:Q4_K_M"
    asked = http(model, name=name, aliases=["q"], adapters=["sql", "chat"])
    listed = asked.get("/v1/models").json()
    assert listed["models"] == []
    first, second, sql, chat = listed["data"]
    assert [one["id"] for one in listed["data"]] == ["Qwen/Q-1B:Q4_K_M", "q", "sql", "chat"]
    assert [one.get("parent") for one in (first, second)] == [None, None]
    assert [one["parent"] for one in (sql, chat)] == ["Qwen/Q-1B:Q4_K_M"] * 2
    assert (first["max_model_len"], first["max_output_tokens"]) == (512, 511)
    page = SyncPage[ModelInfo].construct(**listed)  # as the package reads answers
    assert (page.first_id, page.last_id, page.has_next_page()) == (name, "chat", False)
    found = page.data[1]
    assert (found.type, found.display_name) == ("model", "q")
    assert found.created_at.timestamp() == second["created"]
    assert asked.get("/v1/models/Qwen/Q-1B:Q4_K_M").json() == first
    assert asked.get("/v1/models/Qwen%2FQ-1B:Q4_K_M").json() == first
    assert asked.get("/v1/models/sql").json() == sql
    assert asked.get("/v1/models/smartspec").json()["id"] == "smartspec"
    for path, body in ADAPTER_BODIES.items():
        assert asked.post(path, json=body).json()["model"] == "Qwen/Q-1B:Q4_K_M"
        for name in ("Qwen/Q-1B:Q4_K_M", "q", "smartspec"):
            assert asked.post(path, json=body | {"model": name}).json()["model"] == name
        missing = asked.post(path, json=body | {"model": "gpt"}).json()["error"]["message"]
        assert missing == "model: got 'gpt', must be 'Qwen/Q-1B:Q4_K_M' or 'q' or 'sql' or 'chat'"
    assert all("lora_name" not in fields for fields in model.asked)
