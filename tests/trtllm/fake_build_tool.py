"""Stands in for convert_checkpoint.py and trtllm-build: writes what the real ones would.

Environment: CALLS names a file that gets a line for each call. BREAK is `PLACE HOW`; PLACE is the
end of the output's path, HOW is fail (with exit code 3), forget (the ranks), unfit (no
drafts in the engine), or die (half-way, with the process that called).
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    out = Path(flags["--output_dir"])
    out.mkdir(parents=True)
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{Path(sys.argv[0]).name} {out.name}\n")
    place, _, how = os.environ["BREAK"].partition(" ")
    how = how if place == f"{out.parent.name}/{out.name}" else ""
    if how == "fail":
        print("out of memory")
        sys.exit(3)
    config, suffix = (
        (engine_config(flags), "engine")
        if "--checkpoint_dir" in flags
        else (checkpoint_config(flags), "safetensors")
    )
    if how == "unfit":
        config["build_config"]["max_draft_len"] = 0
    (out / "config.json").write_text(json.dumps(config))
    if how == "forget":
        return
    (out / f"rank0.{suffix}").write_bytes(b"half")
    if how == "die":
        os.kill(os.getppid(), signal.SIGKILL)
        return
    pretrained = config.get("pretrained_config", config)
    for rank in range(pretrained["mapping"]["tp_size"]):
        (out / f"rank{rank}.{suffix}").write_bytes(b"complete")


def checkpoint_config(flags: dict[str, str]) -> dict[str, Any]:
    model = json.loads((Path(flags["--model_dir"]) / "config.json").read_text())
    mapping = {"tp_size": int(flags["--tp_size"])}
    return {"vocab_size": model["vocab_size"], "mapping": mapping}


def engine_config(flags: dict[str, str]) -> dict[str, Any]:
    """Only what the flags say: a flag that is not given is missing."""
    checkpoint = json.loads((Path(flags["--checkpoint_dir"]) / "config.json").read_text())
    switches = ("remove_input_padding", "context_fmha", "use_paged_context_fmha")
    modes = {"draft_tokens_external": 2}
    build = {name[2:]: int(value) for name, value in flags.items() if value.isdigit()} | {
        "kv_cache_type": flags["--kv_cache_type"].upper(),
        "speculative_decoding_mode": modes.get(flags.get("--speculative_decoding_mode", ""), 1),
        "gather_context_logits": False,
        "plugin_config": {name: flags[f"--{name}"] == "enable" for name in switches}
        | {"gpt_attention_plugin": flags["--gpt_attention_plugin"]},
    }
    return {"version": "1.2.1", "pretrained_config": checkpoint, "build_config": build}


if __name__ == "__main__":
    main()
