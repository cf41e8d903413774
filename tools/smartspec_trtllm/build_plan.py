"""The commands that build two engines from two Hugging Face directories. Runs no command.

The flags are those that TensorRT-LLM 1.2.1 documents. docs/tensorrt-llm/build-engines.md explains
each.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smartspec_py.engines.trtllm.engine_config import Role
from smartspec_trtllm.build_models import BuildError, HfModel, check_tp, read_model
from smartspec_trtllm.build_quantization import (
    FOR_EXTERNAL_DRAFTS,
    KvCacheDtype,
    Quantization,
    Tool,
    checkpoint_flags,
)
from smartspec_trtllm.build_tokenizer import (
    TokenizerError,
    difference,
    token_ids,
    tokenizer_files,
)

MAX_DRAFT_LEN = 64
"""The same limit as limits.max_draft_len in engine.json."""

WHOLE_SEQUENCES = 8
"""With the default of max_num_tokens, this many of the longest verifications fit an iteration."""

MIN_NUM_TOKENS, MOST_NUM_TOKENS = 8192, 65536
"""The default of trtllm-build, and an upper bound, as activations need memory for every token."""

TOKENS_PER_BLOCK = 64
"""Twice the default of trtllm-build. Each verification looks up all blocks of its text, and parts
of blocks are reused too. So larger blocks halve this work and lose no reuse."""

ALIGNMENT = 64
"""max_num_tokens is rounded up to a multiple of this."""


@dataclass(frozen=True)
class ModelOptions:
    """Options of one of the two models. tp: tensor parallel ranks."""

    tp: int = 1
    quantization: Quantization = Quantization.NONE
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO


@dataclass(frozen=True)
class BuildOptions:
    """Lengths are in tokens. max_num_tokens: None means `default_max_num_tokens`."""

    target: ModelOptions = ModelOptions()
    draft: ModelOptions = ModelOptions()
    dtype: str = "auto"
    max_context_len: int = 4096
    max_draft_len: int = 7
    max_batch_size: int = 64
    max_num_tokens: int | None = None
    calib_dataset: str | None = None
    examples: Path = Path("/app/examples")


@dataclass(frozen=True)
class Step:
    """A command. inputs: directories with files that affect the result. output: its output
    directory. expected: files that must exist there, not empty, after success."""

    name: str
    command: tuple[str, ...]
    inputs: tuple[Path, ...]
    output: Path
    expected: tuple[str, ...]

    @property
    def shown(self) -> str:
        return shlex.join(self.command)


@dataclass(frozen=True)
class Plan:
    """steps: in order. notes: hints for the user. num_tokens: token ids of the tokenizer."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    num_tokens: int


def default_max_num_tokens(max_context_len: int, max_draft_len: int, max_batch_size: int) -> int:
    """Tokens of an iteration.

    The scheduler of 1.x counts a verification with its whole text and drafts, cached or not. So the
    default of trtllm-build would allow only one or two long sequences per iteration. This default
    has room for `WHOLE_SEQUENCES` of the longest sequences, or for more shorter ones. It is at most
    `MOST_NUM_TOKENS`, but always enough for one sequence.
    """
    verification = max_context_len + max_draft_len
    useful = min(max_batch_size, WHOLE_SEQUENCES) * verification
    tokens = max(min(useful, MOST_NUM_TOKENS), MIN_NUM_TOKENS, verification)
    return -(-tokens // ALIGNMENT) * ALIGNMENT


def make_plan(target_dir: Path, draft_dir: Path, out: Path, options: BuildOptions) -> Plan:
    """Raises BuildError if models or options do not fit together; nothing has run then."""
    target, draft = read_model(Role.TARGET, target_dir), read_model(Role.DRAFT, draft_dir)
    _check_places(target_dir, draft_dir, out)
    _check_lengths(target, draft, options)
    num_tokens = _check_vocabularies(target, draft)
    steps = (
        *_model_steps(target, options.target, options, out),
        *_model_steps(draft, options.draft, options, out),
        _tokenizer_step(target_dir, out),
    )
    return Plan(steps, tuple(_notes(target, draft, options)), num_tokens)


def _check_places(target_dir: Path, draft_dir: Path, out: Path) -> None:
    """Check that output and models do not overlap, because a step empties its output first."""
    whole = out.resolve()
    for role, folder in ((Role.TARGET, target_dir), (Role.DRAFT, draft_dir)):
        source = folder.resolve()
        if source.is_relative_to(whole) or whole.is_relative_to(source):
            raise BuildError(
                f"OUT: {out} must not contain the {role} {folder} or be inside it: choose another "
                "directory"
            )


def _check_lengths(target: HfModel, draft: HfModel, options: BuildOptions) -> None:
    _check_range("--max-draft-len", options.max_draft_len, 1, MAX_DRAFT_LEN)
    _check_range("--max-batch-size", options.max_batch_size, 1, 2048)
    longest = min(target.max_position_embeddings, draft.max_position_embeddings)
    why = " (max_position_embeddings of target and draft)"
    _check_range("--max-context-len", options.max_context_len, 2, longest, why)
    if options.max_num_tokens is not None:
        least = options.max_context_len + options.max_draft_len
        why = ": one verification of the longest sequence counts in full"
        _check_range("--max-num-tokens", options.max_num_tokens, least, 2**20, why)


def _check_range(name: str, value: int, low: int, high: int, why: str = "") -> None:
    if not low <= value <= high:
        raise BuildError(f"{name}: got {value}, must be in {low}..{high}{why}")


def _check_vocabularies(target: HfModel, draft: HfModel) -> int:
    """The number of token ids; each id must mean the same token in both models."""
    try:
        ours, theirs = token_ids(target.folder), token_ids(draft.folder)
    except TokenizerError as error:
        raise BuildError(str(error)) from error
    other = difference(ours, theirs)
    if other:
        raise BuildError(
            f"tokenizer.json: {target.folder} and {draft.folder} differ, {other}: choose a draft "
            "that was trained with the target's tokenizer"
        )
    num_tokens = max(ours.values()) + 1
    for model in (target, draft):
        if model.vocab_size < num_tokens:
            raise BuildError(
                f"vocab_size: the {model.role} {model.folder} has {model.vocab_size}, less than "
                f"the {num_tokens} ids of the tokenizer: use the tokenizer it was trained with"
            )
    return num_tokens


def _model_steps(
    model: HfModel, own: ModelOptions, options: BuildOptions, out: Path
) -> Iterator[Step]:
    check_tp(model, own.tp)
    checkpoint, engine = out / "checkpoints" / model.role, out / model.role
    command = _checkpoint_command(model, own, options, checkpoint)
    weights = tuple(f"rank{rank}.safetensors" for rank in range(own.tp))
    yield Step(
        f"convert-{model.role}", command, (model.folder,), checkpoint, ("config.json", *weights)
    )
    command = _engine_command(model, own, options, checkpoint, engine)
    ranks = tuple(f"rank{rank}.engine" for rank in range(own.tp))
    yield Step(f"build-{model.role}", command, (checkpoint,), engine, ("config.json", *ranks))


def _checkpoint_command(
    model: HfModel, own: ModelOptions, options: BuildOptions, checkpoint: Path
) -> tuple[str, ...]:
    tool, flags = checkpoint_flags(model, own.quantization, own.kv_cache_dtype, own.tp)
    scripts = {
        Tool.CONVERT: options.examples / "models" / "core" / model.family / "convert_checkpoint.py",
        Tool.QUANTIZE: options.examples / "quantization" / "quantize.py",
    }
    common = (
        *("--model_dir", str(model.folder), "--output_dir", str(checkpoint)),
        *("--dtype", options.dtype, "--tp_size", str(own.tp)),
    )
    calibrates = tool is Tool.QUANTIZE or {"--smoothquant", "--int8_kv_cache"} & set(flags)
    texts = ("--calib_dataset", options.calib_dataset) if options.calib_dataset else ()
    return ("python3", str(scripts[tool]), *common, *flags, *(texts if calibrates else ()))


def _engine_command(
    model: HfModel, own: ModelOptions, options: BuildOptions, checkpoint: Path, engine: Path
) -> tuple[str, ...]:
    is_target = model.role is Role.TARGET
    length = options.max_context_len + (options.max_draft_len if is_target else 0)
    num_tokens = options.max_num_tokens or default_max_num_tokens(
        options.max_context_len, options.max_draft_len, options.max_batch_size
    )
    flags = {
        "--checkpoint_dir": checkpoint,
        "--output_dir": engine,
        "--max_batch_size": options.max_batch_size,
        "--max_input_len": length,
        "--max_seq_len": length,
        "--max_num_tokens": num_tokens,
        "--max_beam_width": 1,
        "--kv_cache_type": "paged",
        "--tokens_per_block": TOKENS_PER_BLOCK,
        "--remove_input_padding": "enable",
        "--context_fmha": "enable",
        "--use_paged_context_fmha": "enable",
        "--gpt_attention_plugin": "auto",
        "--gemm_plugin": "disable" if own.quantization is Quantization.FP8 else "auto",
        "--workers": own.tp,
        "--output_timing_cache": engine.parent / f"timing-{model.role}.cache",
    }
    if is_target:
        flags["--speculative_decoding_mode"] = "draft_tokens_external"
        flags["--max_draft_len"] = options.max_draft_len
    return ("trtllm-build", *(str(word) for pair in flags.items() for word in pair))


def _tokenizer_step(target_dir: Path, out: Path) -> Step:
    files = tokenizer_files(target_dir)
    output = out / "tokenizer"
    command = ("install", "-D", "-m", "644", "-t", str(output), *map(str, files))
    return Step("tokenizer", command, (target_dir,), output, tuple(file.name for file in files))


def _notes(target: HfModel, draft: HfModel, options: BuildOptions) -> Iterator[str]:
    for model, own in ((target, options.target), (draft, options.draft)):
        if own.quantization not in FOR_EXTERNAL_DRAFTS:
            yield (
                f"{own.quantization} of the {model.role}: TensorRT-LLM lists FP16, BF16 and FP8 "
                "for external drafts; others may work"
            )
    if target.vocab_size != draft.vocab_size:
        yield (
            f"vocab_size {target.vocab_size} and {draft.vocab_size} differ in padding that the "
            "tokenizer does not use: drafts can be accepted by tokens, not by logits "
            "(TensorRT-LLM issue 2789)"
        )
    if max(options.target.tp, options.draft.tp) > 1:
        yield (
            "more than one rank: serving needs orchestrator mode with device ids for each engine"
        )
