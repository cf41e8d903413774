"""The doctor's comparison of the bindings with the contract, on classes as nanobind shows them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from smartspec_testing.fake_executor import DoubleBindings
from smartspec_trtllm.doctor_bench import Bench
from smartspec_trtllm.doctor_experiments import default_priority
from smartspec_trtllm.doctor_finding import UnsettledError
from smartspec_trtllm.doctor_signatures import Kind, Parameter, compare, parse_signature

NANOBIND = (
    "__init__(self, input_token_ids: collections.abc.Sequence[int], max_tokens: int, *, "
    "streaming: bool = False, sampling_config: tensorrt_llm.bindings.executor.SamplingConfig = "
    "SamplingConfig(top_k=1, seed='a, b'), end_id: int | None = None, "
    "bias: typing.Annotated[numpy.typing.ArrayLike, dict(shape=(3,))] | None = None) -> None"
)


def test_signatures_of_docstrings_are_read():
    pybind = (
        "1. __init__(self: a.b.Request, tokens: List[int], end_id: Optional[int] = None) -> None"
    )
    assert parse_signature(pybind) == [
        Parameter("tokens", False, None),
        Parameter("end_id", False, "None"),
    ]
    assert [(p.name, p.is_keyword_only) for p in parse_signature(NANOBIND)] == [
        ("input_token_ids", False),
        ("max_tokens", False),
        ("streaming", True),
        ("sampling_config", True),
        ("end_id", True),
        ("bias", True),
    ]
    defaults = {p.name: p.default for p in parse_signature(NANOBIND)}
    assert defaults["sampling_config"] == "SamplingConfig(top_k=1, seed='a, b')"
    assert defaults["bias"] == "None"


class Init:
    """A constructor as nanobind shows it: overloads of text, docstring, and defaults.

    The n-th default stands as `\\n` in the text, as `\\=n` where it is kept as text itself.
    """

    def __init__(self, *overloads):
        self.__nb_signature__ = overloads


def class_with(init, **members):
    return type("Planted", (), {"__init__": init, **members})


FAKE = DoubleBindings()


def planted(**changed):
    """The fake's names, some of them replaced or, where None, taken away."""

    class Bindings:
        def __getattr__(self, name):
            found = changed.get(name, getattr(FAKE, name))
            if found is None:
                raise AttributeError(name)
            return found

    return Bindings()


def differences(bindings):
    return {(d.kind, d.name): d for d in compare(bindings)}


def test_the_double_differs_from_the_contract_in_its_own_additions_alone():
    found = [d for d in compare(DoubleBindings()) if d.kind is not Kind.UNKNOWN]
    assert not any(d.breaks_adapter for d in found)
    assert {d.name for d in found} == {
        "Executor(model_type)",  # has a default
        "Executor(executor_config)",
        "Executor(encoder_model_path)",  # the fake is made from a directory or from limits
        "Executor(engine_buffer)",
        "Executor(encoder_engine_buffer)",
        "Executor.num_free_blocks",
        "Executor.num_held_blocks",
        "Executor.num_replayed",
        "KVCacheEventManager",  # is in a submodule, and nothing makes one here
        "Request.drafts",
        "Response(request_id)",  # is made by the fake alone
        "SamplingConfig.is_greedy",
    }


def test_planted_differences_are_found():
    config = class_with(
        Init(
            (
                r"def __init__(self, tokens: list[int], logits: object | None = \0, "
                r"acceptance_threshold: float = \1, *, fast: bool = \2) -> None",
                None,
                (None, 0.5, False),
            )
        ),
        tokens=None,
        logits=None,
        acceptance_threshold=None,
        speed=None,
    )
    reasons = SimpleNamespace(__members__={"END_ID": 1, "LENGTH": 2, "REFUSED": 9})
    found = differences(
        planted(ExternalDraftTokensConfig=config, FinishReason=reasons, OutputConfig=None)
    )
    name = "ExternalDraftTokensConfig"
    for kind, what in (
        (Kind.MISSING, f"{name}(fast_logits)"),
        (Kind.ADDED, f"{name}(fast)"),
        (Kind.CHANGED, f"{name}(acceptance_threshold)"),
        (Kind.MISSING, f"{name}.fast_logits"),
        (Kind.ADDED, f"{name}.speed"),
        (Kind.MISSING, "FinishReason.STOP_WORDS"),
        (Kind.ADDED, "FinishReason.REFUSED"),
        (Kind.MISSING, "OutputConfig"),
    ):
        assert (kind, what) in found
    assert (Kind.CHANGED, f"{name}(logits)") not in found
    assert found[Kind.MISSING, "FinishReason.STOP_WORDS"].breaks_adapter
    assert found[Kind.MISSING, "OutputConfig"].breaks_adapter
    assert not found[Kind.MISSING, f"{name}(fast_logits)"].is_used
    assert not found[Kind.ADDED, "FinishReason.REFUSED"].breaks_adapter


def test_arguments_that_change_their_kind_or_order_are_found():
    lookahead = class_with(
        Init(
            (
                r"def __init__(self, max_ngram_size: int, max_window_size: int, "
                r"max_verification_set_size: int = \=0) -> None",
                None,
                ("4",),
            )
        )
    )
    output = class_with(Init(("def __init__(self, return_log_probs: bool) -> None", None, None)))
    found = differences(planted(LookaheadDecodingConfig=lookahead, OutputConfig=output))
    order = found[Kind.CHANGED, "LookaheadDecodingConfig"].detail
    assert "['max_ngram_size', 'max_window_size', 'max_verification_set_size'] found" in order
    optional = found[Kind.ADDED, "LookaheadDecodingConfig(max_verification_set_size)"]
    assert optional.detail == "a default, 4"
    assert found[Kind.CHANGED, "OutputConfig(return_log_probs)"].detail == "is required now"


def test_defaults_that_are_objects_are_known_by_their_names():
    """The text is what nanobind made of a like class."""
    text = (
        r"def __init__(self, capacity_scheduler_policy: m.CapacitySchedulerPolicy = \0, "
        r"context_chunking_policy: int | None = \1, dynamic_batch_config: m.D | None = \2) -> None"
    )

    def changed(policy):
        init = Init((text, None, (policy, None, None)))
        return differences(planted(SchedulerConfig=class_with(init))).keys()

    policies = FAKE.CapacitySchedulerPolicy
    where = "SchedulerConfig(capacity_scheduler_policy)"
    assert (Kind.CHANGED, where) not in changed(policies.GUARANTEED_NO_EVICT)
    assert (Kind.CHANGED, where) in changed(policies.MAX_UTILIZATION)
    assert (Kind.UNKNOWN, where) in changed(object())


def test_attributes_that_became_read_only_are_found():
    init = Init(("def __init__(self) -> None", None, None))
    frozen = class_with(init, fast_logits=property(lambda self: True))
    found = differences(planted(SpeculativeDecodingConfig=frozen))
    detail = found[Kind.CHANGED, "SpeculativeDecodingConfig.fast_logits"].detail
    assert detail == "is read-only now"


def test_a_constructor_that_tells_nothing_cannot_be_compared():
    silent = class_with(SimpleNamespace(__doc__=None))
    assert (Kind.UNKNOWN, "OutputConfig") in differences(planted(OutputConfig=silent))


def test_the_priority_is_what_the_signature_says():
    init = Init(
        (r"def __init__(self, tokens: list[int], priority: float = \0) -> None", None, (0.7,))
    )
    found = default_priority(Bench(planted(Request=class_with(init)), Path()))
    assert found.answer == "0.7"
    silent = planted(Request=class_with(SimpleNamespace(__doc__=None)))
    with pytest.raises(UnsettledError, match="cannot be read"):
        default_priority(Bench(silent, Path()))
