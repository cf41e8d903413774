"""Prints requirements of pyproject.toml, one a line, so that no image repeats a pin.

    requirements.py project torch    those of the project and of its extra `torch`
    requirements.py --missing project    less what this Python has, in whatever version

The second is for an image that brings its own torch and transformers: what it has stays.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def requirements(document: dict[str, Any], groups: list[str]) -> list[str]:
    """group: `project`, or the name of an extra. Raises KeyError for any other."""
    project = document["project"]
    known = {"project": project["dependencies"], **project["optional-dependencies"]}
    return [requirement for group in groups for requirement in known[group]]


def is_installed(requirement: str) -> bool:
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", action="store_true", help="only what is not installed")
    parser.add_argument("groups", nargs="+", help="project, or an extra of it")
    arguments = parser.parse_args()
    document = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    for requirement in requirements(document, arguments.groups):
        if not (arguments.missing and is_installed(requirement)):
            print(requirement)


if __name__ == "__main__":
    main()
