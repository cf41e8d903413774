"""What scripts/check_clients makes of results, without the clients."""

import json
import re
import socket
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "clients" / "check"


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("table", "tee", "install"):
        sys.modules.pop(name, None)


def test_a_cell_is_ok_if_the_case_passed_with_given_texts():
    """What failed with the model itself is named below the table."""
    from table import Result, page_with

    def result(engine, case, error, client="one"):
        return Result(client, f"{client} 1.0", engine, "chat", case, error)

    results = [
        result("scripted", "plain", ""),
        result("model", "plain", ""),
        result("scripted", "loop", ""),
        result("model", "loop", "no result"),
        result("scripted", "tools", "400 max_tokens: a | b"),
        result("scripted", "plain", "400 max_tokens: a | b", client="two"),
    ]
    page = "top\n<!-- generated: clients -->\nold\n<!-- end -->\nbottom"
    made = page_with(page, results, "some-model")
    assert "| one | one 1.0 | chats | ok |  | no (1) |  |  | ok |" in made
    assert "| two | two 1.0 | chats | no (1) |  |  |  |  |  |" in made
    assert made.count("a \\| b") == 1
    assert "old" not in made
    assert "some-model" in made
    shown = "Cases that passed with the model itself: one 1 of 2. one loop: `no result`.\n"
    assert shown in made
    assert made.startswith("top\n")
    assert made.endswith("bottom")


def test_the_documented_settings_of_agents_are_those_that_are_checked():
    page = (FOLDER.parents[1] / "docs" / "operate" / "clients.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(json|toml)\n(.*?)```", page, re.DOTALL))
    opencode, codex = json.loads(blocks["json"]), tomllib.loads(blocks["toml"])
    name, _, model = opencode["model"].partition("/")
    provider = opencode["provider"][name]
    assert model in provider["models"]
    assert f'"npm": "{provider["npm"]}"' in (FOLDER / "with_opencode.py").read_text()
    provider_of_codex = codex["model_providers"][codex["model_provider"]]
    assert f'wire_api="{provider_of_codex["wire_api"]}"' in (FOLDER / "with_codex.py").read_text()
    urls = {provider["options"]["baseURL"], provider_of_codex["base_url"]}
    assert urls == {"http://localhost:9000/v1"}
    assert model == codex["model"] == "smartspec"


def test_clients_have_the_versions_of_the_tests():
    """But for pydantic-ai, which needs an older anthropic."""
    from install import CLIENTS, PROJECT

    pins = {pin.partition("==")[0]: pin for pin in PROJECT["optional-dependencies"]["dev"]}
    for client in CLIENTS:
        for package in client.packages if client.name != "pydantic-ai" else ():
            assert package == pins.get(package.partition("==")[0], package)


def test_each_rule_of_the_script_belongs_to_a_program():
    rules = json.loads((FOLDER / "script.json").read_text())
    programs = "".join(path.read_text() for path in FOLDER.glob("*.py"))
    for rule in rules:
        assert rule["when"] in programs
        assert rule["write"]


@pytest.mark.parametrize("is_split", [False, True])
def test_refusals_are_found_and_bytes_are_unchanged(tmp_path, is_split):
    """A refusal whose body comes after its head is found, too."""
    from tee import Tee

    head = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 40\r\n\r\n"
    body = b'{"error": {"message": "top_p: \\"2\\"   "}}'
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(Tee(server.getsockname()[1], tmp_path)) as tee,
    ):
        tee.begin("one")
        with socket.create_connection(("127.0.0.1", tee.port)) as client:
            client.sendall(b"POST / HTTP/1.1\r\n\r\n")
            there, _ = server.accept()
            with there:
                assert there.recv(100) == b"POST / HTTP/1.1\r\n\r\n"
                received = b""
                for part in (head, body) if is_split else (head + body,):
                    there.sendall(part)
                    while len(received) < len(head if part == head else head + body):
                        received += client.recv(1000)
        assert received == head + body
        assert tee.taken() == ['400 top_p: "2"   ']
        assert tee.taken() == []
    assert b"POST" in (tmp_path / "one-1.txt").read_bytes()
