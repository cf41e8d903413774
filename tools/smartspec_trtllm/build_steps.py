"""Runs the steps of a plan, but skips steps without changes since their last success.

OUT/stamps has a stamp for each step: the command, a fingerprint of its inputs, and the sizes of its
output files. A stamp is marked as done only when the files exist. So a step that failed or was
interrupted runs again, with an empty output directory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from smartspec_py.serving.profile import write_json
from smartspec_trtllm.build_models import BuildError
from smartspec_trtllm.build_plan import Plan, Step

TAIL_LINES = 20
"""Lines shown from the log of a failed step."""

WEIGHTS = (".safetensors", ".bin", ".pt")
OTHERS = (".json", ".jinja", ".model", ".txt")


class StepFailed(RuntimeError):
    """A step failed. log: file with its full output."""

    def __init__(self, step: Step, reason: str, log: Path) -> None:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        super().__init__(f"{tail}\n{step.name} {reason}; full log: {log}")
        self.log = log


def check_tools(plan: Plan) -> None:
    """Raises BuildError if a command or script is missing."""
    remedy = (
        "run this in the container nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3, "
        "or name its examples with --examples"
    )
    for step in plan.steps:
        program, script = step.command[:2]
        if shutil.which(program) is None:
            raise BuildError(f"{program}: not found on PATH: {remedy}")
        if script.endswith(".py") and not Path(script).is_file():
            raise BuildError(f"{script}: no such file: {remedy}")


def run_plan(plan: Plan, out: Path, *, force: bool, say: Callable[[str], None]) -> None:
    """Raises StepFailed at the first step that fails; completed steps stay completed.

    Raises BuildError if an output directory contains files that no earlier build made.
    """
    for folder in ("logs", "stamps", "checkpoints"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(plan.steps, start=1):
        label = f"[{number}/{len(plan.steps)}] {step.name}"
        name = f"{number:02d}-{step.name}"
        stamp = out / "stamps" / f"{name}.json"
        before = {"command": list(step.command), "inputs": _fingerprint(step)}
        if not force and _is_done(step, stamp, before):
            say(f"{label}: nothing has changed, skipped")
            continue
        log = out / "logs" / f"{name}.log"
        say(f"{label}: running, log in {log}")
        _run(step, stamp, before, log)
        say(f"{label}: done")


def _fingerprint(step: Step) -> str:
    """Hash of the TensorRT-LLM version and the inputs: small files by content, weights by size and
    modification time."""
    digest = hashlib.sha256(_trtllm_version().encode())
    for path in sorted(path for folder in step.inputs for path in folder.iterdir()):
        if path.suffix in OTHERS:
            digest.update(f"{path.name} ".encode() + path.read_bytes())
        if path.suffix in WEIGHTS:
            found = path.stat()
            digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns} ".encode())
    return digest.hexdigest()


def _trtllm_version() -> str:
    """From the installed package, because importing it takes long; empty if not installed."""
    try:
        return metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:
        return ""


def _is_done(step: Step, stamp: Path, before: dict[str, Any]) -> bool:
    try:
        found = json.loads(stamp.read_text())
    except (FileNotFoundError, ValueError):
        return False
    return bool(found == {**before, "is_done": True, "sizes": _sizes(step)})


def _sizes(step: Step) -> dict[str, int]:
    """Bytes of the expected files; 0 for a missing file."""
    paths = {name: step.output / name for name in step.expected}
    return {name: path.stat().st_size if path.is_file() else 0 for name, path in paths.items()}


def _run(step: Step, stamp: Path, before: dict[str, Any], log: Path) -> None:
    _clear(step, stamp)
    write_json(stamp, {**before, "is_done": False})
    with log.open("w") as stream:
        stream.write(f"{step.shown}\n")
        stream.flush()
        code = subprocess.run(
            step.command, stdout=stream, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise StepFailed(step, f"failed with exit code {code}", log)
    sizes = _sizes(step)
    missing = [name for name, size in sizes.items() if not size]
    if missing:
        reason = f"ended with exit code 0, but {step.output} lacks {', '.join(missing)}"
        raise StepFailed(step, reason, log)
    write_json(stamp, {**before, "is_done": True, "sizes": sizes})


def _clear(step: Step, stamp: Path) -> None:
    """Remove the output of an earlier build; never remove anything else."""
    if not step.output.exists():
        return
    if not stamp.exists() and any(step.output.iterdir()):
        raise BuildError(
            f"{step.output}: contains files that no earlier build made: choose another OUT, or "
            "remove the directory"
        )
    shutil.rmtree(step.output)
