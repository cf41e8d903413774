"""check_pair on directories that obey every rule but one: each violation is found, and it alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smartspec_cli.app import app
from smartspec_py.engines.trtllm.engine_config import TRTLLM_VERSION
from smartspec_py.engines.trtllm.engine_dir import EXTERNAL_DRAFTS, NO_SPECULATION
from smartspec_trtllm.engine_check import Finding, Severity, check_pair, has_errors

SIGNATURES = Path(__file__).parents[2] / "tools" / "smartspec_trtllm" / "signatures.json"

LOAD: dict[str, Any] = {"k": 7, "sequences": 64, "context_len": 1000}
VOCAB_SIZE = 128256

# A value of this, for a key, takes the key away.
ABSENT = object()


def engine_config(role: str) -> dict[str, Any]:
    """As trtllm-build writes it, for 64 sequences of 1000 tokens and drafts of 7.

    64 verifications of 1007 tokens are 64,448: all fit in one iteration.
    """
    is_target = role == "target"
    return {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "logits_dtype": "float32",
            "vocab_size": VOCAB_SIZE,
            "mapping": {"tp_size": 1, "pp_size": 1, "cp_size": 1},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        },
        "build_config": {
            "max_input_len": 1007 if is_target else 1000,
            "max_seq_len": 1007 if is_target else 1000,
            "max_batch_size": 64,
            "max_beam_width": 1,
            "max_num_tokens": 64448,
            "kv_cache_type": "PAGED",
            "gather_context_logits": False,
            "max_draft_len": 7 if is_target else 0,
            "speculative_decoding_mode": 2 if is_target else 1,
            "plugin_config": {
                "gpt_attention_plugin": "auto",
                "remove_input_padding": True,
                "context_fmha": True,
                "use_paged_context_fmha": True,
            },
        },
    }


def make_engine(folder: Path, role: str, changes: dict[str, Any] | None = None) -> Path:
    """changes: values by dotted key."""
    config = engine_config(role)
    for key, value in (changes or {}).items():
        *sections, name = key.split(".")
        place = config
        for section in sections:
            place = place[section]
        if value is ABSENT:
            del place[name]
        else:
            place[name] = value
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(config["pretrained_config"]["mapping"]["tp_size"]):
        (folder / f"rank{rank}.engine").write_bytes(b"engine")
    return folder


def make_pair(
    tmp_path: Path,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
) -> tuple[Path, Path]:
    return (
        make_engine(tmp_path / "target", "target", target),
        make_engine(tmp_path / "draft", "draft", draft),
    )


def only(findings: tuple[Finding, ...]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_a_pair_that_obeys_every_rule_has_no_findings(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path)
    assert check_pair(target, draft, **LOAD) == ()
    assert check_pair(target, None, **LOAD) == ()


PLUGINS = "build_config.plugin_config"
MODE = "build_config.speculative_decoding_mode"

VIOLATIONS = [
    # role, key, value, severity, flag that the remedy names
    ("target", MODE, 1, "error", "--speculative_decoding_mode draft_tokens_external"),
    ("target", MODE, ABSENT, "error", "--speculative_decoding_mode draft_tokens_external"),
    ("target", MODE, 4, "error", "--speculative_decoding_mode draft_tokens_external"),
    ("draft", MODE, 2, "error", "without --speculative_decoding_mode"),
    ("target", "build_config.max_draft_len", 6, "error", "--max_draft_len"),
    ("target", "build_config.max_draft_len", 0, "error", "--max_draft_len"),
    ("target", "build_config.max_draft_len", ABSENT, "error", "--max_draft_len"),
    ("draft", "build_config.max_draft_len", 7, "warning", "--max_draft_len"),
    ("target", "build_config.max_input_len", 1006, "error", "--max_input_len"),
    ("target", "build_config.max_seq_len", 1006, "error", "--max_seq_len"),
    ("draft", "build_config.max_input_len", 999, "error", "--max_input_len"),
    ("draft", "build_config.max_seq_len", "1000", "error", "--max_seq_len"),
    ("target", "build_config.max_batch_size", 63, "error", "--max_batch_size"),
    ("draft", "build_config.max_batch_size", 63, "error", "--max_batch_size"),
    ("target", "build_config.max_num_tokens", 1006, "error", "--max_num_tokens"),
    ("target", "build_config.max_num_tokens", 64447, "warning", "--max_num_tokens"),
    ("draft", "build_config.max_num_tokens", 999, "error", "--max_num_tokens"),
    ("draft", "build_config.max_num_tokens", 63999, "warning", "--max_num_tokens"),
    *[
        (role, key, value, severity, flag)
        for role in ("target", "draft")
        for key, value, severity, flag in (
            ("version", ABSENT, "error", "trtllm-build"),
            ("build_config.kv_cache_type", "CONTINUOUS", "error", "--kv_cache_type paged"),
            ("build_config.kv_cache_type", ABSENT, "error", "--kv_cache_type paged"),
            ("build_config.gather_context_logits", True, "error", "--gather_context_logits"),
            ("build_config.max_beam_width", 4, "warning", "--max_beam_width 1"),
            (f"{PLUGINS}.use_paged_context_fmha", False, "error", "--use_paged_context_fmha"),
            (f"{PLUGINS}.use_paged_context_fmha", ABSENT, "error", "--use_paged_context_fmha"),
            (f"{PLUGINS}.context_fmha", False, "error", "--context_fmha enable"),
            (f"{PLUGINS}.remove_input_padding", False, "error", "--remove_input_padding"),
            (f"{PLUGINS}.gpt_attention_plugin", None, "error", "--gpt_attention_plugin auto"),
        )
    ],
]


@pytest.mark.parametrize(("role", "key", "value", "severity", "flag"), VIOLATIONS)
def test_each_violation_is_found_alone(
    tmp_path: Path, role: str, key: str, value: Any, severity: str, flag: str
) -> None:
    target, draft = make_pair(tmp_path, **{role: {key: value}})
    finding = only(check_pair(target, draft, **LOAD))
    assert (finding.engine, finding.key, finding.severity) == (role, key, severity)
    assert finding.value == ("missing" if value in (ABSENT, None) else str(value))
    assert flag in finding.remedy


def test_rules_and_documented_keys_are_the_same() -> None:
    """Every key that a rule reads stands in the facts; so do the version and the mode's bits."""
    facts = json.loads(SIGNATURES.read_text())
    engine_dir = facts["engine_dir"]
    documented = {
        "version",
        *(f"build_config.{key}" for key in engine_dir["config_json"]["build_config"]["keys"]),
        *(
            f"{PLUGINS}.{key}"
            for key in engine_dir["config_json"]["build_config"][
                "plugin_config_keys_read_by_runtime"
            ]
        ),
    }
    assert {key for _, key, *_ in VIOLATIONS} <= documented
    modes = engine_dir["speculative_decoding_mode_values"]
    assert (modes["NONE"], modes["DRAFT_TOKENS_EXTERNAL"]) == (NO_SPECULATION, EXTERNAL_DRAFTS)
    assert facts["pin"]["trtllm"] == TRTLLM_VERSION


def test_other_versions(tmp_path: Path) -> None:
    """Another version in both is a warning each; two versions cannot be loaded by one process."""
    both = make_pair(tmp_path / "same", {"version": "1.1.0"}, {"version": "1.1.0"})
    findings = check_pair(*both, **LOAD)
    assert [(f.engine, f.severity) for f in findings] == [
        ("target", "warning"),
        ("draft", "warning"),
    ]
    assert "1.2.1" in findings[0].needed
    mixed = make_pair(tmp_path / "mixed", {"version": "1.1.0"})
    findings = check_pair(*mixed, **LOAD)
    assert [(f.engine, f.severity) for f in findings] == [("pair", "error"), ("target", "warning")]
    assert findings[0].value == "1.1.0, 1.2.1"


def test_a_step_takes_several_iterations(tmp_path: Path) -> None:
    """10,070 tokens take 10 verifications of 1007; 64 need 7 iterations. 64 * 1007 = 64448."""
    target, draft = make_pair(tmp_path, {"build_config.max_num_tokens": 10070})
    finding = only(check_pair(target, draft, **LOAD))
    assert finding.severity is Severity.WARNING
    assert "10 verifications of 1000 tokens fit" in finding.needed
    assert "a step of 64 takes 7" in finding.needed
    assert "--max-num-tokens 64448" in finding.remedy


def test_longer_drafts_and_contexts_than_built_for(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    findings = check_pair(*pair, k=8, sequences=64, context_len=1000)
    keys = [finding.key for finding in findings if finding.severity is Severity.ERROR]
    assert keys == [
        f"build_config.{name}" for name in ("max_draft_len", "max_input_len", "max_seq_len")
    ]
    findings = check_pair(*pair, k=7, sequences=64, context_len=1001)
    errors = [(f.engine, f.key) for f in findings if f.severity is Severity.ERROR]
    assert errors == [
        (role, f"build_config.{name}")
        for role in ("target", "draft")
        for name in ("max_input_len", "max_seq_len")
    ]


def test_the_draft_len_that_is_built_is_reserved(tmp_path: Path) -> None:
    """1000 + 10: a request without drafts reserves all of max_draft_len, whatever k is."""
    target, draft = make_pair(tmp_path, {"build_config.max_draft_len": 10})
    findings = check_pair(target, draft, **LOAD)
    assert [finding.severity for finding in findings] == [Severity.ERROR] * 2
    assert all(finding.needed.startswith("at least 1010") for finding in findings)


def test_without_a_context_len_the_target_says_it(tmp_path: Path) -> None:
    """The target holds 1007 - 7 = 1000; a draft of 999 is then too short."""
    target, draft = make_pair(tmp_path, draft={"build_config.max_seq_len": 999})
    finding = only(check_pair(target, draft, k=7, sequences=64))
    assert finding.engine == "draft"
    assert "at least 1000" in finding.needed


def test_ranks(tmp_path: Path) -> None:
    """Two tensor ranks are two files; an empty one was cut off; a third is of another build."""
    two = {"pretrained_config.mapping.tp_size": 2}
    target, draft = make_pair(tmp_path, two)
    note = only(check_pair(target, draft, **LOAD))
    assert (note.severity, note.value) == (Severity.NOTE, "2, 1")
    assert "orchestrator" in note.needed
    (target / "rank1.engine").write_bytes(b"")
    finding = check_pair(target, draft, **LOAD)[0]
    assert (finding.severity, finding.key) == (Severity.ERROR, "rank1.engine")
    (target / "rank1.engine").unlink()
    assert check_pair(target, draft, **LOAD)[0].key == "rank1.engine"
    (target / "rank1.engine").write_bytes(b"engine")
    (target / "rank2.engine").write_bytes(b"engine")
    finding = check_pair(target, draft, **LOAD)[0]
    assert (finding.severity, finding.key) == (Severity.WARNING, "rank2.engine")


def test_pipeline_ranks_are_a_warning(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path, {"pretrained_config.mapping.pp_size": 2})
    (target / "rank1.engine").write_bytes(b"engine")
    findings = check_pair(target, draft, **LOAD)
    assert [finding.severity for finding in findings] == [Severity.WARNING, Severity.NOTE]
    assert "--pp_size 1" in findings[0].remedy


VOCAB = "pretrained_config.vocab_size"


def test_vocabularies(tmp_path: Path) -> None:
    """Other sizes are an error, unless both are known to hold all tokens of the tokenizer."""
    target, draft = make_pair(tmp_path, {VOCAB: 152064}, {VOCAB: 151936})
    finding = only(check_pair(target, draft, **LOAD))
    assert (finding.engine, finding.severity) == ("pair", Severity.ERROR)
    assert finding.value == "152064, 151936"
    note = only(check_pair(target, draft, **LOAD, num_tokens=151665))
    assert note.severity is Severity.NOTE
    assert "by logits" in note.needed
    by_logits = only(check_pair(target, draft, **LOAD, num_tokens=151665, uses_logits=True))
    assert by_logits.severity is Severity.ERROR
    assert only(check_pair(target, draft, **LOAD, num_tokens=151937)).severity is Severity.ERROR


def test_padded_vocabularies(tmp_path: Path) -> None:
    """32001 over 4 ranks is padded to 32004; in one rank it is not."""
    wide = {VOCAB: 32001, "pretrained_config.mapping.tp_size": 4}
    target, draft = make_pair(tmp_path, wide, {VOCAB: 32001})
    findings = check_pair(target, draft, **LOAD)
    assert {finding.severity for finding in findings} == {Severity.NOTE}
    assert "padded 32004, 32001" in next(f.needed for f in findings if f.key == VOCAB)


def test_logits_of_two_dtypes(tmp_path: Path) -> None:
    """A missing dtype is float32."""
    key = "pretrained_config.logits_dtype"
    target, draft = make_pair(tmp_path, {key: "float16"}, {key: ABSENT})
    note = only(check_pair(target, draft, **LOAD))
    assert (note.severity, note.value) == (Severity.NOTE, "float16, float32")
    assert has_errors(check_pair(target, draft, **LOAD, uses_logits=True))


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_directory_that_is_none(tmp_path: Path, content: str) -> None:
    target, draft = make_pair(tmp_path)
    (draft / "config.json").write_text(content)
    finding = only(check_pair(target, draft, **LOAD))
    assert (finding.engine, finding.key) == ("draft", "config.json")
    finding = only(check_pair(target, tmp_path / "nowhere", **LOAD))
    assert "is not a directory" in finding.value
    assert has_errors((finding,))


def test_a_config_of_other_types_is_said_not_raised(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path)
    text = json.dumps({"version": "1.2.1", "pretrained_config": [], "build_config": "x"})
    (target / "config.json").write_text(text)
    assert has_errors(check_pair(target, draft, **LOAD))


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check-engines", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_command_ends_with_1_where_there_are_errors(tmp_path: Path) -> None:
    target, draft = map(str, make_pair(tmp_path))
    code, text = invoke(target, draft, "--k", "7", "--sequences", "64", "--context-len", "1000")
    assert (code, text) == (0, "engines can be served, by their files: nothing found\n")
    code, text = invoke(target, draft, "--k", "8")
    assert code == 1
    assert "max_draft_len: 7" in text
    assert "engines cannot be served, by their files: 3 errors" in text


def test_command_as_json(tmp_path: Path) -> None:
    target, draft = map(str, make_pair(tmp_path, {MODE: 1}))
    file = tmp_path / "found.json"
    code, text = invoke(target, draft, "--json", str(file))
    document = json.loads(file.read_text())
    assert (code, document["ok"]) == (1, False)
    assert document["findings"][0]["severity"] == "error"
    assert document["findings"][0]["key"] == MODE
    assert "speculative_decoding_mode" in text
    code, _ = invoke(str(make_engine(tmp_path / "alone", "target")), "--json", str(file))
    assert (code, json.loads(file.read_text())) == (0, {"ok": True, "findings": []})


def test_command_looks_for_the_tokenizer_beside_the_target(tmp_path: Path) -> None:
    target, draft = map(str, make_pair(tmp_path, {VOCAB: 12}, {VOCAB: 10}))
    assert invoke(target, draft)[0] == 1
    (tmp_path / "tokenizer").mkdir()
    code, text = invoke(target, draft)
    assert (code, "tokenizer.json does not exist" in text) == (2, True)
    added = [{"id": 9, "content": "<end>"}]
    document = {"model": {"vocab": {"a": 0, "b": 8}}, "added_tokens": added}
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(document))
    code, text = invoke(target, draft)
    assert (code, "1 note\n" in text) == (0, True)
