"""The documents that the shipped models were trained on."""

import hashlib

import pytest

from smartspec_bench.workloads import ANSWER_MARKER, WORKLOADS, generate

DIGESTS = {
    "chat": "ea94e030c70d44ce57b6b86ead6266b62b66b3304557ee9756858761d5356a5d",
    "sql": "4727d9e309d360312da49fe94764c242ce7c05b878a942ba6506b2b214477d77",
    "summarize": "2d31a478ba5ce9469f199c1959a449dde6000e16a38472ba4f918da3e2bf3e8e",
    "qa": "4a97f5181eaeb02edb289ffd771ecfc0d302230d2d1c6a275de3442346215082",
}
"""SHA-256 of 100 prompts and answers."""


@pytest.mark.parametrize("workload", WORKLOADS)
def test_documents_are_those_of_the_training(workload: str) -> None:
    """Another document would have another acceptance rate."""
    examples = [generate(workload, 5, index) for index in range(100)]
    assert len({one.prompt for one in examples}) == 100
    assert all(one.prompt.startswith(f"Task: {workload}\n") for one in examples)
    assert all(one.prompt.endswith(ANSWER_MARKER) for one in examples)
    text = "".join(one.prompt + one.answer for one in examples)
    assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[workload]
