"""Names of models on the hub: told from paths, the GGUF file that they mean, the draft that they
suggest, and the name under which a model is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import few_fields, write_gguf
from hub_models import TINY, config_of, found
from local_models import make_model

from smartspec_cli.commands.serve import suggested_draft
from smartspec_launch.hub import hub_name
from smartspec_launch.hub_files import gguf_files
from smartspec_launch.models import with_local_models
from smartspec_launch.paths import hub_names, name_of, with_absolute_paths
from smartspec_py.engines.checkpoints.checks import ModelError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", ("Qwen/Qwen2.5-1.5B-Instruct", None, None)),
        ("a/b@refs/pr/1", ("a/b", "refs/pr/1", None)),
        ("a/b-GGUF:Q4_K_M", ("a/b-GGUF", None, "Q4_K_M")),
        ("a/b@v1:m-Q8_0.gguf", ("a/b", "v1", "m-Q8_0.gguf")),
        *((path, None) for path in ("model", "./a/b", "../a", "/a/b", "a/b/c", "a/b:", "~/a", "")),
    ],
)
def test_names_are_told_from_paths(text: str, parts: tuple[str | None, ...] | None) -> None:
    name = hub_name(text)
    assert (name and (name.repository, name.revision, name.file)) == parts


def test_a_path_that_exists_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "acme" / "target").mkdir(parents=True)
    config = config_of(model="acme/target", draft="acme/draft", lora={"sql": "acme/sql"})
    assert {*hub_names(config, tmp_path)} == {"draft", "lora.sql"}
    paths = with_absolute_paths(config, tmp_path).engine.paths()
    assert paths == {
        "model": str(tmp_path / "acme" / "target"),
        "draft": "acme/draft",
        "lora.sql": "acme/sql",
    }


PARTS = ("m-fp16-00001-of-00002.gguf", "m-fp16-00002-of-00002.gguf")
GGUF = (
    "m-q4_k_m.gguf",
    "m-Q8_0.gguf",
    "m-UD-Q8_0.gguf",
    "mmproj-m-Q8_0.gguf",
    *PARTS,
    "BF16/m-BF16.gguf",
    "README.md",
)


@pytest.mark.parametrize(
    ("name", "files", "chosen"),
    [
        ("a/b", GGUF, "m-q4_k_m.gguf"),
        ("a/b:Q4_K_M", GGUF, "m-q4_k_m.gguf"),
        ("a/b:q8_0", GGUF, "m-Q8_0.gguf"),
        ("a/b:UD-Q8_0", GGUF, "m-UD-Q8_0.gguf"),
        ("a/b:m-Q8_0.gguf", GGUF, "m-Q8_0.gguf"),
        ("a/b:BF16", GGUF, "BF16/m-BF16.gguf"),
        ("a/b", ("only-Q5_0.gguf", "mmproj-Q8_0.gguf"), "only-Q5_0.gguf"),
        *((name, GGUF, PARTS) for name in ("a/b:FP16", *(f"a/b:{part}" for part in PARTS))),
        ("a/b", PARTS, PARTS),
        ("a/b:m-fp16.gguf", PARTS, PARTS),
    ],
)
def test_the_gguf_file_of_a_name(
    name: str, files: tuple[str, ...], chosen: str | tuple[str, ...]
) -> None:
    parsed = hub_name(name)
    assert parsed is not None
    assert gguf_files(parsed, files) == ([chosen] if isinstance(chosen, str) else [*chosen])


@pytest.mark.parametrize(
    ("name", "files", "sentence"),
    [
        ("a/b:FP16", PARTS[:1], "a/b:FP16 lacks m-fp16-00002-of-00002.gguf: choose another"),
        ("a/b:Q4_K", GGUF, "write a/b:QUANTISATION with one of BF16, FP16, Q4_K_M, Q8_0, UD-Q8_0"),
        ("a/b:Q8_0", ("x-Q8_0.gguf", "y-Q8_0.gguf"), "with one of x-Q8_0.gguf, y-Q8_0.gguf"),
        ("a/b", ("x-Q8_0.gguf", "x-Q6_K.gguf"), "a/b names 0 GGUF files: write a/b:QUANTISATION"),
        ("a/b:Q8_0", ("model.safetensors",), "a/b:Q8_0 has no GGUF file: leave out :Q8_0, or use"),
    ],
)
def test_gguf_files_that_are_not_served(name: str, files: tuple[str, ...], sentence: str) -> None:
    parsed = hub_name(name)
    assert parsed is not None
    with pytest.raises(ModelError) as caught:
        gguf_files(parsed, files)
    assert sentence in str(caught.value)


def test_drafts_of_families() -> None:
    for model, draft in (
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"),
        ("Qwen/Qwen3-8B@main", "Qwen/Qwen3-0.6B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("google/gemma-2-9b-it", "google/gemma-2-2b-it"),
        ("google/gemma-3-4b-it", "google/gemma-3-270m-it"),
        ("Qwen/Qwen2.5-0.5B-Instruct", None),
        ("Qwen/Qwen2.5-VL-7B-Instruct", None),
        ("Qwen/Qwen3-30B-A3B", None),
        ("path/to/Qwen2.5-7B-Instruct", None),
    ):
        config = config_of(model="model").model_copy(update={"served_model_name": [model]})
        assert suggested_draft(config) == draft, model
    with_heads = config_of(model="m", heads="h").model_copy(
        update={"served_model_name": ["Qwen/Qwen2.5-7B-Instruct"]}
    )
    assert suggested_draft(with_heads) is None


def test_the_default_name_is_what_a_person_calls_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or a file, not what it becomes in a cache; see the other tests for the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "own.gguf", make_model("qwen3"), few_fields(104))
    write_gguf(tmp_path / "two.gguf", make_model("qwen3"), few_fields(104), part_len=20)
    part = tmp_path / "two-00002-of-00002.gguf"
    named = (TINY / "target", "target"), (tmp_path / "own.gguf", "own"), (part, "two")
    for path, name in named:
        assert found(model=str(path)).served_model_name == [name]
    given = config_of(model=str(TINY / "target")).model_copy(update={"served_model_name": ["x"]})
    assert with_local_models(given, print).served_model_name == ["x"]
    snapshot = Path("/hf/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0123abcd")
    assert [name_of(path) for path in (snapshot, TINY / "draft")] == ["Qwen/Qwen2.5-0.5B", "draft"]
