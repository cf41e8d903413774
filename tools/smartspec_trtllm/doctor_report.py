"""Writes a diagnosis as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from smartspec_trtllm.doctor import Diagnosis
from smartspec_trtllm.doctor_environment import Environment
from smartspec_trtllm.doctor_signatures import Difference


def markdown(diagnosis: Diagnosis) -> str:
    lines = [
        "# smartspec doctor",
        "",
        _verdict(diagnosis),
        "",
        "## Environment",
        "",
        *_environment(diagnosis.environment, diagnosis.expected_version),
        "",
        "## Bindings",
        "",
        *_differences(diagnosis.differences, diagnosis.expected_version),
    ]
    if diagnosis.findings:
        lines += ["", "## Findings", ""]
        rows = ((f.name, f.answer, f.question) for f in diagnosis.findings)
        lines += _table(("finding", "answer", "question"), rows)
        for finding in diagnosis.findings:
            lines += ["", f"### {finding.name}: {finding.answer}", "", finding.question, ""]
            lines += [f"- Evidence: {finding.evidence}", f"- Meaning: {finding.meaning}"]
    return "\n".join(lines) + "\n"


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.environment.missing:
        return "Something is missing: see Environment."
    if not diagnosis.is_healthy:
        return "The adapter uses things that differ here: see Bindings."
    if not all(finding.is_settled for finding in diagnosis.findings):
        return "Nothing is missing; not every question was settled: see Findings."
    return "Nothing is missing, and nothing that the adapter uses differs."


def _environment(environment: Environment, expected: str) -> Iterator[str]:
    rows = [
        ("TensorRT-LLM", f"{environment.tensorrt_llm or 'not found'} (expected: {expected})"),
        ("bindings", environment.binding_type or "not known"),
        ("TensorRT", environment.tensorrt or "not found"),
        ("Python", environment.python),
        *(("GPU", gpu) for gpu in environment.gpus or ("none",)),
        ("C++ backend", ", ".join(environment.backend_files) or "not found"),
    ]
    yield from _table(("what", "found"), rows)
    for missing in environment.missing:
        yield ""
        yield f"Missing: {missing.what}. Remedy: {missing.remedy}."


def _differences(differences: Sequence[Difference] | None, expected: str) -> Iterator[str]:
    if differences is None:
        yield "There are no bindings to compare."
        return
    if not differences:
        yield f"The bindings are as documented for {expected}."
        return
    counts = sum(d.breaks_adapter for d in differences)
    yield f"{len(differences)} differences from {expected}; {counts} of them break the adapter."
    yield ""
    rows = ((d.name, d.kind.value, d.detail, "yes" if d.is_used else "no") for d in differences)
    yield from _table(("name", "difference", "detail", "used by the adapter"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(header)
    yield _row(["---"] * len(header))
    for row in rows:
        yield _row(row)


def _row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"
