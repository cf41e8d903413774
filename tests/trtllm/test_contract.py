"""The contract finds wrong uses; the fake and the adapter keep to it."""

import ast
from pathlib import Path

import pytest

from smartspec_testing import fake_executor
from smartspec_testing.fake_executor import EngineLimits, Executor
from smartspec_trtllm.contract import ContractBindings, ContractError, load_contract
from smartspec_trtllm.contract_kinds import is_of_kind
from smartspec_trtllm.doctor_uses import adapter_files, adapter_uses, calls_of_bindings


@pytest.fixture
def bindings() -> ContractBindings:
    return ContractBindings(fake_executor)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda b: b.Request([1], 2, True), "takes 2 positional arguments, got True"),
        (lambda b: b.Request([1], 2, stream=True), "Request: no argument stream (got True)"),
        (lambda b: b.Request([1]), "Request: argument max_tokens is missing"),
        (lambda b: b.Request([1], max_tokens=2.0), "max_tokens must be int, got 2.0"),
        (lambda b: b.Request([1], 2, max_tokens=3), "max_tokens is given twice"),
        (lambda b: b.Request([1], 2, stop_words=[1]), "stop_words must be Optional[list[list[int"),
        (lambda b: b.Request([1], 2, end_id=True), "end_id must be Optional[int], got True"),
        (lambda b: b.Request([1], 2, sampling_config=1), "sampling_config must be SamplingConfig"),
        (lambda b: b.SamplingConfig(1, 2), "takes 1 positional arguments, got 2"),
        (lambda b: b.Requests, "the bindings have no Requests"),
        (lambda b: b.TokenRangeRetentionConfig, "have no TokenRangeRetentionConfig"),
        (lambda b: b.FinishReason.STOPPED, "enum FinishReason has no member STOPPED"),
        (lambda b: b.Request([1], 2).num_tokens, "class Request has no attribute num_tokens"),
        (lambda b: b.DecodingMode.External, "class DecodingMode has no static member External"),
    ],
)
def test_wrong_uses_are_named(bindings, use, message):
    with pytest.raises(ContractError) as caught:
        use(bindings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", 3, "attribute max_tokens of Request is read-only (got 3)"),
        ("client_id", "x", "argument client_id must be Optional[int], got 'x'"),
        ("budget", 3, "class Request has no attribute budget (got 3)"),
    ],
)
def test_wrong_writes_are_named(bindings, name, value, message):
    request = bindings.Request([1], 2)
    with pytest.raises(ContractError) as caught:
        setattr(request, name, value)
    assert message in str(caught.value)


def test_methods_are_checked(bindings):
    executor = bindings.checked(Executor(EngineLimits()))
    with pytest.raises(ContractError, match=r"Executor.cancel_request: argument id is missing"):
        executor.cancel_request()
    with pytest.raises(ContractError, match="no attribute num_held_blocks"):
        _ = executor.num_held_blocks
    with pytest.raises(ContractError, match="await_responses: argument timeout must be"):
        executor.await_responses(0.5)


def test_what_is_right_is_passed_on_and_kept(bindings):
    """3 + 4 is 7, and 7 + 14 is 21."""
    output = bindings.OutputConfig(exclude_input_from_output=True)
    request = bindings.Request([3, 4], 1, output_config=output)
    request.client_id = 5
    with bindings.checked(Executor(EngineLimits())) as executor:
        executor.enqueue_requests([request])
        (response,) = executor.await_responses()
        assert response.client_id == 5
        assert response.result.output_token_ids == [[21]]
        assert response.result.finish_reasons[0] == bindings.FinishReason.LENGTH
    assert {
        "Request(output_config)",
        "Request.client_id",
        "Executor.enqueue_requests",
        "Result.output_token_ids",
        "FinishReason.LENGTH",
        "Executor.__exit__",
    } <= bindings.used()
    assert bindings.used() <= load_contract().names
    assert "Request(end_id)" not in bindings.used()


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (None, "Optional[int]", True),
        (None, "int", False),
        ([[1], [2]], "list[list[int]]", True),
        ([[1], [True]], "list[list[int]]", False),
        (1, "float", True),
        (Path(), "os.PathLike|str", True),
        (b"", "os.PathLike|str", False),
        (max, "Optional[Callable]", True),
    ],
)
def test_kinds(value, kind, expected):
    assert is_of_kind(value, kind) is expected


def test_the_double_has_every_name_of_the_contract():
    """Classes take the arguments and have the attributes; enums have the members."""
    contract = load_contract()
    nested = {inner for c in contract.classes.values() for inner in c.nested}
    for name in contract.classes.keys() - nested:
        made = getattr(fake_executor, name)
        fields = getattr(made, "__dataclass_fields__", None)
        if fields is None:  # written by hand: Executor, Response
            continue
        present = fields.keys() | vars(made).keys()
        missing = contract.classes[name].attributes - present
        assert missing <= {"BATCHED_POST_PROCESSOR_NAME", "name"}, name
        for init in contract.classes[name].inits[:1]:
            assert {a.name for a in init.arguments} <= fields.keys(), name
    for name, members in contract.enums.items():
        outer, _, inner = name.rpartition(".")
        owner = getattr(fake_executor, outer) if outer else fake_executor
        assert set(members) == set(getattr(owner, inner).__members__), name
    for method in contract.classes["Executor"].methods:
        assert callable(getattr(Executor, method))


@pytest.mark.parametrize("path", adapter_files(), ids=lambda path: path.name)
def test_the_adapter_calls_only_what_there_is(path):
    """As written, whether a test runs the line or not."""
    classes = load_contract().classes
    for call in calls_of_bindings(ast.parse(path.read_text(encoding="utf-8"))):
        assert call.name in classes
        assert any(
            set(call.keywords) <= {a.name for a in init.arguments}
            and call.num_positional <= sum(not a.is_keyword_only for a in init.arguments)
            for init in classes[call.name].inits
        ), f"{path.name}: {call}"


def test_the_static_check_sees_the_adapter():
    uses = adapter_uses()
    assert uses.is_used("Request(external_draft_tokens_config)")
    assert uses.is_used("Result.is_final")
    assert not uses.is_used("Request(eagle_config)")
    assert not uses.is_used("RequestStats.dis_serving_stats")


def test_the_static_check_leaves_the_double_alone():
    source = """
def build():
    from smartspec_py.engines import fake_executor as bindings
    return bindings.EngineLimits(vocab_size=9)
def run(bindings):
    return bindings.Request([1], 2, end_id=3)
"""
    (call,) = calls_of_bindings(ast.parse(source))
    assert (call.name, call.num_positional, call.keywords) == ("Request", 2, ("end_id",))
