"""Progress of a download where there is no terminal, as in the log of a container: there
huggingface_hub shows no bars."""

from __future__ import annotations

import sys
from typing import Any

from huggingface_hub import constants
from tqdm import tqdm  # type: ignore[import-untyped]

from smartspec_py.engines.phases import size_text

LINE_EVERY_S = 5.0


class Lines(tqdm):  # type: ignore[misc]
    """A line every LINE_EVERY_S."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        own = {"disable": False, "mininterval": LINE_EVERY_S, "miniters": 1}
        super().__init__(*args, **settings | own)

    def display(self, *args: Any, **settings: Any) -> None:
        if self.n:
            done, size = size_text(int(self.n)), size_text(int(self.total or 0))
            print(f"  {done} of {size}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Without the last line of a bar."""
        self.disable = True


def bar_class() -> type[Lines] | None:
    """None: huggingface_hub's own bars, or none if its environment says so."""
    is_shown = sys.stderr.isatty() or constants.HF_HUB_DISABLE_PROGRESS_BARS
    return None if is_shown else Lines
