"""Rotary settings of Transformers 4 and 5. `rope_theta` and `rope_scaling` are those of 4."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.rope import rope_of, use_new_rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0}


def old_config(**fields: Any) -> SimpleNamespace:
    """A config as Transformers 4 reads it: unknown fields become attributes too."""
    return SimpleNamespace(**{"rope_theta": 1e4, "rope_scaling": None, **fields})


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (old_config(), {"rope_type": "default", "rope_theta": 1e4}),
        (old_config(rope_scaling=LLAMA3), {**LLAMA3, "rope_theta": 1e4}),
        (
            SimpleNamespace(rope_parameters={**LLAMA3, "rope_theta": 5e5}),
            {**LLAMA3, "rope_theta": 5e5},
        ),
    ],
)
def test_both_forms_are_read(config: Any, found: dict[str, Any]) -> None:
    assert rope_of(config) == found


def test_a_published_checkpoint_has_the_same_settings_in_both() -> None:
    """In the form of Transformers 4, as Llama 3.1 is published."""
    scaling = {
        **LLAMA3,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig.from_dict({"rope_theta": 5e5, "rope_scaling": scaling})
    assert rope_of(config)["rope_theta"] == 5e5
    assert rope_of(config)["factor"] == 8.0


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, LLAMA3])
def test_transformers_4_computes_the_angles_of_a_new_file(scaling: dict[str, Any]) -> None:
    config = old_config(rope_parameters={**scaling, "rope_theta": 100.0})
    use_new_rope(config, Path("model"))
    assert config.rope_theta == 100.0
    assert config.rope_scaling == (LLAMA3 if scaling is LLAMA3 else None)


@pytest.mark.parametrize(
    "new",
    [
        {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
)
def test_what_transformers_4_cannot_express_is_refused(new: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"Transformers 5 saved config\.json"):
        use_new_rope(old_config(rope_parameters=new), Path("model"))
