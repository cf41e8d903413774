"""What is checked before weights are fetched: the disk, the memory, and whether the model can be
served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_files import few_fields, write_gguf
from hub_models import TINY, config_of, files_of, found
from hub_stand_in import HubStandIn
from local_models import make_model

from smartspec_launch import hub_check
from smartspec_launch.models import with_local_models
from smartspec_py.config import ServerConfig
from smartspec_py.engines.checkpoints.gguf.folder import write_folder
from smartspec_py.faults import ConfigError


def test_what_does_not_fit_is_not_fetched(
    hub: HubStandIn, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4-bit weights take a quarter of the file's bfloat16, and the tiny target is in float32."""
    size = (TINY / "target" / "model.safetensors").stat().st_size
    monkeypatch.setattr(hub_check, "free_disk", lambda: (hub_cache, size - 1))
    with pytest.raises(ConfigError, match=r"acme/target needs 2 MB in .*/hub, where 2 MB are free"):
        found(model="acme/target")
    monkeypatch.setattr(hub_check, "free_disk", lambda: (hub_cache, size))
    for weights, least in (("int4", size // 8), ("int8", size // 4), ("stored", size // 2)):
        answer = (hub_check.LEAST_BYTES[weights], least - 1)
        monkeypatch.setattr(hub_check, "in_process", lambda *_, answer=answer: answer)
        with pytest.raises(
            ConfigError, match=r"the weights of acme/target take at least .* of memory"
        ):
            found(model="acme/target", weights=weights)
    assert hub.fetched(".safetensors") == []


@pytest.mark.parametrize(
    ("kind", "engine", "least"),
    [
        ("qwen3", {}, 1.0),
        ("qwen3", {"weights": "stored"}, 2.0),
        ("qwen3_moe", {}, 0.5),
        ("qwen3_moe", {"weights": "int8"}, 1.0),
        ("qwen3", {"runtime": "torch"}, 4.0),
        ("qwen3", {"runtime": "torch", "dtype": "bfloat16"}, 2.0),
        ("gemma2, window 11", {}, 4.0),
    ],
)
def test_memory_of_a_weight(
    tmp_path: Path, kind: str, engine: dict[str, str], least: float
) -> None:
    """PyTorch rounds no weights, and computes what OpenVINO cannot. Experts may have 4 bits."""
    fields = {"count": 6, "used_count": 2, "feed_forward_length": 24} if "moe" in kind else {}
    changed = {f"qwen3moe.expert_{name}": value for name, value in fields.items()}
    write_gguf(tmp_path / "m.gguf", make_model(kind), few_fields(104), **changed)
    write_folder(tmp_path / "m.gguf", tmp_path / "made")
    config = config_of(model="m", device="cpu", **engine)
    assert hub_check.check_settings(config, {"model": tmp_path / "made"})[0] == least


CHECKING = """
import os, signal, sys
from pathlib import Path
from slow_check import slow_check
from smartspec_launch import hub_check

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may start jobs without it
    hub_check.check_settings = slow_check
    hub_check.in_process(None, {"model": Path(f"/proc/{os.getpid()}/fd/{sys.argv[1]}")})
"""


def test_ctrl_c_does_not_wait_for_the_check(tmp_path: Path) -> None:
    """It says when it begins, and would say when it ends. A signal is not for the process of the
    tests, in which many libraries are loaded."""
    program = tmp_path / "checking.py"
    program.write_text(CHECKING)
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, program, str(write)],
        pass_fds=(write,),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert os.read(read, 1) == b"b"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
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
    engine = {"kind": "local", "model": "acme/right-GGUF:F32"}
    too_long = {"engine": engine, "limits": {"max_context_len": 1_000_000}}
    with pytest.raises(
        ConfigError, match=r"^the target acme/right-GGUF:F32 supports \d+ positions"
    ):
        with_local_models(ServerConfig.model_validate(too_long), print)
    write_gguf(tmp_path / "p.gguf", make_model("qwen3"), few_fields(104), part_len=20)
    parts = {file.name: file.read_bytes() for file in tmp_path.glob("p-*.gguf")}
    hub.add("acme/parts-GGUF", parts)
    config = found(model="acme/parts-GGUF")
    assert set(hub.fetched()) >= parts.keys()
    assert Path(config.engine.paths()["model"]).name == "p"
    said: list[str] = []
    config = found(said, model="acme/right-GGUF:F32")
    folder = Path(config.engine.paths()["model"])
    assert (folder / "gguf.json").is_file()
    assert folder.name == "m-F32"
    assert config.served_model_name == ["acme/right-GGUF:F32"]
    assert "weights take at least 0 MB" in said[0]
