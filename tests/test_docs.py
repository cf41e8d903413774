"""The documentation: its commands exist with their options, its links lead somewhere, and its lines
are short. `scripts/check` builds the site, which checks anchors."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pages import FENCED, PAGES, ROOT, commands_of

from smartspec_cli.reference import commands
from smartspec_gateway.openai.apis.chat_schema import ChatRequest
from smartspec_py.api.contract import INPUTS

ELSEWHERE = "claude docker helm kubectl trtllm-build python python3 pip git cd lm_eval locust"
ELSEWHERE += " aiperf guidellm"
"""Programs whose options are not known here."""

MAX_COLUMNS = 100


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_code(path: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=FENCED)


def options_of(command: Any) -> set[str]:
    return {"--help", "-h"}.union(*(one.opts + one.secondary_opts for one in command.params))


OPTIONS = {path: options_of(command) for path, command in commands()}


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_commands_exist_with_their_options(path: Path) -> None:
    for words in commands_of(path):
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if not words:
            continue
        program = words[0].removeprefix(".venv/bin/")
        if program == "smartspec":
            asked = " ".join(["smartspec", *words[1:3]])
            name = next((n for n in OPTIONS if f"{asked} ".startswith(f"{n} ")), None)
            assert name or words[1].startswith("--"), f"{words}: no such command"
            used = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert used <= OPTIONS.get(name or "", {"--help", "--version"}), f"{words}"
        elif program.startswith(("scripts/", "engines_build/", "clients/", "loadtest/")):
            assert (ROOT / program).is_file(), f"{words}: no such file"
        elif program == "curl":
            is_chat = any("/v1/chat" in word for word in words)
            known = set(ChatRequest.model_fields) if is_chat else {spec.name for spec in INPUTS}
            for one, body in pairwise(words):
                if one == "-d":
                    assert json.loads(body).keys() <= known, f"{words}"
        else:
            assert program in ELSEWHERE.split(), f"{words}: say what this is in ELSEWHERE"


def test_the_benchmark_script_uses_options_that_exist() -> None:
    text = (ROOT / "scripts" / "bench").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^ *smartspec (bench \w+)(.*)$", text, re.MULTILINE)
    assert found
    for name, rest in found:
        used = {word for word in rest.split() if word.startswith("--")}
        assert used <= OPTIONS[f"smartspec {name}"], name


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_lead_somewhere_and_lines_are_short(path: Path) -> None:
    """Tables, code, and lines with a link or its address may be wider."""
    text = without_code(path)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), target
    for line in text.splitlines():
        assert len(line) <= MAX_COLUMNS or re.search(r"^\s*\||\]\(|^\[.+\]: ", line), line


CODE = {
    f"/{path.relative_to(ROOT)}": path.read_text(encoding="utf-8")
    for folder in ("backend", "tools", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".html")
}
"""The text of each file of the code, by its path in the repository."""


def changes() -> list[str]:
    """The rows of the tables that say where a change belongs."""
    text = (ROOT / "docs" / "development" / "extending.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("| ") and "/" in line]


@pytest.mark.parametrize("row", changes(), ids=lambda row: row.split("|")[1].strip())
def test_rows_on_changes_name_files_and_what_these_have(row: str) -> None:
    """Files exist. Other names with a capital or an underscore are in one of them."""
    texts = []
    for name in re.findall(r"`(\w[\w./-]*(?:\.py|/))`", row):
        found = [text for path, text in CODE.items() if f"/{name}" in path]
        assert found, name
        texts += found
    for name in re.findall(r"`(\w*[A-Z_][\w.]*)`", row):
        if "." not in name or name[0].isupper():
            own = name.rpartition(".")[2]
            assert any(re.search(rf"\b{own}\b", text) for text in texts), name
