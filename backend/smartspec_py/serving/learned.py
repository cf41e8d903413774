"""What a server has learned, kept beside the profile from an orderly stop to the next start.

The file belongs to the profile of the same name: for other models, another machine, other libraries
there is another one. What is old counts for less: of the evidence half is left after a day.
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
"""Of the evidence, however young: texts and load may have changed with the restart."""


def store_learned(loop: StepLoop, profile_path: Path) -> None:
    """Of a loop that has ended. What cannot be written is logged, and nothing is raised."""
    path = learned_path(profile_path)
    document = {"version": LEARNED_VERSION, "time_s": time.time(), "learned": loop.state()}
    try:
        write_json(path, document)
    except OSError as error:
        logger.warning("what was learned is not kept: %s", error)
    else:
        logger.info("what was learned is kept in %s", path)


def restore_learned(loop: StepLoop, profile_path: Path) -> bool:
    """Into a loop that has not begun. Whether there was any; a file that cannot be used is logged,
    and the loop begins with the profile alone."""
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
        logger.warning("%s cannot be used (%s): learning anew", path, error)
        return False
    logger.info("continuing with what was learned until %.0f minutes ago", age_s / 60)
    return True


def _refuse(constant: str) -> None:
    """NaN and infinities, which JSON does not have and Python reads: estimates would all be NaN."""
    raise ValueError(f"{constant} is no number to continue with")


def learned_path(profile_path: Path) -> Path:
    return profile_path.with_name(f"learned-{profile_path.name.removeprefix('profile-')}")
