"""Checks two Hugging Face models before build_engines.sh runs. Never run on a GPU machine.

    check_models.py TARGET DRAFT MAX_CONTEXT_LEN TP DRAFT_TP

Prints the folder of convert_checkpoint.py for each model, or one sentence on what is wrong. It uses
only the standard library, because NVIDIA's container lacks this project's packages.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

FAMILIES = {"llama": "llama", "qwen2": "qwen"}
"""From `model_type` in config.json to the folder in TensorRT-LLM's examples/models/core."""

SHARED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Each rank has an equal share of these."""


def main(target: Path, draft: Path, context_len: int, tp: int, draft_tp: int) -> None:
    families = []
    for folder, ranks, option in ((target, tp, "--tp"), (draft, draft_tp, "--draft-tp")):
        config = read(folder / "config.json")
        model_type = config.get("model_type")
        if model_type not in FAMILIES:
            fail(f"{folder}: model_type is {model_type!r}, must be one of {', '.join(FAMILIES)}")
        for key in SHARED:
            if config.get(key, ranks) % ranks:
                fail(f"{option}: {ranks} does not divide {key} {config[key]} of {folder}")
        longest = config.get("max_position_embeddings", context_len)
        if context_len > longest:
            fail(f"--max-context-len: got {context_len}, must be at most {longest}, as of {folder}")
        families.append(FAMILIES[model_type])
    ours, theirs = token_ids(target), token_ids(draft)
    if ours != theirs:
        number = min(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        fail(
            f"tokenizer.json: token id {number} is {ours.get(number)!r} in {target} and "
            f"{theirs.get(number)!r} in {draft}: choose a draft with the target's tokenizer"
        )
    print(*families)


def token_ids(folder: Path) -> dict[int, str]:
    """All tokens of tokenizer.json by id, including added tokens."""
    document = read(folder / "tokenizer.json")
    vocab = document["model"]["vocab"]
    is_list = isinstance(vocab, list)  # of (token, score), in the order of ids
    ids = (
        {n: row[0] for n, row in enumerate(vocab)} if is_list else {n: t for t, n in vocab.items()}
    )
    return ids | {added["id"]: added["content"] for added in document["added_tokens"]}


def read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be read ({error}): give a local Hugging Face model directory")
    return document


def fail(message: str) -> NoReturn:
    sys.exit(f"build_engines: {message}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("target", "draft"):
        parser.add_argument(name, type=Path, help="directory of the model")
    for name in ("context_len", "tp", "draft_tp"):
        parser.add_argument(name, type=int, help=f"--{name.replace('_', '-')} of build_engines.sh")
    main(**vars(parser.parse_args()))
