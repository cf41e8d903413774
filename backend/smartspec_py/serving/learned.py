"""Stores a server's learned estimates in the file of its profile, for the next start.

They are written at a clean stop, unless that profile proved to be wrong. So other models, machines
or library versions start without them.
The weight of old evidence decays: half of it is left after one day.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from smartspec_py.engines.profile import read_profile, write_json
from smartspec_py.serving.loop import StepLoop

logger = logging.getLogger(__name__)

LEARNED_VERSION = 7
"""Raise it when the meaning of a stored number changes."""

HALF_LIFE_S = 86_400.0

MOST_KEPT = 0.5
"""Largest share of the evidence that is kept: texts and load may change with the restart."""


def store_learned(loop: StepLoop, profile_path: Path) -> None:
    """Store the estimates of a loop that has ended. A write error is logged, not raised.

    If steps were much faster than the profile says, the profile goes instead.
    """
    if loop.controller.is_profile_slow:
        by_profile, _ = loop.controller.time_errors
        logger.warning(
            "the profile was measured on a busy machine: predicted step times were %.0f %% wrong. "
            "The next start measures again",
            100 * by_profile,
        )
        _remove(profile_path)
        return
    learned = {"version": LEARNED_VERSION, "time_s": time.time(), "state": loop.state()}
    try:
        write_json(profile_path, read_profile(profile_path) | {"learned": learned})
    except OSError as error:
        logger.warning("the learned estimates cannot be stored: %s", error)
    else:
        logger.info("the learned estimates are stored in %s", profile_path)


def _remove(profile_path: Path) -> None:
    try:
        profile_path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", profile_path, error)


def restore_learned(loop: StepLoop, profile_path: Path) -> bool:
    """Restore the estimates into a loop that has not started; whether that succeeded.

    If they cannot be used, this is logged and the loop starts with the profile only.
    """
    learned = read_profile(profile_path).get("learned")
    if learned is None:
        return False
    try:
        if learned["version"] != LEARNED_VERSION:
            raise ValueError(f"version {learned['version']}, not {LEARNED_VERSION}")
        age_s = max(0.0, time.time() - learned["time_s"])
        loop.restore(learned["state"], min(MOST_KEPT, 0.5 ** (age_s / HALF_LIFE_S)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s: learning starts again: %r", profile_path, error)
        return False
    logger.info("restored the estimates that were stored %.0f minutes ago", age_s / 60)
    return True
