"""Configurations of the servers that the live tests start."""

from __future__ import annotations

from pathlib import Path

from smartspec_py.serving.config import FakeEngineConfig, LimitsConfig, ServerConfig

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"


def fake_config(
    step_s: float = 0.0, fail_at_step: int | None = None, limits: LimitsConfig | None = None
) -> ServerConfig:
    engine = FakeEngineConfig(
        kind="fake", tokenizer=str(TINY / "target"), step_s=step_s, fail_at_step=fail_at_step
    )
    return ServerConfig(engine=engine, limits=limits or LimitsConfig())
