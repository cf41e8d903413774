"""build_engines.sh with fakes of TensorRT-LLM's tools: its commands, and when they run again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ENGINES_BUILD = Path(__file__).parents[2] / "engines_build"
SIZES = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192}
CONFIG = {"model_type": "llama", "max_position_embeddings": 131_072, **SIZES}
TOOL = """#!/bin/sh
# A fake of all tools: notes the call, fails if it is told to, and writes a file.
echo "$(basename "$0") $(basename "$4")" >> "$CALLS"
case "$4" in *"$BREAK") echo "out of memory"; exit 3;; esac
mkdir -p "$4" && echo built > "$4/rank0.engine"
"""


def make_model(folder: Path, **config: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    vocab = {"a": 0, "b": 1, config.get("last", "c"): 2}
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": 3, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


class Workshop:
    """Two models, fakes of TensorRT-LLM's tools, and the real script."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self._calls = folder, folder / "out", folder / "calls"
        make_model(folder / "T")
        make_model(folder / "D")
        for tool in ("trtllm-build", "convert_checkpoint.py"):
            path = folder / "bin" / tool
            path.parent.mkdir(exist_ok=True)
            path.write_text(TOOL)
            path.chmod(0o755)
        # The converter is a script for python3, so this python3 runs it as a program.
        python = folder / "bin" / "python3"
        python.write_text(
            f'#!/bin/sh\ncase "$1" in */check_models.py) exec {sys.executable} "$@";; esac\n'
            'script="$1"; shift; PATH="$(dirname "$0"):$PATH" exec "$(basename "$script")" "$@"\n'
        )
        python.chmod(0o755)

    def build(
        self,
        *flags: str,
        break_at: str = "nothing",
        script: Path = ENGINES_BUILD / "build_engines.sh",
    ) -> subprocess.CompletedProcess[str]:
        places = ("T", "D", "out") if script.parent == ENGINES_BUILD else ()
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        settings = {"PATH": path, "CALLS": str(self._calls), "BREAK": break_at}
        return subprocess.run(
            [str(script), *places, *flags],
            cwd=self.folder,
            env=os.environ | settings | {"HUB": "hub", "OUT": "engines"},
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        """Calls of the tools since the last call of this method."""
        found = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return found


CONVERT, BUILD = "convert_checkpoint.py", "trtllm-build"
ALL = [f"{tool} {role}" for role in ("target", "draft") for tool in (CONVERT, BUILD)]


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def test_a_build_writes_what_engine_json_names(workshop: Workshop) -> None:
    answer = workshop.build()
    assert answer.returncode == 0, answer.stderr
    assert workshop.calls() == ALL
    for role in ("target", "draft"):
        assert (workshop.out / role / "rank0.engine").is_file()
    files = sorted(path.name for path in (workshop.out / "tokenizer").iterdir())
    assert files == ["config.json", "tokenizer.json"]


def test_only_commands_that_have_changed_run_again(workshop: Workshop) -> None:
    """A conversion is followed by a build, and a longer draft needs another target engine."""
    workshop.build()
    workshop.calls()
    assert workshop.build().stdout.count("nothing has changed") == 5
    assert workshop.calls() == []
    workshop.build("--max-draft-len", "5")
    assert workshop.calls() == [f"{BUILD} target"]
    workshop.build("--max-draft-len", "5", "--draft-tp", "2")
    assert workshop.calls() == [f"{CONVERT} draft", f"{BUILD} draft"]
    workshop.build("--max-draft-len", "5", "--draft-tp", "2", "--force")
    assert workshop.calls() == ALL


def test_a_failure_ends_the_build_and_is_run_again(workshop: Workshop) -> None:
    answer = workshop.build(break_at="out/target")
    assert answer.returncode == 2
    assert workshop.calls() == ALL[:2]
    assert "out of memory\nbuild_engines: build-target failed; the whole log" in answer.stderr
    assert workshop.build().returncode == 0
    assert workshop.calls() == ALL[1:]


def test_other_files_are_never_removed(workshop: Workshop) -> None:
    (workshop.out / "target").mkdir(parents=True)
    (workshop.out / "target" / "thesis.txt").write_text("mine")
    answer = workshop.build()
    assert (answer.returncode, "remove it" in answer.stderr) == (2, True)
    assert (workshop.out / "target" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "draft", "words"),
    [
        (("--tp", "3"), {}, "--tp: 3 does not divide num_attention_heads 32 of T"),
        (("--quantization", "int3"), {}, "--quantization: got 'int3', must be none or fp8"),
        (("--max-context-len", "200000"), {}, "got 200000, must be at most 131072, as of T"),
        (("--max-num-tokens", "100"), {}, "--max-num-tokens: got 100, must be at least 4103"),
        (("--speed", "9"), {}, "--speed: no such option"),
        ((), {"model_type": "gpt2"}, "D: model_type is 'gpt2', must be one of llama, qwen2"),
        ((), {"last": "z"}, "token id 2 is 'c' in T and 'z' in D"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_runs(
    workshop: Workshop, flags: tuple[str, ...], draft: dict[str, Any], words: str
) -> None:
    shutil.rmtree(workshop.folder / "D")
    make_model(workshop.folder / "D", **draft)
    answer = workshop.build(*flags)
    assert answer.returncode == 2
    assert answer.stderr.startswith("build_engines: ")
    assert (words in answer.stderr, answer.stderr.count("\n")) == (True, 1), answer.stderr
    assert workshop.calls() == []


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("llama_8b_1b", "--max_seq_len 8199 --max_num_tokens 65536 --max_draft_len 7"),
        ("llama_8b_1b_fp8", "quantize.py --qformat fp8 --kv_cache_dtype fp8 --gemm_plugin disable"),
        ("llama_70b_tp4_1b", "--tp_size 4 --workers 4 --max_draft_len 10 --max_seq_len 8192"),
        ("qwen2.5_14b_0.5b", "core/qwen/convert_checkpoint.py --max_num_tokens 32832"),
    ],
)
def test_examples_print_their_commands(workshop: Workshop, example: str, words: str) -> None:
    """Two numbers by hand: 8 x (4096 + 7) is 32,824, and 32,832 as a multiple of 64."""
    for name in ("Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.1-70B", "Qwen2.5-14B", "Qwen2.5-0.5B"):
        make_model(
            workshop.folder / "hub" / f"{name}-Instruct",
            model_type="qwen2" if "Qwen" in name else "llama",
        )
    script = ENGINES_BUILD / "examples" / f"{example}.sh"
    answer = workshop.build("--dry-run", script=script)
    assert (answer.returncode, answer.stderr, workshop.calls()) == (0, "", [])
    shown = " ".join(answer.stdout.replace("\\\n", "").split())
    for part in words.replace(" --", "\n--").split("\n"):
        assert part in shown, shown
    target, draft = shown.split("# convert-draft")
    assert ("--speculative_decoding_mode" in target, "--max_draft_len" in draft) == (True, False)
