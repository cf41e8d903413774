"""`smartspec doctor`: checks the installation, the bindings and the behaviour of the executor.

It reports what is installed and whether the bindings match their documentation. Experiments show
behaviour that is not documented. Every experiment ends in a finding. An exception is a finding too,
and the next experiments still run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from smartspec_trtllm.contract_data import load_contract
from smartspec_trtllm.doctor_bench import Bench
from smartspec_trtllm.doctor_environment import Environment, find_environment
from smartspec_trtllm.doctor_experiments import EXPERIMENTS, RISKY_EXPERIMENTS
from smartspec_trtllm.doctor_finding import UNSETTLED, Finding, UnsettledError
from smartspec_trtllm.doctor_sampling import SAMPLING_EXPERIMENTS
from smartspec_trtllm.doctor_signatures import Difference, compare

Experiment = Callable[[Bench], Finding]
ALL_EXPERIMENTS: tuple[Experiment, ...] = (
    *EXPERIMENTS,
    *SAMPLING_EXPERIMENTS,
    *RISKY_EXPERIMENTS,
)


@dataclass(frozen=True)
class Diagnosis:
    """differences: None if there are no bindings to compare. findings: empty without a target
    engine."""

    expected_version: str
    environment: Environment
    differences: tuple[Difference, ...] | None
    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is missing and nothing that the adapter uses differs."""
        differences = self.differences or ()
        return not self.environment.missing and not any(d.breaks_adapter for d in differences)

    def document(self) -> dict[str, Any]:
        return {
            "is_healthy": self.is_healthy,
            "expected_version": self.expected_version,
            "environment": asdict(self.environment),
            "differences": None
            if self.differences is None
            else [asdict(d) | {"breaks_adapter": d.breaks_adapter} for d in self.differences],
            "findings": [asdict(f) | {"is_settled": f.is_settled} for f in self.findings],
        }


def diagnose(
    target: Path | None, draft: Path | None, tell: Callable[[str], None] = lambda text: None
) -> Iterator[Diagnosis]:
    """Yields a diagnosis before the experiments and after each, as one may end the whole process.

    target, draft: engine directories; without a target, no experiment runs. tell: called with the
    name of each part before it starts.
    """
    tell("environment")
    environment, bindings = find_environment()
    tell("bindings")
    diagnosis = Diagnosis(
        load_contract().version,
        environment,
        None if bindings is None else tuple(compare(bindings)),
        (cpp_backend(environment),),
    )
    yield diagnosis
    if bindings is None or target is None:
        return
    for finding in experiment(Bench(bindings, target, draft), ALL_EXPERIMENTS, tell):
        diagnosis = replace(diagnosis, findings=(*diagnosis.findings, finding))
        yield diagnosis


def experiment(
    bench: Bench, experiments: Sequence[Experiment], tell: Callable[[str], None]
) -> Iterator[Finding]:
    """One finding per experiment. After an exception, the next one gets a new executor."""
    for made in experiments:
        tell(made.__name__)
        try:
            finding = made(bench)
        except UnsettledError as error:
            finding = _unsettled(made, str(error))
        except Exception as error:
            finding = _unsettled(made, f"{type(error).__name__}: {error}")
        if not finding.is_settled:
            _close(bench)
        yield finding
    _close(bench)


def _unsettled(made: Experiment, reason: str) -> Finding:
    question = (made.__doc__ or made.__name__.replace("_", " ")).splitlines()[0]
    return Finding(made.__name__, question, UNSETTLED, reason, "Find out why before you rely on it")


def _close(bench: Bench) -> None:
    """Close the executor. If it cannot be shut down, drop it."""
    try:
        bench.close()
    except Exception:
        bench.forget()


def cpp_backend(environment: Environment) -> Finding:
    files = environment.backend_files
    return Finding(
        "cpp_backend",
        "Is Triton's own TensorRT-LLM backend, written in C++, in this container?",
        "yes" if files else "no",
        ", ".join(files) or "no libraries in the backend's directory",
        "Nothing for this backend, which runs in Python; a comparison with the C++ one needs it.",
    )
