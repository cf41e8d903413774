"""Models by their names on the Hugging Face hub: the real client against a stand-in of the hub."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from gguf_files import few_fields, write_gguf
from hub_stand_in import HubStandIn
from local_models import make_model
from slow_check import slow_check

from smartspec_cli.commands.serve import suggested_draft
from smartspec_launch import hub_check, models
from smartspec_launch.hub import hub_name
from smartspec_launch.hub_files import gguf_file
from smartspec_launch.interpreter import LaunchError
from smartspec_launch.models import READING, with_local_models
from smartspec_launch.paths import hub_names, name_of, with_absolute_paths
from smartspec_py.config import ServerConfig
from smartspec_py.defaults import ConfigError
from smartspec_py.engines.checkpoints.supported import ModelError

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"
SERVED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
NOT_SERVED = {
    "README.md": b"# Target",
    "modeling_target.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.safetensors": b"twice",
    "onnx/model.onnx": b"of another runtime",
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """The client reads its environment when it is imported, so its constants are loaded again."""
    from huggingface_hub import constants

    hub = HubStandIn()
    hub.add("acme/target", files_of(TINY / "target") | NOT_SERVED)
    hub.add("acme/draft", files_of(TINY / "draft"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with hub.served() as url, monkeypatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_ENDPOINT", url)
        patch.setenv("HF_HOME", str(tmp_path / "hf"))
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        importlib.reload(constants)
        yield hub
    importlib.reload(constants)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks in this process: another one imports PyTorch again."""

    monkeypatch.setattr(hub_check, "in_process", hub_check.check_settings)


def config_of(**engine: Any) -> ServerConfig:
    return ServerConfig.model_validate({"engine": {"kind": "local", **engine}})


def found(said: list[str] | None = None, **engine: Any) -> ServerConfig:
    return with_local_models(config_of(**engine), (said if said is not None else []).append)


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


@pytest.mark.usefixtures("quick")
def test_without_a_terminal_a_download_is_told_in_lines(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("smartspec_launch.hub_progress.LINE_EVERY_S", 0.0)
    found(model="acme/target")
    assert " MB of " not in capsys.readouterr().err, "HF_HUB_DISABLE_PROGRESS_BARS"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", None)
    found(model="acme/draft")
    assert capsys.readouterr().err.endswith("  1 MB of 1 MB\n")


def test_a_pair_is_fetched_once(
    hub: HubStandIn, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is served, and after the checks; redirects lead to another host without the token.
    The checks run in a process of their own, as they do for a person."""
    said: list[str] = []
    phases: list[str] = []

    def shown(text: str, after_s: float = 0.0) -> AbstractContextManager[None]:
        phases.append(text)
        return nullcontext()

    monkeypatch.setattr(models, "shown", shown)
    config = found(said, model="acme/target", draft="acme/draft")
    folder = Path(config.engine.paths()["model"])
    assert folder.parts[-3:-1] == ("models--acme--target", "snapshots")
    assert cache in folder.parents
    assert (
        folder.joinpath("model.safetensors").read_bytes()
        == (TINY / "target" / "model.safetensors").read_bytes()
    )
    wanted = sorted([*SERVED, "chat_template.jinja", "model.safetensors"])
    assert sorted(hub.fetched()) == sorted(wanted * 2)
    assert hub.fetched()[-2:] == ["model.safetensors"] * 2
    assert config.served_model_name == ["acme/target"]
    both = "acme/target and acme/draft"
    assert phases == [
        f"Looking up {both}",
        f"Checking {both} before the weights are fetched",
        READING,
    ]
    assert said[0].startswith(f"Fetching 4 MB to {cache}, where ")
    assert "; weights take at least 2 MB of memory, of which " in said[0]
    hub.requests.clear()
    assert found(said, model="acme/target", draft="acme/draft") == config
    assert hub.fetched() == []
    assert phases[3:] == [f"Looking up {both}", READING]
    assert len(said) == 1


@pytest.mark.usefixtures("quick")
def test_revisions(hub: HubStandIn) -> None:
    """A branch, a tag and a commit have their own folders."""
    older = files_of(TINY / "target") | {"generation_config.json": b'{"eos_token_id": 1}'}
    commit = hub.add("acme/target", older, "v1")
    for revision in ("v1", commit):
        folder = Path(found(model=f"acme/target@{revision}").engine.paths()["model"])
        assert folder.name == commit
        assert (folder / "generation_config.json").read_bytes() == b'{"eos_token_id": 1}'
    assert Path(found(model="acme/target").engine.paths()["model"]).name != commit
    with pytest.raises(
        ConfigError, match=r"^engine\.model: acme/target@v2 is no revision of acme/"
    ):
        found(model="acme/target@v2")


@pytest.mark.usefixtures("quick")
def test_a_broken_transfer_goes_on(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    hub.breaks = [1 << 30, 50_000]  # tokenizer.json, and then the weights
    folder = Path(found(model="acme/target").engine.paths()["model"])
    weights = (TINY / "target" / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == weights
    ranges = [range_ for _, path, range_, _ in hub.requests if path.endswith(".safetensors")]
    assert ranges == [None, None, "bytes=50000-"]  # HEAD, GET, GET


@pytest.mark.usefixtures("quick")
def test_a_transfer_that_stays_broken(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, and the next start fetches what is missing."""
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    hub.breaks = [1 << 30, *[0] * 20]
    sentence = (
        r"^engine\.model: acme/target cannot be fetched from http://127.* \(peer closed .*\): c"
    )
    with pytest.raises(LaunchError, match=sentence):
        found(model="acme/target")
    hub.breaks, hub.requests = [], []
    found(model="acme/target")
    assert hub.fetched() == ["model.safetensors"]


@pytest.mark.usefixtures("quick")
def test_gated_models(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("acme/target")
    with pytest.raises(
        ConfigError, match=r"acme/target is gated: accept its terms at http.*/acme/t"
    ):
        found(model="acme/target")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="refuses acme/target with status 401: set HF_TOKEN"):
        found(model="acme/target")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.requests.clear()
    found(model="acme/target")
    assert hub.fetched(".safetensors") == ["model.safetensors"]
    with_token = {path.split("/")[1]: has_token for _, path, _, has_token in hub.requests}
    assert (with_token["acme"], with_token["cdn"]) == (True, False)


@pytest.mark.parametrize("name", ["acme/targte", "models/mine", "acme/a..b"])
def test_a_misspelt_name(hub: HubStandIn, name: str) -> None:
    sentence = (
        rf"^engine\.draft: {name} is neither a path here nor a model of http://127.*: correct"
    )
    with pytest.raises(ConfigError, match=sentence):
        found(model=str(TINY / "target"), draft=name)
    assert hub.fetched() == []


@pytest.mark.usefixtures("quick")
def test_a_hub_that_cannot_be_asked(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy in the cache is served; without one, or with a part of it, one sentence."""
    from huggingface_hub import constants

    hub.status = 503
    with pytest.raises(
        LaunchError, match=r"acme/target cannot be fetched .* \(status 503\): check"
    ):
        found(model="acme/target")
    hub.status = 200
    config = found(model="acme/target")
    hub.status = 503
    said: list[str] = []
    assert found(said, model="acme/target") == config
    assert said[0] == "The hub cannot be asked: acme/target is taken from the cache"
    Path(config.engine.paths()["model"], "model.safetensors").unlink()
    with pytest.raises(
        LaunchError, match=r"acme/target cannot be fetched .* \(status 503\): check"
    ):
        found(model="acme/target")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        LaunchError, match=r"acme/draft cannot be fetched .* refused\): check the net"
    ):
        found(model="acme/draft")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        LaunchError, match=r"acme/draft cannot .* and HF_HUB_OFFLINE is set\): unset"
    ):
        found(model="acme/draft")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, r"the disk of .*/hub is full\): make room there, or set HF_HOME"),
        (
            errno.EROFS,
            r".*/hub: Read-only file system\): set HF_HOME to a folder that can be written",
        ),
    ],
)
def test_a_disk_that_takes_no_more(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, number: int, sentence: str
) -> None:
    from huggingface_hub import file_download

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_download, "http_get", fail)
    with pytest.raises(LaunchError, match=rf"^engine\.model: acme/target cannot .* \({sentence}"):
        found(model="acme/target")


def test_what_does_not_fit_is_not_fetched(
    hub: HubStandIn, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4-bit weights take a quarter of the file's bfloat16, and the tiny target is in float32."""
    size = (TINY / "target" / "model.safetensors").stat().st_size
    monkeypatch.setattr(hub_check, "free_disk", lambda: (cache, size - 1))
    with pytest.raises(ConfigError, match=r"acme/target needs 2 MB in .*/hub, where 2 MB are free"):
        found(model="acme/target")
    monkeypatch.setattr(hub_check, "free_disk", lambda: (cache, size))
    for weights, least in (("int4", size // 8), ("int8", size // 4), ("stored", size // 2)):
        answer = (hub_check.LEAST_BYTES[weights], least - 1)
        monkeypatch.setattr(hub_check, "in_process", lambda *_, answer=answer: answer)
        with pytest.raises(
            ConfigError, match=r"the weights of acme/target take at least .* of memory"
        ):
            found(model="acme/target", weights=weights)
    assert hub.fetched(".safetensors") == []


def test_ctrl_c_does_not_wait_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says when it begins, and would say when it ends."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    folders = {"model": Path(f"/proc/{os.getpid()}/fd/{write}")}
    monkeypatch.setattr(hub_check, "check_settings", slow_check)

    main = threading.get_ident()

    def interrupt() -> None:
        os.read(read, 1)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        hub_check.in_process(config_of(model="acme/target"), folders)
    thread.join()
    os.close(write)
    assert os.read(read, 1) == b"", "it went on"
    os.close(read)


@pytest.mark.usefixtures("quick")
def test_models_that_cannot_be_served_are_not_fetched(hub: HubStandIn) -> None:
    """The message has the name, and not a folder of the cache."""
    target = files_of(TINY / "target")
    config = json.loads(target["config.json"])
    other = json.loads(target["tokenizer.json"])
    other["model"]["merges"].reverse()
    hub.add("acme/t5", target | {"config.json": json.dumps(config | {"model_type": "t5"}).encode()})
    hub.add("acme/other", target | {"tokenizer.json": json.dumps(other).encode()})
    hub.add("acme/wordless", {name: target[name] for name in ("config.json", "model.safetensors")})
    hub.add("acme/pickled", {"config.json": target["config.json"], "model.pkl": b"x"})
    for engine, sentence in (
        ({"model": "acme/t5"}, r"^the target acme/t5 has the model_type t5 and "),
        ({"model": "acme/wordless"}, r"^the target acme/wordless has no tokenizer\.json: save"),
        ({"model": "acme/pickled"}, r"^engine\.model: acme/pickled has none of the files model\.s"),
        (
            {"model": str(TINY / "target"), "draft": "acme/other"},
            rf"^the tokenizers of the target {TINY}/target and the draft acme/other merge differ",
        ),
        (
            {"model": "acme/target", "lora": {"sql": "acme/draft"}},
            r"^engine\.lora\.sql: acme/draft has none of the files adapter_model\.safetensors: use",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            found(**engine)
    assert hub.fetched(".safetensors") == []


@pytest.mark.usefixtures("quick")
def test_shards_heads_and_adapters(hub: HubStandIn) -> None:
    """Of heads, the file that the server reads: a pickle only if there is no other one. Of shards,
    those that the index names. An adapter's configuration is checked before its weights."""
    target = files_of(TINY / "target")
    weights = target.pop("model.safetensors")
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = json.dumps({"weight_map": {"a": names[0], "b": names[1]}}).encode()
    shards = {names[0]: weights, names[1]: b"2", "model-00001-of-00001.safetensors": b"3"}
    hub.add("acme/shards", target | shards | {"model.safetensors.index.json": index})
    heads = files_of(TINY / "heads")
    hub.add("acme/heads", heads | {"medusa_lm_head.pt": b"a pickle"})
    adapter = {"r": 4, "lora_alpha": 8, "peft_type": "LORA"}
    files = {"adapter_config.json": json.dumps(adapter).encode(), "adapter_model.bin": b"a pickle"}
    hub.add("acme/sql", files | {"adapter_model.safetensors": b"weights"})
    config = found(model="acme/shards", heads="acme/heads", lora={"sql": "acme/sql"})
    assert hub.fetched(".safetensors") == [
        *names,
        "medusa_lm_head.safetensors",
        "adapter_model.safetensors",
    ]
    assert not hub.fetched(".pt") + hub.fetched(".bin")
    assert Path(config.engine.paths()["lora.sql"], "adapter_config.json").is_file()
    hub.requests.clear()
    changed = json.dumps(adapter | {"use_dora": True}).encode()
    hub.add("acme/dora", {"adapter_config.json": changed, "adapter_model.safetensors": b"other"})
    with pytest.raises(
        ConfigError, match="the LoRA adapter acme/dora has the use_dora True in its adapter_conf"
    ):
        found(model="acme/shards", lora={"sql": "acme/dora"})
    assert hub.fetched() == ["adapter_config.json"]


GGUF = (
    "m-q4_k_m.gguf",
    "m-Q8_0.gguf",
    "m-UD-Q8_0.gguf",
    "mmproj-m-Q8_0.gguf",
    "m-fp16-00001-of-00002.gguf",
    "m-fp16-00002-of-00002.gguf",
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
    ],
)
def test_the_gguf_file_of_a_name(name: str, files: tuple[str, ...], chosen: str) -> None:
    parsed = hub_name(name)
    assert parsed is not None
    assert gguf_file(parsed, files) == chosen


@pytest.mark.parametrize(
    ("name", "files", "sentence"),
    [
        ("a/b:FP16", GGUF, "a/b:FP16 is split into 2 files, which cannot be read: choose another"),
        ("a/b:Q4_K", GGUF, "write a/b:QUANTISATION with one of BF16, Q4_K_M, Q8_0, UD-Q8_0"),
        ("a/b:Q8_0", ("x-Q8_0.gguf", "y-Q8_0.gguf"), "a/b:Q8_0 names 2 GGUF files: write a/b:QU"),
        ("a/b", ("x-Q8_0.gguf", "x-Q6_K.gguf"), "a/b names 0 GGUF files: write a/b:QUANTISATION"),
        ("a/b:Q8_0", ("model.safetensors",), "a/b:Q8_0 has no GGUF file: leave out :Q8_0, or use"),
    ],
)
def test_gguf_files_that_are_not_served(name: str, files: tuple[str, ...], sentence: str) -> None:
    parsed = hub_name(name)
    assert parsed is not None
    with pytest.raises(ModelError) as caught:
        gguf_file(parsed, files)
    assert sentence in str(caught.value)


@pytest.mark.usefixtures("quick")
def test_a_gguf_file_is_checked_by_its_start(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose header cannot be served is refused without its weights. Its template, tokens and
    configuration come from the header."""
    num_bytes = 20_000
    monkeypatch.setattr("smartspec_launch.hub.HEADER_BYTES", num_bytes)
    monkeypatch.setattr(hub_check, "free_disk", lambda: (tmp_path, 10**9))
    for kind, changes in (("right", {}), ("wrong", {"architecture": "bloom"})):
        write_gguf(tmp_path / kind, make_model("qwen3"), few_fields(104), **changes)
        hub.add(f"acme/{kind}-GGUF", {"m-F32.gguf": (tmp_path / kind).read_bytes()})
    with pytest.raises(
        ConfigError, match=r"^acme/wrong-GGUF:F32 has the architecture bloom, which"
    ):
        found(model="acme/wrong-GGUF:F32")
    ranges = [
        range_ for method, path, range_, _ in hub.requests if method == "GET" and "cdn" in path
    ]
    assert ranges == [f"bytes=0-{num_bytes - 1}"]
    engine = {"kind": "torch", "model": "acme/right-GGUF:F32"}
    too_long = {"engine": engine, "limits": {"max_context_len": 1_000_000}}
    with pytest.raises(
        ConfigError, match=r"^the target acme/right-GGUF:F32 supports \d+ positions"
    ):
        with_local_models(ServerConfig.model_validate(too_long), print)
    said: list[str] = []
    config = found(said, model="acme/right-GGUF:F32")
    folder = Path(config.engine.paths()["model"])
    assert (folder / "gguf.json").is_file()
    assert folder.name == "m-F32"
    assert config.served_model_name == ["acme/right-GGUF:F32"]
    assert "weights take at least 0 MB" in said[0]


def test_drafts_of_families() -> None:
    for model, draft in (
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"),
        ("Qwen/Qwen3-8B@main", "Qwen/Qwen3-0.6B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("google/gemma-2-9b-it", "google/gemma-2-2b-it"),
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
    for path, name in ((TINY / "target", "target"), (tmp_path / "own.gguf", "own")):
        assert found(model=str(path)).served_model_name == [name]
    given = config_of(model=str(TINY / "target")).model_copy(update={"served_model_name": ["x"]})
    assert with_local_models(given, print).served_model_name == ["x"]
    snapshot = Path("/hf/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0123abcd")
    assert [name_of(path) for path in (snapshot, TINY / "draft")] == ["Qwen/Qwen2.5-0.5B", "draft"]
