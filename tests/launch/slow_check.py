"""A check of models that takes long, in a module that a new process imports quickly."""

import time
from pathlib import Path


def slow_check(_: object, folders: dict[str, Path]) -> tuple[float, int]:
    """The model is a pipe: the check writes one byte when it begins, and one when it ends."""
    with folders["model"].open("wb", buffering=0) as pipe:
        pipe.write(b"b")
        time.sleep(20.0)
        pipe.write(b"e")
    return 0.0, 0
