"""What is to be built: its commands against the flags that TensorRT-LLM documents; what is refused.

The models are configurations of the Hugging Face hub, as far as they are read, in golden/hub.json.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from smartspec_trtllm.build_engines import shell_text
from smartspec_trtllm.build_models import BuildError
from smartspec_trtllm.build_plan import (
    BuildOptions,
    ModelOptions,
    Plan,
    Step,
    default_max_num_tokens,
    make_plan,
)
from smartspec_trtllm.build_quantization import RECIPES, KvCacheDtype, Quantization

GOLDEN = Path(__file__).parent / "golden"
SIGNATURES = Path(__file__).parents[2] / "tools" / "smartspec_trtllm" / "signatures.json"
HUB = json.loads((GOLDEN / "hub.json").read_text())
LLAMA_8B, LLAMA_1B = HUB["Llama-3.1-8B-Instruct"], HUB["Llama-3.2-1B-Instruct"]
QWEN_14B, QWEN_HALF_B = HUB["Qwen2.5-14B-Instruct"], HUB["Qwen2.5-0.5B-Instruct"]
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}


def make_model(folder: Path, config: dict[str, Any], tokens: tuple[str, ...] = ("a", "b")) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    tokenizer = {
        "model": {"vocab": {token: number for number, token in enumerate(tokens)}},
        "added_tokens": [{"id": len(tokens), "content": "<end>"}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def plan_for(
    tmp_path: Path,
    options: BuildOptions,
    target: dict[str, Any] = LLAMA_8B,
    draft: dict[str, Any] = LLAMA_1B,
) -> Plan:
    models = (make_model(tmp_path / "T", target), make_model(tmp_path / "D", draft))
    return make_plan(*models, tmp_path / "out", options)


def value_of(step: Step, flag: str) -> str:
    return step.command[step.command.index(flag) + 1]


# The flags, against those that TensorRT-LLM documents.


def table_of(command: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The documented flags of the tool that the command starts, by name."""
    tables = json.loads(SIGNATURES.read_text())["cli"]
    tool = Path(command[1] if command[0] == "python3" else command[0])
    family = f" ({tool.parent.name})" if tool.name == "convert_checkpoint.py" else ""
    return {flag["name"]: flag for flag in tables[f"{tool.name}{family}"]["flags"]}


def check_flags(command: tuple[str, ...]) -> None:
    table = table_of(command)
    words = list(command[2 if command[0] == "python3" else 1 :])
    while words:
        name = words.pop(0)
        assert name in table, f"{name} is not documented"
        flag = table[name]
        assert not flag.get("deprecated"), name
        if flag["type"] == "flag":
            continue
        value = words.pop(0)
        assert value in flag.get("choices", [value]), f"{name} {value}"
        if flag["type"] in ("int", "float"):
            float(value)


SUPPORTED = [
    (family, quantization, kv_cache)
    for quantization, recipe in RECIPES.items()
    for family in sorted(recipe.families)
    for kv_cache in (KvCacheDtype.AUTO, *sorted(recipe.kv_cache))
    if not (family == "qwen" and recipe.tool == "convert" and kv_cache == "fp8")
]


@pytest.mark.parametrize(("family", "quantization", "kv_cache"), SUPPORTED)
def test_every_flag_is_documented(
    tmp_path: Path, family: str, quantization: Quantization, kv_cache: KvCacheDtype
) -> None:
    models = (LLAMA_8B, LLAMA_1B) if family == "llama" else (QWEN_14B, QWEN_HALF_B)
    if quantization is Quantization.GPTQ:
        models = (models[0] | GPTQ, models[1] | GPTQ)
    own = ModelOptions(1, quantization, kv_cache)
    options = BuildOptions(own, own, dtype="bfloat16", calib_dataset="texts")
    steps = plan_for(tmp_path, options, *models).steps
    assert [step.name for step in steps] == [
        *("convert-target", "build-target", "convert-draft", "build-draft", "tokenizer")
    ]
    for step in steps[:4]:
        check_flags(step.command)


@pytest.mark.parametrize(
    "words",
    [
        ("--max_draft_length", "7"),
        ("--kv_cache_type", "pages"),
        ("--max_draft_len", "seven"),
        ("--paged_kv_cache", "enable"),
    ],
)
def test_the_check_of_flags_can_fail(words: tuple[str, str]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_flags(("trtllm-build", *words))


def test_the_required_flags_of_each_role(tmp_path: Path) -> None:
    """Context 1000 and drafts of 7: the target reads up to 1007 tokens a prompt, the draft 1000."""
    options = BuildOptions(max_context_len=1000, max_draft_len=7, max_batch_size=16)
    _, target, _, draft, _ = plan_for(tmp_path, options).steps
    assert value_of(target, "--speculative_decoding_mode") == "draft_tokens_external"
    assert value_of(target, "--max_draft_len") == "7"
    assert not {"--speculative_decoding_mode", "--max_draft_len"} & set(draft.command)
    for step, length in ((target, "1007"), (draft, "1000")):
        assert value_of(step, "--max_input_len") == length
        assert value_of(step, "--max_seq_len") == length
        assert value_of(step, "--max_batch_size") == "16"
        assert value_of(step, "--use_paged_context_fmha") == "enable"
        assert "--gather_context_logits" not in step.command


@pytest.mark.parametrize(
    ("context_len", "draft_len", "batch", "expected"),
    [
        (8192, 7, 64, 65536),  # 8 * 8199 = 65,592 is above the bound
        (4096, 7, 64, 32832),  # 8 * 4103 = 32,824, rounded up to a multiple of 64
        (1000, 7, 64, 8192),  # 8 * 1007 = 8056; never less than trtllm-build's own default
        (4096, 7, 1, 8192),
        (100000, 10, 8, 100032),  # one must fit: 100,010
    ],
)
def test_default_max_num_tokens(
    context_len: int, draft_len: int, batch: int, expected: int
) -> None:
    assert default_max_num_tokens(context_len, draft_len, batch) == expected


def test_fp8_turns_the_gemm_plugin_off(tmp_path: Path) -> None:
    options = BuildOptions(ModelOptions(1, Quantization.FP8))
    steps = plan_for(tmp_path, options).steps
    assert value_of(steps[1], "--gemm_plugin") == "disable"
    assert value_of(steps[3], "--gemm_plugin") == "auto"


def test_texts_go_to_the_steps_that_calibrate(tmp_path: Path) -> None:
    """A quantised target calibrates; a draft that is only converted does not, with an int8 cache
    it does."""
    target = ModelOptions(1, Quantization.FP8)
    for kv_cache, calibrates in ((KvCacheDtype.AUTO, False), (KvCacheDtype.INT8, True)):
        draft = ModelOptions(1, Quantization.NONE, kv_cache)
        options = BuildOptions(target, draft, calib_dataset="texts")
        steps = plan_for(tmp_path / kv_cache, options).steps
        assert value_of(steps[0], "--calib_dataset") == "texts"
        assert ("--calib_dataset" in steps[2].command) is calibrates


def test_groups_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    target = LLAMA_8B | {"quantization_config": config}
    plan = plan_for(tmp_path, BuildOptions(ModelOptions(1, Quantization.GPTQ)), target)
    assert value_of(plan.steps[0], "--group_size") == "64"


def test_what_is_not_listed_for_external_drafts_is_noted(tmp_path: Path) -> None:
    options = BuildOptions(ModelOptions(1, Quantization.FP8), ModelOptions(1, Quantization.INT4_WO))
    (note,) = plan_for(tmp_path, options).notes
    assert note.startswith("int4_wo of the draft: TensorRT-LLM lists FP16, BF16 and FP8")


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_every_golden_command_is_documented(golden: Path) -> None:
    lines = golden.read_text().replace("\\\n", "").splitlines()
    commands = [tuple(shlex.split(line)) for line in lines if line[0] != "#"]
    assert [command[0] for command in commands[4:]] == ["install", "smartspec"]
    for command in commands[:4]:
        check_flags(command)


def test_a_printed_command_means_the_same_to_a_shell() -> None:
    words = ("printf", "%s.", "--name", "a b", "it's", "$HOME")
    answer = subprocess.run(["sh", "-c", shell_text(words)], capture_output=True, text=True)
    assert answer.stdout == "--name.a b.it's.$HOME."


# What is refused.

REFUSED: list[tuple[BuildOptions, dict[str, Any], dict[str, Any], str]] = [
    (BuildOptions(), LLAMA_8B | {"model_type": "gemma2"}, LLAMA_1B, "model_type: target"),
    (BuildOptions(), LLAMA_8B, LLAMA_1B | {"hidden_size": None}, "hidden_size: the draft's"),
    (BuildOptions(ModelOptions(3)), LLAMA_8B, LLAMA_1B, "--tp: 3 does not divide num_attention"),
    (BuildOptions(ModelOptions(16)), LLAMA_8B, LLAMA_1B, "--tp: 16 does not divide num_key_value"),
    (
        BuildOptions(draft=ModelOptions(4)),
        QWEN_14B,
        QWEN_HALF_B,
        "--draft-tp: 4 does not divide num_attention_heads 14",
    ),
    (
        BuildOptions(ModelOptions(1, Quantization.NVFP4)),
        QWEN_14B,
        QWEN_HALF_B,
        "--quantization: nvfp4 is not documented for a qwen model: choose one of none, fp8",
    ),
    (
        BuildOptions(draft=ModelOptions(1, Quantization.GPTQ)),
        LLAMA_8B,
        LLAMA_1B,
        "--draft-quantization: gptq needs a checkpoint whose quantization_config",
    ),
    (BuildOptions(), LLAMA_8B | GPTQ, LLAMA_1B, "quant_method is 'gptq': choose gptq"),
    (
        BuildOptions(ModelOptions(1, Quantization.GPTQ)),
        LLAMA_8B | {"quantization_config": {"quant_method": "gptq", "desc_act": True}},
        LLAMA_1B,
        "quantization_config.desc_act: the target",
    ),
    (
        BuildOptions(ModelOptions(1, Quantization.NONE, KvCacheDtype.FP8)),
        QWEN_14B,
        QWEN_HALF_B,
        "--kv-cache-dtype: fp8 cannot be combined with none for a qwen model",
    ),
    (
        BuildOptions(ModelOptions(1, Quantization.FP8, KvCacheDtype.INT8)),
        LLAMA_8B,
        LLAMA_1B,
        "choose one of auto, fp8",
    ),
    (
        BuildOptions(ModelOptions(8, Quantization.INT4_AWQ)),
        QWEN_14B,
        QWEN_HALF_B,
        "intermediate_size 13824 over 8 ranks is not a multiple",
    ),
    (BuildOptions(max_draft_len=0), LLAMA_8B, LLAMA_1B, "--max-draft-len: got 0, must be in 1"),
    (BuildOptions(max_draft_len=65), LLAMA_8B, LLAMA_1B, "--max-draft-len: got 65"),
    (BuildOptions(max_batch_size=0), LLAMA_8B, LLAMA_1B, "--max-batch-size: got 0"),
    (
        BuildOptions(max_context_len=40000),
        QWEN_14B,
        QWEN_HALF_B,
        "--max-context-len: got 40000, must be in 2..32768",
    ),
    (
        BuildOptions(max_context_len=4096, max_num_tokens=4100),
        LLAMA_8B,
        LLAMA_1B,
        "--max-num-tokens: got 4100, must be in 4103..",
    ),
    (BuildOptions(), LLAMA_8B | {"vocab_size": 2}, LLAMA_1B, "vocab_size: the target"),
]


@pytest.mark.parametrize(("options", "target", "draft", "sentence"), REFUSED)
def test_what_cannot_be_built_is_refused(
    tmp_path: Path,
    options: BuildOptions,
    target: dict[str, Any],
    draft: dict[str, Any],
    sentence: str,
) -> None:
    with pytest.raises(BuildError) as caught:
        plan_for(tmp_path, options, target, draft)
    assert sentence in str(caught.value)


def test_a_draft_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    target = make_model(tmp_path / "T", LLAMA_8B)
    draft = make_model(tmp_path / "D", LLAMA_1B, tokens=("a", "c"))
    with pytest.raises(BuildError, match="token id 1 is 'b', and 'c' in the draft's"):
        make_plan(target, draft, tmp_path / "out", BuildOptions())


@pytest.mark.parametrize("out", ["T", "T/engines", "."])
def test_an_output_that_would_empty_a_model_is_refused(tmp_path: Path, out: str) -> None:
    with pytest.raises(BuildError, match="must not contain"):
        plan_for_out(tmp_path, out)
    assert (tmp_path / "T" / "config.json").is_file()


def plan_for_out(tmp_path: Path, out: str) -> Plan:
    target = make_model(tmp_path / "T", LLAMA_8B)
    return make_plan(target, make_model(tmp_path / "D", LLAMA_1B), tmp_path / out, BuildOptions())
