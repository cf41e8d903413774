"""Fixtures that several tests of engines need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def without_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel needs a GPU. `test_ragged_attention` compares it with the reference."""
    import ragged_reference

    from smartspec_py.engines.runtimes.pytorch import graphs

    if "gpu" not in request.keywords:
        monkeypatch.setattr(graphs, "kernels", ragged_reference.kernels)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are derived from models are written for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
