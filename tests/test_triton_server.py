"""The launcher: its files and command line at once, a real Triton with a stand-in backend."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from smartspec_py.commands.streams import GrpcTransport, HttpTransport, StreamError
from smartspec_py.launch import drain, files, foreground
from smartspec_py.launch.interpreter import Interpreter, InterpreterError, check_interpreter
from smartspec_py.serving.config import FakeEngineConfig, ServerConfig, read_config
from smartspec_py.triton_server import (
    Address,
    TritonServer,
    TritonServerError,
    free_address,
    server_command,
    server_environment,
    taken_ports,
)

STAND_IN = Path(__file__).parent / "standin_backend"
ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "engines_build" / "tiny" / "target"
CLIENTS = ROOT / "clients"
CONFIG = ServerConfig(engine=FakeEngineConfig(kind="fake", tokenizer="none"))
DEBIAN = Interpreter((3, 11), "/usr", Path("/usr/lib/libpython3.11.so.1.0"), True)


def test_a_fit_interpreter_gives_the_folder_of_libpython() -> None:
    assert check_interpreter(DEBIAN, needs_venv=True) == Path("/usr/lib")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (DEBIAN._replace(version=(3, 10)), "Python 3.10 cannot host"),
        (DEBIAN._replace(version=(3, 13)), "Python 3.13 cannot host"),
        (DEBIAN._replace(libpython=None), "lacks its shared library libpython"),
        (DEBIAN._replace(has_venv=False), "lacks the venv module"),
        (
            DEBIAN._replace(libpython=None, base_prefix="/home/ada/.pyenv/versions/3.11.7"),
            "run: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force 3.11.7",
        ),
    ],
)
def test_an_unfit_interpreter_gets_one_line(found: Interpreter, words: str) -> None:
    with pytest.raises(InterpreterError) as caught:
        check_interpreter(found, needs_venv=True)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_remedy_is_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(InterpreterError) as caught:
        check_interpreter(DEBIAN._replace(libpython=None, has_venv=False), needs_venv=True)
    packages = "python3.11 python3.11-venv libpython3.11"
    assert str(caught.value).endswith(f"run: sudo apt-get install -y {packages}")


def find_python(candidate: Path) -> subprocess.CompletedProcess[str]:
    """What scripts/setup.sh makes of an interpreter."""
    command = ["bash", "-c", f"source '{ROOT / 'scripts' / 'setup.sh'}'; find_python"]
    environment = os.environ | {"PYTHON": str(candidate)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_setup_takes_the_interpreter_of_these_tests() -> None:
    result = find_python(Path(sys.executable))
    assert (result.returncode, result.stdout) == (0, f"{sys.executable}\n"), result.stderr


def test_setup_says_in_one_line_what_helps(tmp_path: Path) -> None:
    """An interpreter that runs, but refuses the question for its version."""
    old = tmp_path / "python"
    old.write_text(
        '#!/bin/sh\ncase "$1$2" in --version) echo Python 3.9.2 ;; -c) ;; *) exit 1 ;; esac\n'
    )
    old.chmod(0o755)
    result = find_python(old)
    assert result.returncode == 1
    assert result.stderr.startswith("Python 3.9.2 cannot host Triton's stub; ")
    assert result.stderr.count("\n") == 1


def test_repository_is_what_triton_and_the_backend_read(tmp_path: Path) -> None:
    """A second writing replaces the first, whatever it left behind."""
    files.write_repository(tmp_path, CONFIG)
    (tmp_path / "models" / "old").mkdir()
    models = files.write_repository(tmp_path, CONFIG)
    assert [each.name for each in models.iterdir()] == ["smartspec"]
    assert 'backend: "smartspec_py"' in (models / "smartspec" / "config.pbtxt").read_text()
    assert read_config(models / "smartspec" / "1" / "engine.json") == CONFIG


def test_backends_are_copies_and_the_stub_is_executable(tmp_path: Path) -> None:
    source = tmp_path / "python"
    source.mkdir()
    (source / "libtriton_python.so").write_bytes(b"")
    stub = tmp_path / "stub-3.11"
    stub.write_bytes(b"")
    installation = files.Installation(Path("tritonserver"), source, stub)
    backends = files.write_backends(tmp_path / "run", installation, STAND_IN)
    assert not (backends / "python" / "libtriton_python.so").is_symlink()
    assert os.access(backends / "python" / "triton_python_backend_stub", os.X_OK)
    assert (backends / "smartspec_py" / "model.py").is_file()


def test_libpython_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/inherited")
    folders = (Path("/libpython"), Path("/triton"))
    environment = server_environment(files.Installation(Path("t"), Path("p"), None, folders))
    assert environment["LD_LIBRARY_PATH"] == "/libpython:/triton:/inherited"
    assert environment["PATH"].startswith(f"{Path(sys.executable).parent}{os.pathsep}")


def test_command_line_listens_on_loopback_and_guards_model_control(tmp_path: Path) -> None:
    """A stand-in binary that knows one option more than 2.51 does is given it."""
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\necho ' --grpc-max-response-pool-size <integer>'\n")
    binary.chmod(0o755)
    installation = files.Installation(binary, tmp_path)
    command = server_command(installation, dict(os.environ), tmp_path, tmp_path, Address(), "key")
    for option in ("--http-address", "--grpc-address", "--metrics-address"):
        assert f"{option}=127.0.0.1" in command
    assert "--grpc-max-response-pool-size=1024" in command
    keys = [word.split("=")[-1] for word in command if "logging:smartspec-key" in word]
    assert keys == ["key", "key"]


def test_addresses() -> None:
    assert Address("0.0.0.0").http_url == "http://127.0.0.1:8000"
    assert Address("::1").grpc_url == "[::1]:8001"
    address = free_address()
    assert taken_ports(address) == []
    with socket.socket() as other:
        other.bind((address.host, address.grpc_port))
        other.listen()
        assert taken_ports(address) == [address.grpc_port]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A real Triton with the stand-in backend."""
    run_dir = tmp_path_factory.mktemp("triton")
    with TritonServer(CONFIG, run_dir, free_address(), backend_folder=STAND_IN) as server:
        server.wait_ready(timeout_s=60)
        yield server


def start_stand_in(run_dir: Path) -> TritonServer:
    server = TritonServer(CONFIG, run_dir, free_address(), backend_folder=STAND_IN)
    server.start()
    server.wait_ready(timeout_s=60)
    return server


def group_members(pid: int) -> list[str]:
    """Living processes of the group, as their states; zombies are gone for this purpose."""
    listing = subprocess.run(
        ["ps", "-o", "pgid=,stat=", "-A"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listing.splitlines()]
    return [state for group, state in rows if int(group) == pid and not state.startswith("Z")]


@pytest.mark.triton
def test_both_transports_stream(server: TritonServer) -> None:
    fields = {"text_input": "hello", "max_tokens": 3, "stream": True, "temperature": 0.0}
    with GrpcTransport(server.address) as grpc:
        for transport in (HttpTransport(server.address), grpc):
            responses = list(transport.stream(fields))
            assert [each["text_output"] for each in responses] == ["word0 ", "word1 ", "word2 "]
            assert responses[-1]["finish_reason"] == "length"
            with pytest.raises(StreamError, match="told to fail: error"):
                list(transport.stream(fields | {"text_input": "error"}))


@pytest.mark.triton
def test_model_control_is_refused_without_the_key(server: TritonServer) -> None:
    url = f"{server.address.http_url}/v2/repository/models/smartspec/unload"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, data=b"{}")
    with caught.value as error:
        assert error.code == 403
    assert server.is_model_ready()


@pytest.mark.triton
@pytest.mark.parametrize("client", ["http_stream.py", "grpc_stream.py"])
def test_clients_print_the_text_and_the_counts(server: TritonServer, client: str) -> None:
    address = server.address
    url = address.http_url if client.startswith("http") else address.grpc_url
    command = [sys.executable, str(CLIENTS / client), "--url", url]
    result = subprocess.run(
        [*command, "hi", "--max-tokens", "3"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("word0 word1 word2 \n3 tokens in ")
    failed = subprocess.run([*command, "error"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "told to fail" in failed.stderr


@pytest.mark.triton
def test_many_requests_client_counts_failures(server: TritonServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 2}\n{"prompt": "error"}\n')
    command = [sys.executable, str(CLIENTS / "grpc_many.py"), str(prompts)]
    command += ["--url", server.address.grpc_url, "--max-tokens", "3", "--concurrency", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "3 requests, 1 failed, 5 tokens in " in result.stdout
    assert "[2] error: told to fail: error" in result.stderr


@pytest.mark.triton
@pytest.mark.parametrize("client", ["http_stream.py", "grpc_stream.py"])
def test_clients_say_that_no_server_is_there(client: str) -> None:
    port = free_address().http_port
    url = f"http://127.0.0.1:{port}" if client.startswith("http") else f"127.0.0.1:{port}"
    result = subprocess.run(
        [sys.executable, str(CLIENTS / client), "hi", "--url", url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "refused" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.triton
def test_a_load_that_fails_is_told_at_once(tmp_path: Path) -> None:
    """The stand-in folder without its model.py: Triton ends, and the message says why."""
    empty = tmp_path / "backend"
    empty.mkdir()
    (empty / "model.py").write_text("raise RuntimeError('no such engine')\n")
    with TritonServer(CONFIG, tmp_path / "run", free_address(), backend_folder=empty) as server:
        with pytest.raises(TritonServerError, match="no such engine"):
            server.wait_ready(timeout_s=60)
        assert group_members(server.pid) == []


@pytest.mark.triton
def test_stop_is_clean_and_leaves_no_process(tmp_path: Path) -> None:
    server = start_stand_in(tmp_path)
    pid = server.pid
    assert len(group_members(pid)) > 1
    assert server.stop() == 0
    assert server.stop() == 0
    assert group_members(pid) == []
    assert taken_ports(server.address) == []


@pytest.mark.triton
def test_files_that_nobody_needs_are_removed(tmp_path: Path) -> None:
    """Unless something failed: then they are what to look into."""
    for name, fails in (("passed", False), ("failed", True)):
        server = TritonServer(
            CONFIG, tmp_path / name, free_address(), backend_folder=STAND_IN, keeps_files=False
        )
        with contextlib.suppress(LookupError), server:
            server.wait_ready(timeout_s=60)
            if fails:
                raise LookupError
    assert [path.name for path in tmp_path.iterdir()] == ["failed"]


@pytest.mark.triton
def test_a_slow_server_is_asked_again_to_unload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told to end only when its model is unloaded; so a busy machine does not make it 1."""
    monkeypatch.setattr(drain, "CONTROL_TIMEOUT_S", 0.1)
    server = start_stand_in(tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (server.pid, signal.SIGCONT)).start()
    assert server.stop() == 0
    log = server.log_path.read_text()
    assert log.index("successfully unloaded") < log.index("Signal (15) received")


@pytest.mark.triton
def test_a_model_that_triton_keeps_holds_no_stop_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request was answered: that is a good end, however Triton is ended then."""
    monkeypatch.setattr(drain, "KEPT_S", 0.5)
    server = start_stand_in(tmp_path)
    fields = {"text_input": "keep", "max_tokens": 2}
    assert len(list(HttpTransport(server.address).stream(fields))) == 2
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < CONFIG.limits.drain_s
    assert "Signal (15) received" not in server.log_path.read_text()
    assert group_members(server.pid) == []


@pytest.mark.triton
def test_a_killed_server_leaves_no_stub_and_no_shared_memory(tmp_path: Path) -> None:
    server = start_stand_in(tmp_path)
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    assert server.stop() == 128 + signal.SIGKILL
    deadline = time.monotonic() + 5.0
    while group_members(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(pid) == []
    assert list(Path("/dev/shm").glob(f"{server._shm_prefix}*")) == []


@pytest.mark.triton
def test_foreground_ends_with_1_when_the_model_unloads_itself(tmp_path: Path) -> None:
    """What `smartspec serve` does when the backend's loop has died; streams in flight end first."""
    server = TritonServer(CONFIG, tmp_path, free_address(), backend_folder=STAND_IN)
    seen = Console(file=(tmp_path / "console").open("w"), width=200)

    def unload() -> None:
        fields = {"text_input": "unload", "max_tokens": 1}
        with pytest.raises(StreamError, match="told to fail: unload"):
            list(HttpTransport(server.address).stream(fields))

    with seen.file:
        code = foreground.run_in_foreground(server, seen, on_ready=unload)
    assert code == 1
    assert "no longer ready" in (tmp_path / "console").read_text()
    assert group_members(server.pid) == []


@pytest.mark.triton
def test_foreground_ends_with_1_when_the_loop_of_the_real_backend_dies(tmp_path: Path) -> None:
    """The request that is in flight fails with a message; nothing hangs, no process is left."""
    engine = FakeEngineConfig(kind="fake", tokenizer=str(TOKENIZER), fail_at_step=3)
    server = TritonServer(ServerConfig(engine=engine), tmp_path, free_address())
    console = Console(file=(tmp_path / "console").open("w"), width=200)
    failures = []

    def ask() -> None:
        fields = {"text_input": "hello", "max_tokens": 50, "stream": True}
        with pytest.raises(StreamError) as caught:
            list(HttpTransport(server.address).stream(fields))
        failures.append(str(caught.value))

    with console.file:
        assert foreground.run_in_foreground(server, console, on_ready=ask) == 1
    assert len(failures) == 1
    assert group_members(server.pid) == []


@pytest.mark.triton
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_foreground_ends_in_good_order_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    server = TritonServer(CONFIG, tmp_path, free_address(), backend_folder=STAND_IN)
    console = Console(file=(tmp_path / "console").open("w"), width=200)

    def send_soon() -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()

    with console.file:
        assert foreground.run_in_foreground(server, console, on_ready=send_soon) == 0
    assert group_members(server.pid) == []


@pytest.mark.triton
def test_foreground_says_why_a_stop_was_not_clean(tmp_path: Path) -> None:
    """Its code is Triton's, and the log's last lines are shown: the run folder may be gone soon."""
    server = TritonServer(CONFIG, tmp_path, free_address(), backend_folder=STAND_IN)
    console = Console(file=(tmp_path / "console").open("w"), width=200)

    def kill_and_interrupt() -> None:
        os.kill(server.pid, signal.SIGKILL)
        raise KeyboardInterrupt

    with console.file:
        code = foreground.run_in_foreground(server, console, on_ready=kill_and_interrupt)
    assert code == 128 + signal.SIGKILL
    said = (tmp_path / "console").read_text()
    assert f"exit code {code}" in said
    assert "Started HTTPService" in said
