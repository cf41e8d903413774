"""Reads the stages and instructions of this repository's Dockerfile. Not a general parser."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """word: in capitals, such as COPY. rest: the text after it, with continuation lines joined."""

    word: str
    rest: str


@dataclass(frozen=True)
class Copy:
    """source_stage: the value of `--from`; None copies from the build context."""

    sources: tuple[str, ...]
    target: str
    source_stage: str | None


@dataclass(frozen=True)
class Stage:
    name: str
    image: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [each.rest for each in self.instructions if each.word == word]

    @property
    def copies(self) -> list[Copy]:
        return [parse_copy(rest) for rest in self.all("COPY")]


def read_stages(path: Path) -> dict[str, Stage]:
    """The stages by name, in the order of the file. Every stage must have a name."""
    stages: dict[str, Stage] = {}
    for instruction in _instructions(path.read_text(encoding="utf-8")):
        if instruction.word == "FROM":
            image, _, name = instruction.rest.partition(" AS ")
            stages[name] = stage = Stage(name, image)
        elif stages:
            stage.instructions.append(instruction)
    return stages


def parse_copy(rest: str) -> Copy:
    words = shlex.split(rest)
    stages = [word.removeprefix("--from=") for word in words if word.startswith("--from=")]
    *sources, target = (word for word in words if not word.startswith("--"))
    return Copy(tuple(sources), target, stages[0] if stages else None)


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [Instruction(word, " ".join(rest.split())) for word, _, rest in found]
