"""Prints requirements of pyproject.toml, one per line, so that images do not repeat the pins.

    requirements.py project torch        requirements of the project and of its extra `torch`
    requirements.py --missing project    only packages that this Python does not have

The second form is for an image with its own torch and transformers. An installed package counts,
whatever its version.
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
    """The requirements of groups: `project` or names of extras. Raises KeyError for others."""
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
    parser.add_argument("--missing", action="store_true", help="only missing packages")
    parser.add_argument("groups", nargs="+", help="project, or the name of an extra")
    arguments = parser.parse_args()
    document = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    for requirement in requirements(document, arguments.groups):
        if not (arguments.missing and is_installed(requirement)):
            print(requirement)


if __name__ == "__main__":
    main()
