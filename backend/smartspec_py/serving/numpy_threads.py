"""Keeps NumPy's own threads off the cores that passes and simulations run on."""

from __future__ import annotations

from functools import cache

from threadpoolctl import ThreadpoolController


@cache
def keep_numpy_in_one_thread() -> None:
    """From now on NumPy computes in the thread that calls it, in all of this process.

    A solved system of ten equations wakes the threads of NumPy's OpenBLAS, which then spin for more
    work longer than a step takes: with a step every 25 ms they never slept, and pushed passes off
    their cores 300 times a second. Another library's OpenBLAS, as PyTorch's on ARM, stays as it is.
    """
    controller = ThreadpoolController()
    of_numpy = [path for lib in controller.lib_controllers if "numpy" in (path := lib.filepath)]
    controller.select(filepath=of_numpy).limit(limits=1)
