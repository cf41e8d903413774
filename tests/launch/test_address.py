"""Where the gateway and Triton listen, and which Triton may be seen."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smartspec_launch.address import Address, responds, status_of, with_internal_ports
from smartspec_launch.files import Installation, _container_version, exposure


def test_tritons_own_ports_are_on_loopback() -> None:
    plain = Address("0.0.0.0", 8000)
    found = with_internal_ports(plain)
    ports = {found.http_port, found.grpc_port, found.metrics_port}
    ports |= {found.triton_http_port, found.triton_grpc_port}
    assert len(ports) == 5
    assert found.triton_url == f"http://127.0.0.1:{found.triton_http_port}"
    assert found.triton_grpc_url == f"127.0.0.1:{found.triton_grpc_port}"
    assert found.http_url == plain.http_url


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
    ],
)
def test_loopback(host: str, is_loopback: bool) -> None:
    assert Address(host).is_loopback == is_loopback


@pytest.mark.parametrize(
    ("text", "is_fit"),
    [("2.71.0\n", True), ("2.69.0", True), ("2.68.0", False), ("2.51.0", False), ("x", False)],
)
def test_a_container_is_known_by_its_version(tmp_path: Path, text: str, is_fit: bool) -> None:
    path = tmp_path / "TRITON_VERSION"
    path.write_text(text)
    installation = Installation(tmp_path, tmp_path, version=_container_version(path))
    assert installation.is_fit_for_network == is_fit
    assert _container_version(tmp_path / "none") == ()


@pytest.mark.parametrize("said", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 404 No\r\n\r\n"])
def test_whatever_a_process_answers_is_a_sign_of_life(said: bytes) -> None:
    """It closes the connection, or speaks no HTTP; it must not end the thread that asks."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        for ask, answer in ((responds, True), (status_of, 404 if b"404" in said else None)):
            asked = pool.submit(ask, url, 10.0)
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(said)
            assert asked.result() == answer


def test_the_wheel_is_for_one_machine() -> None:
    wheel = Installation(Path("tritonserver"), Path("backends"))
    assert not wheel.is_fit_for_network
    reason = exposure(Address("0.0.0.0"), wheel)
    for word in ("2.51", "0.0.0.0", "CVE-2025-23310", "2.69", "gateway"):
        assert word in reason
