"""The table of docs/research/control.md with every numeric constant of core/, read from the code.

`scripts/study constants` writes it; a test fails where the page is not up to date.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from studies.document import table

ROOT = Path(__file__).parents[2]
CORE = ROOT / "backend" / "smartspec_py" / "core"
PAGE = ROOT / "docs" / "research" / "control.md"
BEGIN, END = "<!-- constants: begin -->\n", "<!-- constants: end -->\n"


def constants(source: str, module: str) -> Iterator[tuple[str, str, str]]:
    """Name, value and reason of the fields of settings and of other constants of the module.

    Raises ValueError for one of a learner's settings without a reason.
    """
    tree = ast.parse(source)
    for name, value, why in _numbers(tree.body):
        if name.isupper():
            yield f"{module}.{name}", value, why
    for node in tree.body:
        # Those of the planner are a request's, not constants.
        if isinstance(node, ast.ClassDef) and node.name.endswith("Settings"):
            for name, value, why in _numbers(node.body):
                if not why and node.name != "PlannerSettings":
                    raise ValueError(f"{node.name}.{name} has no reason below it")
                if why:
                    yield f"{node.name}.{name}", value, why


def page(text: str) -> str:
    """The page with the table as the code has it now."""
    found = [
        (f"`{name}`", f"`{value}`", why)
        for path in sorted(CORE.rglob("*.py"))
        for name, value, why in constants(path.read_text(encoding="utf-8"), path.stem)
    ]
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    rows = table(("setting", "value", "what it is, and why"), found)
    return f"{head}{BEGIN}\n{rows}\n\n{END}{tail}"


def _numbers(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str, str]]:
    """Names that are given a number, or a tuple of numbers, and the docstring below them."""
    for node, below in pairwise([*body, ast.Pass()]):
        target: ast.expr
        if isinstance(node, ast.AnnAssign):
            target, value = node.target, node.value
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        else:
            continue
        if isinstance(target, ast.Name) and value is not None and _is_number(value):
            yield target.id, ast.unparse(value), _docstring(below)


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return all(map(_is_number, value.elts))
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def _docstring(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split()).replace("|", "\\|")
    return ""


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
