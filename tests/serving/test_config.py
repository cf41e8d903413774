"""engine.json: what is wrong in it is said with the key's name."""

import json
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import pytest
from harness import TOKENIZER, TOKENIZER_FILE
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from smartspec_py.config import (
    CONFIG_NAME,
    LimitsConfig,
    LocalEngineConfig,
    ServerConfig,
    read_config,
)
from smartspec_py.constants import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.core.plan.planner import BatchTable
from smartspec_py.engines.model_files import (
    end_tokens,
    existing,
    load_tokenizer,
    log_unused_defaults,
)
from smartspec_py.engines.tokenizer_file import num_token_ids
from smartspec_py.faults import ConfigError, shown
from smartspec_py.serving.build import build_engine
from smartspec_testing.engines import FakeEngineConfig

LOCAL = {"kind": "local", "model": "target"}
FAKE = {"kind": "fake", "tokenizer": str(TOKENIZER_FILE.parent)}


def read(tmp_path: Path, document: Any) -> ServerConfig:
    path = tmp_path / CONFIG_NAME
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    path.write_bytes(content)
    return read_config(path)


def test_what_is_set_is_read_and_the_rest_has_its_default(tmp_path: Path) -> None:
    config = read(tmp_path, {"engine": LOCAL})
    assert config.engine == LocalEngineConfig(model="target")
    assert config == read(tmp_path, {"engine": {"model": "target"}}), "the default kind is local"
    assert (config.limits, config.policy) == (LimitsConfig(), "goodput")
    assert config.planner.batch_table is None
    limits = {"max_sequences": 3, "max_queue": 4, "max_context_len": 99, "prefill_chunk": 16}
    document = {"engine": {**FAKE, "accept_prob": 0.5}, "limits": limits, "policy": "fixed:3"}
    config = read(tmp_path, document)
    assert config.engine == FakeEngineConfig(**FAKE, accept_prob=0.5)
    assert (config.limits, config.policy) == (LimitsConfig(**limits), "fixed:3")


def test_a_table_of_batch_sizes_is_read(tmp_path: Path) -> None:
    """From a file, and from options, which come as Python's lists."""
    document = with_table([1, 4], [9, 0])
    for config in (read(tmp_path, document), ServerConfig.model_validate(document)):
        assert config.planner.batch_table == BatchTable((1, 4), (9, 0))
    assert read(tmp_path, json.loads(config.model_dump_json())) == config


def with_table(rows: list[Any], draft_lens: list[Any]) -> dict[str, Any]:
    table = {"rows": rows, "draft_lens": draft_lens}
    return {"engine": LOCAL, "planner": {"batch_table": table}}


def limits(**keys: Any) -> dict[str, Any]:
    return {"engine": LOCAL, "limits": keys}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        # an unknown key, at each level
        ({"engine": LOCAL, "polcy": "none"}, ["polcy", "did you mean policy?"]),
        ({"engine": {**LOCAL, "modle": "x"}}, ["engine.modle", "did you mean engine.model?"]),
        ({"engine": LOCAL, "max_queue": 1}, ["max_queue", "did you mean limits.max_queue"]),
        ({"engine": {**FAKE, "model": "x"}}, ["engine.model"]),
        (limits(max_batch=1), ["limits.max_batch: unknown key"]),
        # a wrong type: nothing is converted silently
        (limits(max_queue="7"), ["limits.max_queue", "integer", "'7'"]),
        (limits(max_queue=1.5), ["limits.max_queue"]),
        ({"engine": {**LOCAL, "draft": 3}}, ["engine.draft", "string"]),
        ({"engine": LOCAL, "limits": []}, ["limits"]),
        (limits(reuse_prefixes=1), ["limits.reuse_prefixes", "boolean"]),
        # out of range
        (limits(max_queue=0), ["limits.max_queue", "1", "got 0"]),
        (limits(drain_s=-1.0), ["limits.drain_s", "-1"]),
        ({"engine": {**LOCAL, "dtype": "int8"}}, ["engine.dtype", "float32", "'int8'"]),
        ({"engine": LOCAL, "policy": "fixed:0"}, ["policy", "none, fixed:K", "'fixed:0'"]),
        ({"engine": LOCAL, "proposer": "guess"}, ["proposer", "prompt_lookup", "'guess'"]),
        ({"engine": LOCAL, "lookup": {"min_ngram": 5}}, ["lookup", "5 is above max_ngram 4"]),
        # the table of batch sizes
        (with_table([1, 2], [3]), ["planner.batch_table", "per entry of rows"]),
        (with_table([2, 2], [3, 1]), ["planner.batch_table", "rows must ascend", "(2, 2)"]),
        (with_table([1.5], [1]), ["planner.batch_table.rows.0", "integer", "1.5"]),
        # something missing
        ({}, ["engine"]),
        ({"engine": {"kind": "local"}}, ["engine.model", "required"]),
        ({"engine": {"kind": "tensorflow"}}, ["engine", "kind", "tensorflow"]),
        # every wrong key is named at once
        ({"engine": {**LOCAL, "x": 1}, "limits": {"max_queue": 0}}, ["engine.x", "max_queue"]),
        # not JSON at all
        (b"{", ["engine.json", "JSON"]),
        (b"[]", ["engine.json"]),
        (b'{"policy": "\xff"}', ["engine.json", "invalid unicode"]),
        # more digits than Python converts to an integer
        (b'{"limits": {"max_queue": ' + 5000 * b"9" + b"}}", ["number out of range at line 1"]),
    ],
)
def test_refused_with_the_name_of_the_key(tmp_path: Path, document: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, document)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


LONG = 500 * "x"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (limits(max_queue=LONG), f"(got '{LONG[:79]}..)"),
        ({"engine": {**LOCAL, "lora": {LONG: "x"}}}, f"the name '{LONG[:79]}.. must be"),
        ({"engine": LOCAL, LONG: 1}, f": {LONG[:80]}..: unknown key"),
    ],
)
def test_a_long_value_is_cut_with_a_mark(tmp_path: Path, document: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, document)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.json: No such file"):
        read_config(tmp_path / CONFIG_NAME)


def test_a_missing_model_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tokenizer: .*nowhere does not exist"):
        build_engine(read(tmp_path, {"engine": {**FAKE, "tokenizer": "nowhere"}}), tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.json: engine\.draft: .* does not exist"):
        existing("engine.draft", tmp_path / "draft")
    with pytest.raises(ConfigError, match=r"engine\.model: .* has no tokenizer\.json"):
        load_tokenizer("engine.model", tmp_path)


@pytest.mark.parametrize(
    ("checkpoint", "flags", "expected"),
    [
        ("bfloat16", {"avx512_bf16"}, "bfloat16"),
        ("bfloat16", set(), "float32"),
        ("float32", {"avx512_bf16"}, "float32"),
        ("float16", {"avx512_bf16"}, "float32"),
    ],
)
def test_auto_is_the_precision_of_the_checkpoint_where_the_processor_has_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: str,
    flags: set[str],
    expected: str,
) -> None:
    import torch

    from smartspec_py.engines.local import devices

    monkeypatch.setattr(devices, "cpu_has", lambda name: name in flags)
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": checkpoint}))
    found = devices.dtype_of("auto", torch.device("cpu"), tmp_path)
    assert found == getattr(torch, expected)


def test_limits_reach_the_engine(tmp_path: Path) -> None:
    limits = {"max_sequences": 3, "max_context_len": 99, "max_draft_len": 2, "prefill_chunk": 16}
    engine = build_engine(read(tmp_path, {"engine": FAKE, "limits": limits}), tmp_path)
    capabilities = engine.target.capabilities
    assert (capabilities.max_sequences, capabilities.max_draft_len) == (3, 2)
    assert capabilities.max_context_len == capabilities.max_prefill_tokens == 99
    lengths = {name: each.capabilities.max_draft_len for name, each in engine.proposers.items()}
    assert lengths == {DRAFT_MODEL: 2, PROMPT_LOOKUP: 2}


NAMED = TOKENIZER.token_to_id("a")


@pytest.mark.parametrize(
    ("generation", "config", "eos", "expected"),
    [
        # As in Qwen 2.5: the file of the generation comes first, where it says anything.
        ([151645, 151643], 151645, None, (151645, 151643)),
        (2, 2, None, (2,)),
        (None, [7, 8, 7], None, (7, 8)),
        (0, None, None, (0,)),
        ([], 6, None, ()),
        (None, None, None, ()),
        # The tokenizer may name one too, as in a chat model whose configs name the end of a
        # document only.
        (0, 0, "a", (0, NAMED)),
        (0, 0, {"content": "a", "special": True}, (0, NAMED)),
        (0, 0, "no token of this tokenizer", (0,)),
        (0, 0, 5, (0,)),
    ],
)
def test_the_model_says_its_end_tokens(
    tmp_path: Path, generation: Any, config: Any, eos: Any, expected: tuple[int, ...]
) -> None:
    assert end_tokens(tmp_path, 151_936, TOKENIZER) == (), "no file"
    write_configs(tmp_path, {"eos_token_id": generation}, {"eos_token_id": config})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert end_tokens(tmp_path, 151_936, TOKENIZER) == expected


def test_sampling_defaults_of_the_model_are_named_as_unused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write_configs(tmp_path, {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 0}, {})
    log_unused_defaults(tmp_path)
    assert "temperature 0.6, top_p 0.9" in caplog.text
    caplog.clear()
    write_configs(tmp_path, {"eos_token_id": 0}, {})
    log_unused_defaults(tmp_path)
    assert not caplog.text


@pytest.mark.parametrize(
    "value", [2048, [0, 2048], -1, True, [0, False], 1.0, "2", [None], {}, LONG]
)
def test_an_end_token_that_is_none_is_named(tmp_path: Path, value: Any) -> None:
    """By file, key, value and range."""
    for name in ("config.json", "generation_config.json"):  # the second one comes first
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(ConfigError) as caught:
            end_tokens(tmp_path, 2048, TOKENIZER)
        message = str(caught.value)
        allowed = "eos_token_id: must be a token id in 0..2047 "
        assert message.startswith(f"{tmp_path / name}: {allowed}")
        assert f"got {shown(value)}: " in message
        assert len(message) < len(str(tmp_path)) + 250


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "is not a JSON object"),
    ],
)
def test_a_damaged_generation_config_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} {reason}"):
        end_tokens(tmp_path, 2048, TOKENIZER)


def write_configs(folder: Path, generation: Any, config: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config))


def test_a_tokenizer_neither_cuts_nor_pads(tmp_path: Path) -> None:
    """Whatever its file asks for: a prompt is served as it is."""
    tokenizer = load_tokenizer("engine.model", TOKENIZER_FILE.parent)
    prompt = "a longer prompt than four tokens"
    whole = tokenizer.encode(prompt).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer("engine.model", tmp_path).encode(prompt).ids == whole
    # Ids with gaps are counted to the highest.
    vocabulary = Tokenizer(WordLevel({"a": 0, "b": 1, "end": 7}, unk_token="a"))
    assert num_token_ids(vocabulary) == 8


def test_a_kind_that_no_installed_package_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the fakes are where the backend stands alone."""
    monkeypatch.setattr("smartspec_py.config.entry_points", lambda **_: EntryPoints())
    with pytest.raises(ValueError, match=r"kind must be one of local, trtllm "):
        ServerConfig.model_validate({"engine": FAKE})


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([""], r"served_model_name: the name '' must be 1 to 256 printable characters"),
        (["a\nb"], r"served_model_name: the name 'a\\nb' must be 1 to 256 printable characters"),
        (["q", "sql"], r"served_model_name: the name 'sql' must be .* and not in engine\.lora"),
    ],
)
def test_names_that_cannot_be_served(tmp_path: Path, names: list[str], sentence: str) -> None:
    engine = {"kind": "local", "model": "m", "lora": {"sql": "x"}}
    assert read(tmp_path, {"engine": engine, "served_model_name": ["Qwen/Q:Q4_0", "q"]})
    with pytest.raises(ConfigError, match=sentence):
        read(tmp_path, {"engine": engine, "served_model_name": names})
