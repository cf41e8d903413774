"""The clients, their pinned versions, and their installation: once, each in a folder of its own."""

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

INSTALL_S = 900.0
HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pinned(name: str) -> str:
    """The package as the tests of this project have it."""
    pins = PROJECT["optional-dependencies"]["dev"]
    return next(pin for pin in pins if pin.startswith(f"{name}=="))


@dataclass(frozen=True)
class Client:
    """packages: pinned; of PyPI, or of npm if is_node. is_agent: its program runs a command."""

    name: str
    program: str
    packages: tuple[str, ...]
    is_node: bool = False
    is_agent: bool = False

    @property
    def versions(self) -> str:
        """For a person: names and numbers."""
        parted = (re.split("==|(?<!^)@", package) for package in self.packages)
        return ", ".join(map(" ".join, parted))


CLIENTS = (
    Client("openai", "with_openai.py", (pinned("openai"),)),
    Client("anthropic", "with_anthropic.py", (pinned("anthropic"),)),
    Client("litellm", "with_litellm.py", ("litellm==1.110.2",)),
    Client(
        "langchain",
        "with_langchain.py",
        ("langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
    ),
    Client("instructor", "with_instructor.py", ("instructor==1.17.0", pinned("anthropic"))),
    Client(
        "pydantic-ai",
        "with_pydantic_ai.py",
        # anthropic 2.14.0 has types that it cannot make.
        ("pydantic-ai-slim[openai,anthropic]==2.38.0", "anthropic==1.17.0"),
    ),
    Client("openai-agents", "with_openai_agents.py", ("openai-agents==0.24.0",)),
    Client(
        "ai-sdk",
        "with_ai_sdk.mjs",
        (
            "ai@6.0.326",
            "@ai-sdk/openai-compatible@2.0.92",
            "@ai-sdk/anthropic@3.0.140",
            "zod@4.6.7",
        ),
        is_node=True,
    ),
    Client("aider", "with_aider.py", ("aider-chat==0.86.2",), is_agent=True),
    Client("codex", "with_codex.py", ("@openai/codex@0.171.0",), is_node=True, is_agent=True),
    Client(
        "claude-code",
        "with_claude_code.py",
        ("@anthropic-ai/claude-code@2.1.197",),
        is_node=True,
        is_agent=True,
    ),
    Client("opencode", "with_opencode.py", ("opencode-ai@1.18.33",), is_node=True, is_agent=True),
)


def install(client: Client, folder: Path) -> str:
    """Install the client in the folder, if it is not there. Returns why it cannot be."""
    stamp = folder / "installed.txt"
    if stamp.is_file() and stamp.read_text() == client.versions:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    if client.is_node:
        commands = [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]]
    else:
        commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
        commands += [[str(folder / "bin" / "pip"), "install", "--quiet"]]
    commands[-1] += client.packages
    try:
        for command in commands:
            subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"there is no {error.filename} on this machine"
    except subprocess.TimeoutExpired:
        return f"it takes more than {INSTALL_S:g} s"
    except subprocess.CalledProcessError as error:
        return " ".join(error.stderr.split())[-200:]
    stamp.write_text(client.versions)
    return ""


def command(client: Client, folder: Path) -> list[str]:
    """The command that runs the client's program. A module of Node is found beside its packages."""
    program = HERE / client.program
    if program.suffix == ".mjs":
        copy = folder / program.name
        copy.write_text(program.read_text(encoding="utf-8"), encoding="utf-8")
        return ["node", str(copy)]
    interpreter = sys.executable if client.is_agent else str(folder / "bin" / "python")
    return [interpreter, str(program)]
