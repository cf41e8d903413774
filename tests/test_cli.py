"""The command line: help, one readable line for what is wrong, and exit codes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hub_stand_in import HubStandIn
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from smartspec_bench.streams import Exchange
from smartspec_cli.app import COMMANDS, app
from smartspec_cli.commands.serve import _openai_port
from smartspec_cli.commands.settings import set_keys
from smartspec_cli.side_by_side import summarise
from smartspec_launch import paths
from smartspec_launch.address import Address, free_address
from smartspec_launch.gateway import OPENAI_PORT

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / "clients"
PAIR = ROOT / "engines_build" / "tiny"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
HEAD = ROOT / "engines_build" / "smollm2"


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit code, and what was printed."""
    result = CliRunner().invoke(app, arguments)
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def test_help_names_every_command() -> None:
    code, text = invoke("--help")
    assert code == 0
    for command in COMMANDS:
        assert f" {command} " in text


def test_help_needs_no_model_library() -> None:
    """A help text that imports torch takes seconds; and a command needs no other's modules."""
    program = (
        "import sys; from smartspec_cli.app import app; "
        "app(sys.argv[1:], standalone_mode=False); loaded = set(sys.modules); "
        "assert not {'torch', 'transformers', 'tritonclient'} & loaded; "
        "print('smartspec_cli.commands.bench' in loaded)"
    )
    for arguments, has_bench in ((["serve", "--help"], "False"), (["--help"], "True")):
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == has_bench


def test_a_mistyped_command_gets_a_suggestion() -> None:
    code, text = invoke("serv")
    assert code == 2
    assert "Did you mean 'serve'?" in text


MODELS = ("--model", TARGET, "--draft", DRAFT)
PORTS = ("--http-port=1", "--grpc-port=2", "--metrics-port=3", "--openai-port=0")
NOWHERE = "/no/such/folder/file"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("serve --policy fixed:99", "--policy: must be none, fixed:K with K in 1..64, batch_table"),
        ("serve --set limits.max_queue=0", "--set: limits.max_queue: Input should be greater than"),
        ("serve --set limits.max_quue=1", "limits.max_quue: engine.json has no such key"),
        ("serve --set limits", "--set: got 'limits', must be KEY=VALUE with a key of engine.json"),
        (
            "serve --policy none --set policy.a=1",
            "policy.a: policy is not a section of engine.json",
        ),
        (
            'serve --set planner.batch_table={"rows":[2,1],"draft_lens":[3,2]}',
            "--set: planner.batch_table: rows must ascend from 1 or more, got (2, 1)",
        ),
        ("serve --dtype int8", "--dtype: Input should be 'auto', 'float32'"),
        ("serve --max-context-len 1", "--max-context-len: Input should be greater than or equal"),
        ("serve --kv-cache int8", "--kv-cache: Input should be 'auto' or 'u8'"),
        ("serve --draft nowhere", "nowhere does not exist: give a local Hugging Face model dir"),
        ("serve --model Qwen2.5-0.5B", "a GGUF file, or a name of the hub, OWNER/NAME"),
        (f"serve --model {__file__}", "test_cli.py is a file, but not a GGUF file: give a local"),
        (f"serve --draft {HEAD}", "smollm2 is a head and not a model: give it as --heads"),
        ("serve --heads nowhere", "nowhere does not exist: give the directory of an EAGLE-3 head"),
        (f"serve --heads {HEAD.parent}", "engines_build has none of medusa_lm_head.safetensors, "),
        ("serve --http-port 8001 --grpc-port 8001", "the three ports must differ"),
        ("serve --grpc-port 70000", "be in 1..65535"),
        (f"serve --alias {'a' * 256}", "must be 1 to 200 letters, digits, - and _"),
        ("check --set engine.dtype=int4", "engine.dtype"),
        ("check --draft nowhere", "nowhere does not exist"),
        (
            "serve --served-model-name=",
            "--served-model-name: the name '' must be 1 to 256 printable",
        ),
        ("serve --lora sql", "--lora: got 'sql', must be NAME=FOLDER, with each name once"),
        ("serve --lora a=x --lora a=y", "--lora: got 'a=y', must be NAME=FOLDER, with each name"),
        ("serve --lora a=nowhere", "nowhere must be a directory with adapter_config.json and ada"),
        ("serve --lora a/b=nowhere", "--lora: the name 'a/b' must be 1 to 64 letters, digits"),
        ("check --temperatures hot", "--temperatures"),
        ("check --set limits.max_draft_len=100", "limits.max_draft_len"),
        ("profile --set limits.max_sequences=0", "limits.max_sequences"),
        ("profile --draft nowhere", "nowhere does not exist"),
        ("profile --input nowhere.jsonl", "--input: nowhere.jsonl: "),
        (f"profile --table {NOWHERE}", f"--table: {NOWHERE} must be a writable file"),
        (f"bench live --json {NOWHERE}", f"--json: {NOWHERE} must be a writable file"),
        ("bench live --concurrency 1,x", "--concurrency: got '1,x'"),
        ("bench live --url http://h --overhead", "--url excludes"),
        ("bench live --input no.jsonl", "no.jsonl: "),
        ("bench lockstep --policies goodput", "--policies: must include none"),
        ("bench lockstep --policies none,fast", "--policies: 'fast' must be"),
        ("bench lockstep --shapes closed,round", "--shapes: 'round' must be one of"),
        ("bench lockstep --loads 0", "--loads: got '0'"),
    ],
)
def test_a_wrong_option_is_one_line(command: str, sentence: str) -> None:
    """It names the option, with exit code 2. Nothing is started."""
    name, *options = command.split()
    if name == "bench":
        name, *options = name, options[0], *MODELS, *options[1:]
    else:
        ports = PORTS if name == "serve" else ()
        options = [*MODELS, *ports, *options]  # of two equal options, the last one counts
    code, text = invoke(name, *options)
    assert code == 2
    assert sentence in text
    assert [line[:11] for line in text.splitlines() if line].count("smartspec: ") == 1


def test_a_command_that_serves_needs_a_model() -> None:
    for command in (["serve"], ["check"], ["profile"]):
        code, text = invoke(*command)
        assert code == 2
        assert "--model, or --config with an engine.json, must be given" in text


def test_a_profile_needs_a_draft_model() -> None:
    code, text = invoke("profile", "--model", TARGET)
    assert (code, text.count("\n")) == (2, 1)
    assert "--draft must be given" in text


def test_a_benchmark_needs_a_model_or_that_of_the_quickstart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("smartspec_bench.real_model.FILE", Path("nowhere"))
    for name in ("lockstep", "live"):
        code, text = invoke("bench", name)
        assert (code, text.count("\n")) == (2, 1)
        assert "downloaded by scripts/quickstart" in text


def test_the_models_of_an_engine_json_are_checked(tmp_path: Path) -> None:
    """Paths in it are relative to it, --set changes it, and it must name its kind."""
    shutil.copytree(PAIR / "target", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    config = tmp_path / "engine.json"
    config.write_text('{"engine": {"kind": "local", "model": "model"}}')
    options = ("--config", str(config), *PORTS)
    code, text = invoke("serve", *options)
    assert (code, text.count("\n")) == (2, 1)
    assert "has a truncated or damaged model.safetensors" in text
    code, text = invoke("serve", *options, "--set", "limits.max_queue=0")
    assert code == 2
    assert "--set: limits.max_queue" in text
    for given in (("--model", "x"), ("--draft", "x"), ("--lora", "a=x")):
        code, text = invoke("serve", *options, *given)
        assert (code, text.count("\n")) == (2, 1)
        assert f"{given[0]}: cannot be given together with --config" in text
    for name, value in (("--policy", "x"), ("--max-context-len", "-1"), ("--num-threads", "-1")):
        code, text = invoke("serve", *options, name, value)
        assert (code, text.count("\n")) == (2, 1)
        assert text.startswith(f"smartspec: {name}: "), "it replaces that of the file"
    config.write_text('{"engine": {"model": "model"}}')
    code, text = invoke("serve", *options)
    assert code == 2
    assert "has a truncated or damaged model.safetensors" in text, "the default kind is local"


def test_serve_with_the_wheel_stays_on_loopback() -> None:
    """Unless told otherwise, and then it warns; the second run ends at its ports."""
    hosts = ("--model", TARGET, "--host=0.0.0.0", *PORTS, "--http-port=2")
    code, text = invoke("serve", *hosts)
    assert code == 2
    assert text.startswith("smartspec: --host: Triton 2.51 listening on 0.0.0.0: ")
    assert "--allow-remote" in text
    code, text = invoke("serve", *hosts, "--allow-remote")
    assert code == 2
    warning, refusal = text.splitlines()
    assert warning.startswith("smartspec: warning: Triton 2.51 listening on 0.0.0.0: ")
    assert "CVE-2025-23310" in warning
    assert "the three ports must differ" in refusal


def test_what_is_written_as_a_path_is_no_name_of_the_hub(tmp_path: Path) -> None:
    for text in ("./models/qwen", "../qwen", "models/qwen/", "~/qwen"):
        code, said = invoke("serve", "--model", text, *PORTS)
        assert (code, said.count("\n")) == (2, 1)
        assert "qwen does not exist" in said
    blocked = tmp_path / "blocked"
    blocked.mkdir(mode=0)
    if os.geteuid():
        code, said = invoke("serve", "--model", str(blocked / "m"), *PORTS)
        assert (code, said.count("\n")) == (2, 1)


def test_the_port_of_the_openai_endpoint_is_not_taken_twice() -> None:
    assert _openai_port(Address(http_port=OPENAI_PORT), None) == 0


def test_values_of_set_are_json_or_text() -> None:
    settings: dict[str, Any] = {"engine": {"kind": "local"}}
    changes = ["limits.max_queue=64", "engine.draft=a/b=c", "explain=true", "engine.heads=null"]
    keys = set_keys(settings, changes)
    assert keys == ["limits.max_queue", "engine.draft", "explain", "engine.heads"]
    assert settings == {
        "engine": {"kind": "local", "draft": "a/b=c", "heads": None},
        "limits": {"max_queue": 64},
        "explain": True,
    }


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1"])
def test_explain_says_that_there_is_no_server(url: str) -> None:
    code, text = invoke("explain", "--url", url)
    assert code == 1
    said = "smartspec: --url: no HTTP server answers at http://127.0.0.1:1: Connection refused"
    assert " ".join(text.split()) == said


def test_explain_says_that_there_is_no_trace(tmp_path: Path) -> None:
    missing = tmp_path / "steps.jsonl"
    code, text = invoke("explain", "--trace", str(missing))
    assert (code, text) == (1, f"smartspec: {missing}: No such file or directory\n")


def test_serve_refuses_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = invoke("serve", "--model", TARGET, "--openai-port=0", "--http-port", str(port))
    assert (code, text.count("\n")) == (1, 1)
    assert f"cannot listen on 127.0.0.1 port {port}: choose other ports with" in text


class _ServerOfThisKind(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v2/models/smartspec" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_serve_names_a_server_of_its_kind() -> None:
    with HTTPServer(("127.0.0.1", 0), _ServerOfThisKind) as taken:
        threading.Thread(target=taken.handle_request, daemon=True).start()
        port = str(taken.server_port)
        code, text = invoke("serve", "--model", TARGET, "--openai-port=0", "--http-port", port)
    assert code == 1
    assert f"port {port}, where another server of this kind listens: stop it, or choose" in text


def test_expand_refuses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"draft_vocab_size": 2048}')
    out = str(tmp_path / "out")
    for arguments, sentence in (
        ((TARGET, out, "--preset", "9b"), "--preset: '9b' must be one of"),
        ((TARGET, str(tmp_path)), "exists: name a new directory"),
        ((str(tmp_path), out), "has an EAGLE-3 head; only Llama models and Medusa heads"),
        ((TARGET, out, "--preset", "4m"), "too small for"),
    ):
        code, text = invoke("expand", *arguments)
        assert (code, text.count("\n")) == (2, 1)
        assert sentence in text
    assert not (tmp_path / "out").exists()


def test_expand_writes_a_model_of_the_preset(tmp_path: Path) -> None:
    code, text = invoke("expand", DRAFT, str(tmp_path / "out"), "--preset", "4m")
    assert code == 0, text
    assert "M parameters, same answers as" in text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == 512


def test_caches_lie_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert paths.profile_cache() == Path("/somewhere/smartspec/profiles")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert paths.run_dir(8000) == Path("/home/ada/.cache/smartspec/run-8000")


def answered(text: str, steps: int, drafted: int, accepted: int, seconds: float) -> Exchange:
    """10 tokens."""
    names = ("num_steps", "total_draft_tokens", "total_accepted_draft_tokens")
    last = dict(zip(names, (steps, drafted, accepted), strict=True))
    return Exchange(0, 0.0, chunk_s=[seconds], chunk_tokens=[10], text=text, last=last)


def test_summary_by_hand() -> None:
    """With: 10 tokens in 5 steps, 15 drafted; 2, 1 and 4 s: 5, 10 and 2.5 tokens/s, median 5.

    Without: 10 tokens in 4 s three times: 2.5. So twice the speed, 3 drafted and 2 kept a step.
    """
    speculated = [answered("a", 5, 15, 5, seconds) for seconds in (2.0, 1.0, 4.0)]
    plain = [answered("a", 10, 0, 0, 4.0)] * 3
    row = summarise("qa", "HTTP", speculated, plain)
    assert (row.tokens_per_s_with, row.tokens_per_s_without, row.speed_up) == (5.0, 2.5, 2.0)
    assert (row.mean_draft_len, row.mean_acceptance_len) == (3.0, 2.0)
    assert row.is_same_text
    assert not summarise("qa", "HTTP", speculated, [answered("b", 1, 0, 0, 1.0)]).is_same_text


@pytest.mark.triton
def test_serve_says_what_the_backend_refuses(tmp_path: Path) -> None:
    """What takes PyTorch to find is found once, by the backend, in one line. PyTorch is not
    imported here."""
    draft = shutil.copytree(PAIR / "draft", tmp_path / "draft")
    weights = load_file(draft / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, draft / "model.safetensors", {"format": "pt"})
    address = free_address()
    command = [sys.executable, "-X", "importtime", "-m", "smartspec_cli.app", "serve"]
    command += ["--model", TARGET, "--draft", str(draft)]
    command += ["--http-port", str(address.http_port), "--grpc-port", str(address.grpc_port)]
    command += ["--metrics-port", str(address.metrics_port), "--run-dir", str(tmp_path / "run")]
    command += ["--openai-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    imported = {line.split()[-1] for line in done.stderr.splitlines() if "import time:" in line}
    assert not {"torch", "transformers"} & imported
    *_, said = done.stderr.splitlines()
    assert said.startswith(f"smartspec: engine.draft: {draft}: the weight files lack 1 tensors")


@pytest.mark.triton
@pytest.mark.slow
def test_serve_answers_and_ends_on_sigterm(tmp_path: Path) -> None:
    """The command a user types, with a pair of the hub, in a process of its own: ready, clients,
    SIGTERM, exit 0. A file of the model is not ASCII, though the stub's encoding is."""
    hub = HubStandIn()
    for role in ("target", "draft"):
        given = {path.name: path.read_bytes() for path in (PAIR / role).iterdir()}
        generation = json.loads(given["generation_config.json"]) | {"note": "für später"}
        given["generation_config.json"] = json.dumps(generation, ensure_ascii=False).encode()
        hub.add(f"acme/{role}", given)
    address = free_address()
    ports = (address.http_port, address.grpc_port, address.metrics_port)
    names = ("--http-port", "--grpc-port", "--metrics-port")
    options = [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]
    profiles = tmp_path / "profiles"
    options += ["--run-dir", str(tmp_path / "run"), "--set", f"engine.profile_cache={profiles}"]
    options += ["--set", "limits.profile_s=1", "--set", "limits.start_s=120"]
    command = [sys.executable, "-m", "smartspec_cli.app", "serve", "--model", "acme/target"]
    unset = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Task: qa"}\n' * 3)
    with hub.served() as url:
        environment |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf")}
        command += ["--draft", "acme/draft", *options]
        serve = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            said = wait_for(serve, "Serving acme/target, ") + wait_for(serve, "Ctrl-C stops it.")
            for client, url, prompt, words in (
                ("http_stream.py", address.http_url, "Task: qa", "tokens/s; accepted"),
                ("grpc_many.py", address.grpc_url, str(prompts), "3 requests, 0 failed, 24 tokens"),
            ):
                options = [prompt, "--url", url, "--max-tokens", "8"]
                answer = subprocess.run(
                    [sys.executable, str(CLIENTS / client), *options],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert answer.returncode == 0, answer.stderr
                assert words in answer.stdout
        finally:
            os.kill(serve.pid, signal.SIGTERM)
            _, rest = serve.communicate(timeout=60)
    assert said[0] == "Looking up acme/target and acme/draft\n"
    assert any(line.startswith("Fetching 4 MB to ") for line in said)
    assert hub.fetched(".safetensors") == ["model.safetensors"] * 2
    assert serve.returncode == 0, rest  # which ends with Triton's log where it is not
    assert rest.splitlines()[-1] == "Stopping."
    assert len(list(profiles.glob("profile-*.json"))) == 1


def wait_for(process: subprocess.Popen[str], words: str, timeout_s: float = 180.0) -> list[str]:
    """The lines of the process's stderr up to one with these words. Kills it after timeout_s."""
    assert process.stderr is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            timer.cancel()
            return seen
    timer.cancel()
    raise AssertionError(f"ended before {words!r}: {seen}")


CHECK = ("--tokens", "150", "--prompts", "1", "--temperatures", "0.7", "--json", "-")
CHECK += ("--set", "limits.max_draft_len=1", "--set", "engine.dtype=float32")
CHECK += ("--set", "limits.profile_s=0")


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smartspec_cli.commands.check.MAX_TOKENS", 24)


@pytest.mark.usefixtures("short_texts")
def test_check_compares_texts_of_the_shipped_pair() -> None:
    """Float32: no text differs, and the JSON document says so."""
    result = CliRunner().invoke(app, ["check", *MODELS, *CHECK])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["num_diverged"] == 0
    assert (summary["verdict"], summary["without_drafts"]) == ("PASS", [])
    assert summary["num_tokens"] >= 150
    counts = f"{summary['num_tokens']:,} tokens compared ({summary['num_guided']:,} guided), "
    assert f"PASS: {counts}{summary['num_drafted']:,} drafted" in result.stderr
    assert summary["num_accepted"] > 0


@pytest.mark.usefixtures("short_texts")
def test_check_forces_calls_with_marks_of_one_token(tmp_path: Path) -> None:
    """As with the tokenizer of Qwen2.5, here with the last tokens of the vocabulary."""
    target = shutil.copytree(PAIR / "target", tmp_path / "target")
    document = json.loads((target / "tokenizer.json").read_text())
    model = document["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)[-2:]
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in words]
    for word, mark in zip(words, ("<tool_call>", "</tool_call>"), strict=True):
        number = model["vocab"].pop(word)
        model["vocab"][mark] = number
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        document["added_tokens"].append({"id": number, "content": mark, "special": False, **flags})
    (target / "tokenizer.json").write_text(json.dumps(document))
    result = CliRunner().invoke(
        app, ["check", "--model", str(target), *CHECK, "--temperatures", "0,1"]
    )
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["verdict"], summary["num_diverged"]) == ("PASS", 0)
    assert summary["num_guided"] > 50
