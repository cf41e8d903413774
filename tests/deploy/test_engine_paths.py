"""One place for TensorRT-LLM engines: what builds, serves and mounts them agrees."""

from __future__ import annotations

import json
from pathlib import Path

import entrypoint
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
MOUNT = "/models"
ENGINES = "/models/engines"
ENGINE_JSON = REPOSITORY / "deploy/model_repository/smartspec/1/engine.json"
EXAMPLES = sorted((REPOSITORY / "engines_build/examples").glob("*.sh"))


def test_engine_json_names_what_a_build_writes() -> None:
    """tests/trtllm/test_build_engines.py tests what a build writes to OUT."""
    engine = json.loads(ENGINE_JSON.read_text())["engine"]
    assert {key: engine[key] for key in ("target", "draft", "tokenizer")} == {
        key: f"{ENGINES}/{key}" for key in ("target", "draft", "tokenizer")
    }


def test_examples_build_there() -> None:
    assert len(EXAMPLES) >= 4
    for path in EXAMPLES:
        assert f'"${{OUT:-{ENGINES}}}"' in path.read_text(), path


def test_compose_and_chart_mount_it_and_the_entry_looks_there() -> None:
    compose = yaml.safe_load((REPOSITORY / "deploy/compose/compose.yaml").read_text())
    mounts = compose["services"]["smartspec-gpu"]["volumes"]
    assert any(mount.split("}")[-1].split(":")[1] == MOUNT for mount in mounts)
    template = (REPOSITORY / "deploy/helm/smartspec/templates/_pods.tpl").read_text()
    assert f"name: models, mountPath: {MOUNT}, readOnly: true" in template
    assert f"{MOUNT}/smartspec/1/engine.json" == entrypoint.DEFAULT_ENGINE_JSON
