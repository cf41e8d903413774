"""The launcher: its files and command line at once, a real Triton with a stand-in backend."""

import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
from one_stream import ask_alone
from rich.console import Console
from tritonclient.utils import InferenceServerException

from smartspec_bench.streams import GrpcStreams, HttpStreams, StreamError
from smartspec_launch import files, foreground, interpreter, triton_server
from smartspec_launch.address import Address, free_address, taken_ports
from smartspec_launch.gateway import Gateway, OpenAi
from smartspec_launch.interpreter import LaunchError, check_interpreter
from smartspec_launch.triton_server import (
    TritonServer,
    TritonServerError,
    server_command,
    server_environment,
)
from smartspec_py.config import LimitsConfig, ServerConfig, read_config
from smartspec_testing.engines import FakeEngineConfig

STAND_IN = Path(__file__).parent / "standin_backend"
ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "engines_build" / "tiny" / "target"
CLIENTS = ROOT / "clients"
ENGINE = FakeEngineConfig(kind="fake", tokenizer="none")
CONFIG = ServerConfig(engine=ENGINE, limits=LimitsConfig(start_s=60))


@pytest.mark.parametrize(
    ("version", "library", "prefix", "words"),
    [
        ((3, 10), "found", "/usr", "Python 3.10 cannot run"),
        ((3, 13), "found", "/usr", "Python 3.13 cannot run"),
        ((3, 11), None, "/usr", "lacks its shared library libpython; run: sudo apt-get install"),
        ((3, 11), None, "/home/a/.pyenv/versions/3.11.7", "--enable-shared pyenv install --force"),
        ((3, 11), "found", "/usr", ""),
    ],
)
def test_an_unfit_interpreter_gets_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
    library: str | None,
    prefix: str,
    words: str,
) -> None:
    found = library and Path("/usr/lib") / library
    monkeypatch.setattr(interpreter, "VERSION", version)
    monkeypatch.setattr(interpreter, "find_libpython", lambda version: found)
    monkeypatch.setattr("sys.base_prefix", prefix)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    if not words:
        assert check_interpreter() == Path("/usr/lib")
        return
    with pytest.raises(LaunchError) as caught:
        check_interpreter()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_fit", [True, False])
def test_setup_takes_an_interpreter_or_says_what_helps(tmp_path: Path, is_fit: bool) -> None:
    """The unfit one runs, but refuses the question for its version."""
    old = tmp_path / "python"
    old.write_text(
        '#!/bin/sh\ncase "$1$2" in --version) echo Python 3.9.2 ;; -c) ;; *) exit 1 ;; esac\n'
    )
    old.chmod(0o755)
    python = sys.executable if is_fit else str(old)
    done = subprocess.run(
        ["bash", "-c", f"source '{ROOT / 'scripts' / 'setup.sh'}'; find_python"],
        env=os.environ | {"PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == ((0, f"{python}\n") if is_fit else (1, ""))
    assert is_fit or done.stderr.startswith("Python 3.9.2 cannot run Triton's stub; ")
    assert done.stderr.count("\n") == (not is_fit)


def test_repository_is_what_triton_and_the_backend_read(tmp_path: Path) -> None:
    """A second writing replaces the first, whatever it left behind."""
    files.write_repository(tmp_path, CONFIG)
    (tmp_path / "models" / "old").mkdir()
    models = files.write_repository(tmp_path, CONFIG)
    assert [each.name for each in models.iterdir()] == ["smartspec"]
    assert 'backend: "smartspec_py"' in (models / "smartspec" / "config.pbtxt").read_text()
    assert read_config(models / "smartspec" / "1" / "engine.json") == CONFIG


def test_an_environment_that_the_stub_cannot_import_from_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.prefix", "/home/josé/.venv")
    with pytest.raises(LaunchError, match=r"josé/\.venv is not ASCII, .*: move"):
        files.find_installation()


def test_backends_are_copies_and_the_stub_is_executable(tmp_path: Path) -> None:
    source = tmp_path / "python"
    source.mkdir()
    (source / "libtriton_python.so").write_bytes(b"")
    stub = tmp_path / "stub-3.11"
    stub.write_bytes(b"")
    installation = files.Installation(Path("tritonserver"), source, stub)
    for _ in range(2):  # what a killed launcher has left is replaced
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


@pytest.mark.parametrize(("version", "is_pooled"), [(files.WHEEL_VERSION, False), ((2, 69), True)])
def test_command_line_listens_on_loopback_and_guards_model_control(
    tmp_path: Path, version: tuple[int, ...], is_pooled: bool
) -> None:
    installation = files.Installation(tmp_path, tmp_path, version=version)
    command = server_command(installation, tmp_path, tmp_path, Address())
    for option in ("--http-address", "--grpc-address", "--metrics-address"):
        assert f"{option}=127.0.0.1" in command
    assert ("--grpc-max-response-pool-size=1024" in command) == is_pooled
    closed = [word.partition("=")[0] for word in command if ",logging:CLOSED:TO:ALL=" in word]
    assert closed == ["--http-restricted-api", "--grpc-restricted-protocol"]


def test_addresses() -> None:
    assert Address("0.0.0.0").http_url == "http://127.0.0.1:8000"
    assert Address("::1").grpc_url == "[::1]:8001"
    address = free_address()
    assert taken_ports(address) == []
    with socket.socket() as other:
        other.bind((address.host, address.grpc_port))
        other.listen()
        assert taken_ports(address) == [address.grpc_port]


def stand_in(run_dir: Path) -> TritonServer:
    return TritonServer(CONFIG, run_dir, free_address(), backend_folder=STAND_IN)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_run_directory_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """A full disk, or a file where the directory should be: root could write into a closed one."""

    def copy(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    run_dir = tmp_path / "run" / "1"
    if is_full:
        monkeypatch.setattr("shutil.copy2", copy)
    else:
        run_dir.parent.write_text("")
    with pytest.raises(LaunchError) as caught, stand_in(run_dir):
        pass
    reason = "No space left on device" if is_full else "Not a directory"
    assert str(caught.value).startswith(f"the run directory {run_dir} cannot be used: {reason} (")
    assert str(caught.value).endswith("; name a writable directory with 10 MiB free")


def test_a_second_server_is_kept_out_until_the_first_has_ended(tmp_path: Path) -> None:
    """Also where the first one's files are still there, and a child of it lives on."""
    first = files.lock_run_dir(tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        with pytest.raises(LaunchError) as caught, stand_in(tmp_path):
            pass
        assert f"another server uses the run directory {tmp_path}" in str(caught.value)
        os.close(first)
        os.close(files.lock_run_dir(tmp_path))
        child.kill()


@pytest.mark.parametrize("name", ["models", "backends"])
def test_a_folder_that_no_server_has_written_stays(tmp_path: Path, name: str) -> None:
    """`--run-dir .` where somebody keeps their models."""
    (tmp_path / name).mkdir()
    with pytest.raises(LaunchError, match=f"has a folder {name} that no server has written"):
        files.lock_run_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A real Triton with the stand-in backend."""
    with stand_in(tmp_path_factory.mktemp("triton")) as server:
        server.wait_ready()
        yield server


def start_stand_in(run_dir: Path) -> TritonServer:
    server = stand_in(run_dir)
    server.start()
    server.wait_ready()
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
    address = server.address
    for streams in (HttpStreams(address.http_url), GrpcStreams(address.grpc_url)):
        responses = ask_alone(streams, fields)
        assert [each["text_output"] for each in responses] == ["word0 ", "word1 ", "word2 "]
        assert responses[-1]["finish_reason"] == "length"
        with pytest.raises(StreamError, match="told to fail: error"):
            ask_alone(streams, fields | {"text_input": "error"})


@pytest.mark.triton
def test_nothing_on_the_command_line_opens_model_control(server: TritonServer) -> None:
    """Whoever reads it tries what it says, and spellings of it."""
    words = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode().split("\0")
    (word,) = [word for word in words if word.startswith("--http-restricted-api=")]
    _, _, rest = word.partition(":")
    header, _, value = rest.partition("=")
    for line in (f"{header}: {value}", f"{header} : {value}", f"CLOSED: {value}", "X: y"):
        request = (
            f"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{line}\r\n"
            "Content-Length: 2\r\n\r\n{}"
        )
        port = server.address.triton_http_port
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request.encode())
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while data := client.recv(4096):
                    answer += data
        assert b" 403 " in answer
        assert b"READY" not in answer
    with (
        triton.InferenceServerClient(server.address.triton_grpc_url) as client,
        pytest.raises(InferenceServerException, match="restricted"),
    ):
        client.get_model_repository_index()
    assert server.is_model_ready()


def run_client(client: str, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CLIENTS / client), *arguments, "--url", url]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.triton
@pytest.mark.parametrize("client", ["http_stream.py", "grpc_stream.py"])
def test_clients_print_the_text_and_the_counts(server: TritonServer, client: str) -> None:
    is_http = client.startswith("http")
    url = server.address.http_url if is_http else server.address.grpc_url
    result = run_client(client, url, "hi", "--max-tokens", "3")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("word0 word1 word2 \n3 tokens in ")
    failed = run_client(client, url, "error")
    assert failed.returncode == 1
    assert "told to fail" in failed.stderr


@pytest.mark.triton
def test_no_alarms_without_a_gpu(server: TritonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(path.exists() for path in triton_server.GPU_DEVICES):
        pytest.skip("there is a GPU")
    log = server.log_path.read_text()
    assert triton_server.NO_ALARM in log
    for alarm in ("NVML", "DCGM", "pinned system memory"):
        assert alarm not in log
    monkeypatch.setattr(triton_server, "LOG_TAIL_LINES", 1000)
    assert triton_server.NO_ALARM not in server.log_tail()


@pytest.mark.triton
def test_idle_connections_do_not_end_the_server(server: TritonServer) -> None:
    """A gateway that answers 503 answers, and the launcher asks Triton itself for the model."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    place = (server.address.host, server.address.http_port)
    with contextlib.ExitStack() as held:
        for _ in range(4200):
            held.enter_context(socket.create_connection(place))
        assert server.is_model_ready()
        assert server._gateway.answers(10.0)


@pytest.mark.triton
def test_a_load_that_fails_is_told_at_once(tmp_path: Path) -> None:
    """Triton ends, and the message says why."""
    (tmp_path / "model.py").write_text("raise RuntimeError('no such engine')\n")
    with TritonServer(CONFIG, tmp_path / "run", free_address(), backend_folder=tmp_path) as server:
        with pytest.raises(TritonServerError, match="no such engine"):
            server.wait_ready()
        assert group_members(server.pid) == []


@pytest.mark.triton
def test_a_start_has_as_long_as_the_limits_say(tmp_path: Path) -> None:
    """Triton needs longer than 0.1 s for itself."""
    config = CONFIG.model_copy(update={"limits": LimitsConfig(start_s=0.1)})
    server = TritonServer(config, tmp_path, free_address(), backend_folder=STAND_IN)
    with (
        server,
        pytest.raises(TritonServerError, match=r"after 0\.1 s, the limit of limits\.start_s"),
    ):
        server.wait_ready()


@pytest.mark.triton
def test_a_stop_leaves_no_process_and_no_port(tmp_path: Path) -> None:
    """A slow server is told to end only when its model is unloaded; so a busy machine does not make
    it 1. A second stop changes nothing."""
    with stand_in(tmp_path) as server:
        server.wait_ready()
        assert len(group_members(server.pid)) > 1
        os.kill(server.pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (server.pid, signal.SIGCONT)).start()
    assert server.stop() == 0
    assert "successfully unloaded" in server.log_path.read_text()
    assert group_members(server.pid) == []
    assert taken_ports(server.address) == []
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "tritonserver.log"}


@pytest.mark.triton
def test_a_model_that_triton_keeps_holds_no_stop_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request was answered: that is a good end, however Triton is ended then."""
    monkeypatch.setattr(triton_server, "EXIT_S", 0.5)
    monkeypatch.setattr(triton_server, "EXIT_TIMEOUT_S", 1.0)
    server = start_stand_in(tmp_path)
    fields = {"text_input": "keep", "max_tokens": 2}
    assert len(ask_alone(HttpStreams(server.address.http_url), fields)) == 2
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < CONFIG.limits.drain_s
    assert group_members(server.pid) == []


@pytest.mark.triton
def test_a_stop_ends_triton_when_nothing_is_left_to_do(tmp_path: Path) -> None:
    """Triton would unload the model for 8 s, and end with 1; it is killed before."""
    server = start_stand_in(tmp_path)
    fields = {"text_input": "linger", "max_tokens": 2}
    assert len(ask_alone(HttpStreams(server.address.http_url), fields)) == 2
    assert server.stop() == 0
    assert server._process is not None
    assert server._process.returncode == -signal.SIGKILL
    assert "Timeout 1: " not in server.log_path.read_text()


@pytest.mark.triton
def test_a_killed_server_leaves_no_process_and_no_files(tmp_path: Path) -> None:
    server = start_stand_in(tmp_path)
    os.kill(server.pid, signal.SIGKILL)
    assert server.stop() == 128 + signal.SIGKILL
    deadline = time.monotonic() + 60.0
    while group_members(server.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(server.pid) == []
    assert list(Path("/dev/shm").glob(f"{server._shm_prefix}*")) == []


@pytest.mark.triton
def test_signals_during_a_kill_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user presses Ctrl-C again and again, or a supervisor sends one signal of each kind."""
    server = start_stand_in(tmp_path)
    wait_gone = server._link.wait_gone

    def interrupt(timeout_s: float) -> None:
        for number in triton_server.INTERRUPTS:
            os.kill(os.getpid(), number)
        wait_gone(timeout_s)

    monkeypatch.setattr(server._link, "wait_gone", interrupt)
    with foreground.signals_interrupt():
        server.kill()
    assert group_members(server.pid) == []
    assert list(Path("/dev/shm").glob(f"{server._shm_prefix}*")) == []


@pytest.mark.triton
def test_a_signal_between_the_starts_of_two_processes_waits_for_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gateway(*arguments: Any) -> Gateway:
        os.kill(os.getpid(), signal.SIGTERM)
        return Gateway(*arguments)

    monkeypatch.setattr(triton_server, "Gateway", gateway)
    server = stand_in(tmp_path)
    with foreground.signals_interrupt(), pytest.raises(KeyboardInterrupt):
        server.start()
    assert server.stop() == 0
    assert group_members(server.pid) == []


@pytest.mark.triton
def test_no_module_is_imported_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by Triton's stub nor by the gateway; a template is found there all the same."""
    seen = tmp_path / "seen"
    for name in ("queue", "random", "jinja2", "numpy", "grpc"):
        (tmp_path / f"{name}.py").write_text(f"open({str(seen)!r}, 'w'); raise SystemExit(1)")
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.chdir(tmp_path)
    openai = OpenAi(free_address().http_port, TOKENIZER, Path("own.jinja"))
    address = free_address()
    with TritonServer(
        CONFIG, tmp_path / "run", address, backend_folder=STAND_IN, openai=openai
    ) as server:
        server.wait_ready()
    assert not seen.exists()


def unload(server: TritonServer) -> None:
    """Streams in flight end first."""
    with pytest.raises(StreamError, match="told to fail: unload"):
        ask_alone(HttpStreams(server.address.http_url), {"text_input": "unload", "max_tokens": 1})


def kill_and_interrupt(server: TritonServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    raise KeyboardInterrupt


@pytest.mark.triton
@pytest.mark.parametrize(
    ("then", "said"),
    [
        (unload, ["The model has been unloaded."]),
        (kill_and_interrupt, [f"exit code {128 + signal.SIGKILL}", "Started HTTPService"]),
    ],
    ids=["unloaded", "not clean"],
)
def test_foreground_ends_with_1_and_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    then: Callable[[TritonServer], None],
    said: list[str],
) -> None:
    """Where a stop is not clean, the log's last lines are shown: the folder may be gone soon."""
    monkeypatch.setattr(foreground, "announce", lambda server, console: then(server))
    server = stand_in(tmp_path)
    with (tmp_path / "console").open("w") as file:
        assert foreground.run_in_foreground(server, Console(file=file, width=200)) == 1
    text = (tmp_path / "console").read_text()
    assert all(words in text for words in said), text
    assert group_members(server.pid) == []
