"""Settings of the whole suite."""

from __future__ import annotations

import os

# Before torch is imported: more threads than free cores make small passes many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
