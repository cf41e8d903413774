"""Clients of others, which run in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from smartspec_cli.commands.quickstart import SHIPPED_PAIR

HERE = Path(__file__).resolve().parent
TOKENIZER = SHIPPED_PAIR / "target"
TIMEOUT_S = 600
LM_EVAL_TASKS = {
    "choices": "output_type: multiple_choice\n"
    'doc_to_choice: "{{choices}}"\n'
    "doc_to_target: answer\n"
    "metric_list: [{metric: acc}]\n",
    "texts": "output_type: generate_until\n"
    'doc_to_target: "{{choices[answer]}}"\n'
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 12, temperature: 0}\n'
    "metric_list: [{metric: exact_match}]\n",
}


class CheckFailed(Exception):
    """The message says what was found."""


def run(command: Sequence[str | Path]) -> str:
    """The output of a program, without network. Raises CheckFailed if it failed."""
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_COLOR": "1"}
    try:
        with tempfile.TemporaryDirectory() as folder:  # some programs write to their folder
            ended = subprocess.run(
                [str(word) for word in command],
                cwd=folder,
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"not done in {TIMEOUT_S} s") from error
    if ended.returncode:
        raise CheckFailed(ended.stdout[-2000:])
    return ended.stdout


def openai_sdk(environment: Path, url: str) -> str:
    """Two major versions: that of this repository's tests, and that of the other clients."""
    found = [
        run([python, HERE / "sdk.py", f"{url}/v1"]).strip().splitlines()[-1]
        for python in (sys.executable, environment / "python")
    ]
    return "; ".join(found)


def litellm(environment: Path, url: str) -> str:
    return run([environment / "python", HERE / "lite.py", f"{url}/v1"]).strip().splitlines()[-1]


def schemathesis(environment: Path, url: str) -> str:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    command = [environment / "st", "run", f"{url}/openapi.json", "--checks", checks]
    output = run([*command, "--max-examples", "100", "--seed", "1", "--no-color"])
    return next(line.strip() for line in output.splitlines() if " generated, " in line)


def lm_eval(environment: Path, url: str) -> str:
    """A task of choices, which needs log-probabilities of prompts, and one of texts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            {"question": f"The museum {i} is", "choices": [" simple", " early"], "answer": i % 2}
            for i in range(20)
        ]
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for task, body in LM_EVAL_TASKS.items():
            head = f"task: own_{task}\ndataset_path: json\ntest_split: test\n"
            files = f'dataset_kwargs: {{data_files: {{test: "{data}"}}}}\n'
            (folder / f"{task}.yaml").write_text(
                head + files + 'doc_to_text: "{{question}}"\n' + body
            )
        model = f"base_url={url}/v1/completions,model=smartspec,tokenizer={TOKENIZER}"
        command = [environment / "lm_eval", "run", "--model", "local-completions"]
        command += ["--tasks", "own_choices,own_texts", "--include_path", folder]
        output = run([*command, "--model_args", f"{model},num_concurrent=4"])
    scores = [line.split("|") for line in output.splitlines() if line.startswith("|own_")]
    return "; ".join(f"{row[1].strip()}: {row[5].strip()} {row[7].strip()}" for row in scores)


def guidellm(environment: Path, url: str, seconds: int = 60) -> str:
    """One minute of chats in four streams."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "report.json"
        command: list[str | Path] = [environment / "guidellm", "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={url},model=smartspec"]
        command += ["--profile", "kind=concurrent,streams=4"]
        command += ["--constraint", f"kind=max_duration,seconds={seconds}"]
        command += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=24"]
        run([*command, "--output", f"kind=json,path={path}"])
        (found,) = json.loads(path.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    if totals["errored"] or not totals["successful"]:
        raise CheckFailed(f"requests: {totals}")
    return f"{totals['successful']} requests, none failed"
