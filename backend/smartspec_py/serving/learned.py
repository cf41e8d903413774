"""Stores a server's learned estimates beside the profile at a clean stop, for the next start.

Each profile has its own file, so other models, machines or library versions use other files. The
weight of old evidence decays: half of it is left after one day.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from smartspec_py.serving.loop import StepLoop
from smartspec_py.serving.profile import write_json

logger = logging.getLogger(__name__)

LEARNED_VERSION = 3
"""Raise it when the meaning of a stored number changes."""

HALF_LIFE_S = 86_400.0

MOST_KEPT = 0.5
"""Largest share of the evidence that is kept: texts and load may change with the restart."""


def store_learned(loop: StepLoop, profile_path: Path) -> None:
    """Store the estimates of a loop that has ended. A write error is logged, not raised."""
    path = learned_path(profile_path)
    document = {"version": LEARNED_VERSION, "time_s": time.time(), "learned": loop.state()}
    try:
        write_json(path, document)
    except OSError as error:
        logger.warning("the learned estimates cannot be stored: %s", error)
    else:
        logger.info("the learned estimates are stored in %s", path)


def restore_learned(loop: StepLoop, profile_path: Path) -> bool:
    """Restore the estimates into a loop that has not started; whether that succeeded.

    If the file cannot be used, this is logged and the loop starts with the profile only.
    """
    path = learned_path(profile_path)
    try:
        document: dict[str, Any] = json.loads(
            path.read_text(encoding="utf-8"), parse_constant=_refuse
        )
        if document["version"] != LEARNED_VERSION:
            raise ValueError(f"version {document['version']}, not {LEARNED_VERSION}")
        age_s = max(0.0, time.time() - document["time_s"])
        loop.restore(document["learned"], min(MOST_KEPT, 0.5 ** (age_s / HALF_LIFE_S)))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be used (%s): learning starts again", path, error)
        return False
    logger.info("restored the estimates that were stored %.0f minutes ago", age_s / 60)
    return True


def _refuse(constant: str) -> None:
    """Reject NaN and infinities, which Python's JSON parser accepts. They would spread to all
    estimates."""
    raise ValueError(f"{constant} is not a finite number")


def learned_path(profile_path: Path) -> Path:
    return profile_path.with_name(f"learned-{profile_path.name.removeprefix('profile-')}")
