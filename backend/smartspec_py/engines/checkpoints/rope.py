"""Settings of rotary embeddings in the configs of Transformers 4 and 5.

Transformers 5 keeps them in `rope_parameters`, Transformers 4 in `rope_theta` and `rope_scaling`.
Transformers 4 ignores `rope_parameters` in files that Transformers 5 saved, without an error: the
model would compute with other angles. NVIDIA's TensorRT-LLM images have Transformers 4.57.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from smartspec_py.engines.checkpoints.checks import ModelError

IS_OLD = int(transformers.__version__.partition(".")[0]) < 5
"""Whether this is Transformers 4."""


def rope_of(config: Any) -> Mapping[str, Any]:
    """The settings in the form of Transformers 5, with `rope_type` and `rope_theta`."""
    if parameters := getattr(config, "rope_parameters", None):
        return dict(parameters)
    scaling = getattr(config, "rope_scaling", None) or {}
    return {"rope_type": "default", "rope_theta": config.rope_theta, **scaling}


def use_new_rope(config: Any, folder: Path) -> None:
    """Make Transformers 4 use `rope_parameters`, if the config has them. Raises ModelError."""
    new = getattr(config, "rope_parameters", None)
    if not new:
        return
    settings = dict(new)
    theta, factor = settings.pop("rope_theta", None), settings.pop("partial_rotary_factor", 1.0)
    if theta is None or factor != 1.0 or not hasattr(config, "rope_theta"):
        raise ModelError(
            f"{folder}: Transformers 5 saved config.json, and Transformers "
            f"{transformers.__version__} cannot use its rope_parameters ({new}): use the "
            "checkpoint as published, or Transformers 5"
        )
    config.rope_theta = theta
    config.rope_scaling = None if settings.get("rope_type", "default") == "default" else settings


def fix_longrope(config: Any, max_len: int) -> None:
    """Choose one list of factors of longrope for all requests: the long one if the served context
    is longer than that of the training. Transformers would choose by the longest request of a pass.
    """
    for settings in (getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")):
        if settings and settings.get("rope_type", settings.get("type")) == "longrope":
            trained = settings.get("original_max_position_embeddings")
            is_long = max_len > (trained or config.original_max_position_embeddings)
            factors = settings["long_factor" if is_long else "short_factor"]
            settings["long_factor"] = settings["short_factor"] = factors
