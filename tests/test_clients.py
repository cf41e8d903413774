"""The one-file clients where something is wrong: one sentence and exit code 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parents[1] / "clients"
DEAD = "127.0.0.1:9"


@pytest.mark.parametrize(
    ("client", "content", "url", "sentence"),
    [
        ("grpc_many.py", None, DEAD, "No such file or directory"),
        ("grpc_many.py", "no JSON", DEAD, "Expecting value"),
        ("grpc_many.py", '{"prompt": "a"}', DEAD, "ailed to connect"),
        ("grpc_stream.py", None, DEAD, "ailed to connect"),
        ("http_stream.py", None, f"http://{DEAD}", "refused"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    tmp_path: Path, client: str, content: str | None, url: str, sentence: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    command = [sys.executable, str(CLIENTS / client), str(path), "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip().startswith("error: ")
    assert sentence in done.stderr
    assert done.stderr.strip().count("\n") == 0
