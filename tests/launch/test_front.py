"""Where the front and Triton listen, how large a body may be, and which Triton may be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from smartspec_launch.address import Address, behind_front
from smartspec_launch.files import Installation, _container_version, exposure
from smartspec_launch.front_process import max_body_bytes
from smartspec_py.serving.intake import MAX_BYTES_PER_TOKEN

MIB = 1 << 20


def test_a_front_leaves_tritons_own_http_on_loopback() -> None:
    plain = Address("0.0.0.0", 8000)
    assert (plain.triton_host, plain.triton_url) == ("0.0.0.0", "http://127.0.0.1:8000")
    fronted = behind_front(plain)
    port = fronted.triton_http_port
    assert port not in (None, 8000, 8001, 8002)
    assert (fronted.triton_host, fronted.triton_url) == ("127.0.0.1", f"http://127.0.0.1:{port}")
    assert fronted.http_url == plain.http_url


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
    ("max_context_len", "bears", "expected"),
    [
        (512, 2 * MIB, MIB),
        (4096, 2 * MIB, 4096 * 6 * MAX_BYTES_PER_TOKEN),
        (131_072, 2 * MIB, 2 * MIB),
        (131_072, 64 * MIB, 131_072 * 6 * MAX_BYTES_PER_TOKEN),
        (1_000_000, 64 * MIB, 64 * MIB),
        (None, 2 * MIB, 2 * MIB),
        (None, 64 * MIB, 8 * MIB),
    ],
)
def test_a_body_has_room_for_the_longest_prompt(
    max_context_len: int | None, bears: int, expected: int
) -> None:
    """Each byte of the text as six, up to what this Triton takes."""
    assert max_body_bytes(max_context_len, bears) == expected


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


def test_the_wheel_is_for_one_machine() -> None:
    wheel = Installation(Path("tritonserver"), Path("backends"))
    assert not wheel.is_fit_for_network
    assert wheel.max_body_bytes == 2 * MIB
    reason = exposure("0.0.0.0", wheel.version)
    for word in ("2.51", "0.0.0.0", "CVE-2025-23310", "2.69", "gRPC"):
        assert word in reason
