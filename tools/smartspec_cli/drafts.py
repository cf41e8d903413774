"""Draft models for well-known families of the Hugging Face hub: the smallest model with the same
tokens."""

from __future__ import annotations

import re

from smartspec_launch.hub import hub_name

SMALLEST = {
    r"(.+/Qwen2\.5-(?:Coder-)?)(?:1\.5|3|7|14|32|72)B((?:-Instruct)?(?:-GGUF)?)": r"\g<1>0.5B\2",
    r"(Qwen/Qwen3-)(?:1\.7|4|8|14|32)B(-Base|-GGUF|)": r"\g<1>0.6B\2",
    r"(meta-llama/Llama-3\.)(?:1-8B|1-70B|2-3B|3-70B)(-Instruct|)": r"\g<1>2-1B\2",
    r"(HuggingFaceTB/SmolLM2-)(?:360M|1\.7B)(-Instruct|)": r"\g<1>135M\2",
    r"(google/gemma-3-)(?:1|4|12|27)b-it": r"\g<1>270m-it",
    r"(google/gemma-2-)(?:9|27)b(-it|)": r"\g<1>2b\2",
}
"""By patterns of the larger models. Base models have another end token than chat models, so each
kind has its own draft. Whether the tokens are the same is checked again at each start."""


def draft_for(model: str) -> str | None:
    """The hub name of the smallest model of the family; None if the model is in none."""
    name = hub_name(model)
    for larger, smallest in SMALLEST.items():
        if name is not None and (found := re.fullmatch(larger, name.repository)):
            return found.expand(smallest)
    return None
