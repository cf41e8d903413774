"""The launcher: its files and command line at once, a real Triton with a stand-in backend."""

import contextlib
import errno
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from smartspec_bench.streams import GrpcStreams, HttpStreams, StreamError, ask_alone
from smartspec_launch import files, foreground, triton_server
from smartspec_launch.gateway import OpenAi
from smartspec_launch.interpreter import Interpreter, InterpreterError, check_interpreter
from smartspec_launch.triton_server import (
    Address,
    TritonServer,
    TritonServerError,
    free_address,
    server_command,
    server_environment,
    taken_ports,
)
from smartspec_py.config import LimitsConfig, ServerConfig, read_config
from smartspec_testing.engines import FakeEngineConfig

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
        (DEBIAN._replace(version=(3, 10)), "Python 3.10 cannot run"),
        (DEBIAN._replace(version=(3, 13)), "Python 3.13 cannot run"),
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
    assert result.stderr.startswith("Python 3.9.2 cannot run Triton's stub; ")
    assert result.stderr.count("\n") == 1


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
    with pytest.raises(files.InstallationError, match=r"josé/\.venv is not ASCII, .*: move"):
        files.find_installation()


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
    command = server_command(installation, dict(os.environ), tmp_path, tmp_path, Address())
    for option in ("--http-address", "--grpc-address", "--metrics-address"):
        assert f"{option}=127.0.0.1" in command
    assert "--grpc-max-response-pool-size=1024" in command
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


def read_only(folder: Path) -> Path:
    """As no directory is made in one's own files; root could write in any that is only closed."""
    (folder / "file").write_text("")
    return folder / "file" / "run"


def test_a_run_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    run_dir = read_only(tmp_path)
    with pytest.raises(files.InstallationError) as caught, stand_in(run_dir):
        pass
    assert str(caught.value) == (
        f"the run directory {run_dir} cannot be used: Not a directory ({run_dir}); "
        "name a writable directory with 10 MiB free"
    )


def test_a_full_run_directory_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr("shutil.copy2", copy)
    with pytest.raises(files.InstallationError) as caught, stand_in(tmp_path / "run"):
        pass
    assert f"{tmp_path / 'run'} cannot be used: No space left on device" in str(caught.value)
    assert "\n" not in str(caught.value)
    os.close(files.lock_run_dir(tmp_path / "run"))  # what could not be used is not kept locked


def test_a_second_server_is_kept_out_until_the_first_has_ended(tmp_path: Path) -> None:
    """Also where the first one's files are still there, and a child of it lives on."""
    first = files.lock_run_dir(tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        with pytest.raises(files.InstallationError) as caught, stand_in(tmp_path):
            pass
        assert f"another server uses the run directory {tmp_path}" in str(caught.value)
        os.close(first)
        os.close(files.lock_run_dir(tmp_path))
        child.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A real Triton with the stand-in backend."""
    run_dir = tmp_path_factory.mktemp("triton")
    with TritonServer(CONFIG, run_dir, free_address(), backend_folder=STAND_IN) as server:
        server.wait_ready(timeout_s=60)
        yield server


def stand_in(run_dir: Path) -> TritonServer:
    return TritonServer(CONFIG, run_dir, free_address(), backend_folder=STAND_IN)


def start_stand_in(run_dir: Path) -> TritonServer:
    server = stand_in(run_dir)
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
    address = server.address
    for streams in (HttpStreams(address.http_url), GrpcStreams(address.grpc_url)):
        responses = ask_alone(streams, fields)
        assert [each["text_output"] for each in responses] == ["word0 ", "word1 ", "word2 "]
        assert responses[-1]["finish_reason"] == "length"
        with pytest.raises(StreamError, match="told to fail: error"):
            ask_alone(streams, fields | {"text_input": "error"})


def restrictions(pid: int) -> list[tuple[str, str, str]]:
    """What any local user can read of a running Triton's restricted APIs: option, header, value."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    found = [word.split("=", 2) for word in words if "-restricted-" in word]
    return [(option, rest.partition(":")[2], value) for option, rest, value in found]


def http_index(port: int, header: str) -> bytes:
    """What Triton answers to a question of model control with this header line, sent as it is."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(
            b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            + header.encode()
            + b"Content-Length: 2\r\n\r\n{}"
        )
        with contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: client.recv(4096), b""))
        return b""


def grpc_index(port: int, name: str, value: str) -> bytes:
    """The same over gRPC, as bytes of HTTP/2: a library would refuse to send such a name."""

    def literal(key: str, content: str) -> bytes:
        return b"\0" + b"".join(bytes([len(s)]) + s.encode() for s in (key, content))

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">HBBBI", 0, len(payload), kind, flags, stream)[:9] + payload

    method = "/inference.GRPCInferenceService/RepositoryIndex"
    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x"}
    headers |= {"te": "trailers", "content-type": "application/grpc", name: value}
    block = b"".join(literal(*each) for each in headers.items())
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(4, 0, 0, b"")
            + frame(1, 4, 1, block)
            + frame(0, 1, 1, bytes(5))
        )
        answer = b""
        while b"grpc-status" not in answer and (got := client.recv(4096)):
            answer += got
        return answer


@pytest.mark.triton
def test_nothing_on_the_command_line_opens_model_control(server: TritonServer) -> None:
    """Whoever reads it tries what it says, and spellings of it. That the questions are sound: the
    next test."""
    (http, header, value), (grpc, _, _) = restrictions(server.pid)
    assert (http, grpc) == ("--http-restricted-api", "--grpc-restricted-protocol")
    for line in (f"{header}: {value}\r\n", f"CLOSED:TO:ALL : {value}\r\n", f"CLOSED: {value}\r\n"):
        answer = http_index(server.address.triton_http_port, line)
        assert b" 403 " in answer
        assert b"READY" not in answer
    for name in (header, header.lower(), "closed"):
        name = f"triton-grpc-protocol-{name}"
        answer = grpc_index(server.address.triton_grpc_port, name, value)
        assert b"grpc-status" in answer
        assert b"READY" not in answer
    url = f"{server.address.triton_url}/v2/repository/models/smartspec/unload"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, data=b"{}")
    with caught.value as error:
        assert error.code == 403
    assert server.is_model_ready()


@pytest.mark.triton
def test_a_key_on_the_command_line_would_open_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smartspec_launch.triton_server.CLOSED_HEADER", "key")
    server = start_stand_in(tmp_path)
    (_, header, value), _ = restrictions(server.pid)
    http = http_index(server.address.triton_http_port, f"{header}: {value}\r\n")
    grpc = grpc_index(server.address.triton_grpc_port, f"triton-grpc-protocol-{header}", value)
    server.kill()
    assert b"READY" in http
    assert b"READY" in grpc


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
def test_a_slow_server_is_waited_for_until_it_has_unloaded(tmp_path: Path) -> None:
    """It is told to end only when its model is unloaded; so a busy machine does not make it 1."""
    server = start_stand_in(tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (server.pid, signal.SIGCONT)).start()
    assert server.stop() == 0
    assert "successfully unloaded" in server.log_path.read_text()


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
def test_a_killed_server_leaves_no_process_and_no_files(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("python_env_*"))
    server = start_stand_in(tmp_path)
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    assert server.stop() == 128 + signal.SIGKILL
    deadline = time.monotonic() + 5.0
    while group_members(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(pid) == []
    assert list(Path("/dev/shm").glob(f"{server._shm_prefix}*")) == []
    assert set(Path("/tmp").glob("python_env_*")) <= before


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
    run_dir = tmp_path / "run"
    with TritonServer(
        CONFIG, run_dir, free_address(), backend_folder=STAND_IN, openai=openai
    ) as server:
        server.wait_ready(timeout_s=60)
    assert not seen.exists()


@pytest.mark.triton
def test_a_stop_during_the_start_is_clean(tmp_path: Path) -> None:
    server = TritonServer(CONFIG, tmp_path, free_address(), backend_folder=STAND_IN)
    console = Console(file=(tmp_path / "console").open("w"), width=200)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with console.file:
        assert foreground.run_in_foreground(server, console) == 0
    assert (tmp_path / "console").read_text().splitlines()[-1] == "Stopping."
    assert group_members(server.pid) == []


@pytest.mark.triton
def test_idle_connections_do_not_end_the_server(
    server: TritonServer,
) -> None:
    """A gateway that answers 503 answers, and the launcher asks Triton itself for the model."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    place = (server.address.host, server.address.http_port)
    with contextlib.ExitStack() as held:
        for _ in range(4200):
            held.enter_context(socket.create_connection(place))
        for _ in range(foreground.MAX_MISSES):
            assert server.silence() is None


@pytest.mark.triton
def test_foreground_ends_with_1_when_the_model_unloads_itself(tmp_path: Path) -> None:
    """What `smartspec serve` does when the backend's loop has died; streams in flight end first."""
    server = TritonServer(CONFIG, tmp_path, free_address(), backend_folder=STAND_IN)
    seen = Console(file=(tmp_path / "console").open("w"), width=200)

    def unload() -> None:
        fields = {"text_input": "unload", "max_tokens": 1}
        with pytest.raises(StreamError, match="told to fail: unload"):
            ask_alone(HttpStreams(server.address.http_url), fields)

    with seen.file:
        code = foreground.run_in_foreground(server, seen, on_ready=unload)
    assert code == 1
    assert "The model has been unloaded." in (tmp_path / "console").read_text()
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
            ask_alone(HttpStreams(server.address.http_url), fields)
        failures.append(str(caught.value))

    with console.file:
        assert foreground.run_in_foreground(server, console, on_ready=ask) == 1
    assert len(failures) == 1
    assert group_members(server.pid) == []


@pytest.mark.triton
def test_foreground_ends_when_the_gateway_dies(tmp_path: Path) -> None:
    """Triton does not stay behind without it."""
    address = free_address()
    server = TritonServer(CONFIG, tmp_path, address, backend_folder=STAND_IN)
    console = Console(file=(tmp_path / "console").open("w"), width=200)

    def ask_and_kill() -> None:
        fields = {"text_input": "hello", "max_tokens": 3, "stream": True}
        assert len(ask_alone(HttpStreams(address.http_url), fields)) == 3
        os.kill(server.gateway_pid, signal.SIGKILL)

    with console.file:
        code = foreground.run_in_foreground(server, console, on_ready=ask_and_kill)
    assert code == 1
    assert "The gateway ended with exit code 137" in (tmp_path / "console").read_text()
    assert group_members(server.pid) == []
    assert taken_ports(address) == []


@pytest.mark.triton
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_foreground_ends_in_good_order_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    server = TritonServer(CONFIG, tmp_path, free_address(), backend_folder=STAND_IN)
    console = Console(file=(tmp_path / "console").open("w"), width=200)

    def send_soon() -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()

    with console.file:
        code = foreground.run_in_foreground(server, console, on_ready=send_soon)
    assert code == 0, (tmp_path / "console").read_text()
    assert group_members(server.pid) == []


@pytest.mark.triton
def test_foreground_says_why_a_stop_was_not_clean(tmp_path: Path) -> None:
    """Triton's code and the log's last lines are shown: the run folder may be gone soon."""
    server = TritonServer(CONFIG, tmp_path, free_address(), backend_folder=STAND_IN)
    console = Console(file=(tmp_path / "console").open("w"), width=200)

    def kill_and_interrupt() -> None:
        os.kill(server.pid, signal.SIGKILL)
        raise KeyboardInterrupt

    with console.file:
        code = foreground.run_in_foreground(server, console, on_ready=kill_and_interrupt)
    assert code == 1
    said = (tmp_path / "console").read_text()
    assert f"exit code {128 + signal.SIGKILL}" in said
    assert "Started HTTPService" in said
