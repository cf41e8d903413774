"""The addresses and URLs of a server, and the search for free ports."""

from __future__ import annotations

import random
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace
from http.client import HTTPException

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without a proxy, because the server is on this machine."""

ANSWER_S = 5.0
CLOSED = ConnectionResetError, BrokenPipeError
LOOPBACK = "127.0.0.1"
INTERNAL_PORTS = range(20_000, 30_000)
"""Below the range that Linux uses for outgoing connections. Triton binds its port only after the
model is loaded, which may take minutes, and the port must stay free until then."""


@dataclass(frozen=True)
class Address:
    """Where the server listens.

    host: loopback by default; set another host to accept connections from other machines.
    triton_http_port, triton_grpc_port, triton_metrics_port: Triton's own ports, on loopback, behind
    the gateway. 0: not chosen yet.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    triton_http_port: int = 0
    triton_grpc_port: int = 0
    triton_metrics_port: int = 0

    @property
    def is_loopback(self) -> bool:
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")

    @property
    def reach(self) -> str:
        """The host to connect to from this machine. A wildcard address becomes loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host

    @property
    def http_url(self) -> str:
        return f"http://{self.reach}:{self.http_port}"

    @property
    def triton_url(self) -> str:
        return f"http://{LOOPBACK}:{self.triton_http_port}"

    @property
    def triton_grpc_url(self) -> str:
        return f"{LOOPBACK}:{self.triton_grpc_port}"

    @property
    def triton_metrics_url(self) -> str:
        return f"http://{LOOPBACK}:{self.triton_metrics_port}/metrics"

    @property
    def grpc_url(self) -> str:
        """Without a scheme, as tritonclient requires."""
        return f"{self.reach}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.reach}:{self.metrics_port}/metrics"


def status_of(url: str, timeout_s: float = ANSWER_S) -> int | None:
    """The status of the answer; None if there is none within timeout_s."""
    try:
        with DIRECT.open(url, timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except (OSError, HTTPException):
        return None


def responds(url: str, timeout_s: float = ANSWER_S) -> bool:
    """Whether there is a sign of life within timeout_s: an answer of any status, or a close."""
    try:
        with DIRECT.open(url, timeout=timeout_s):
            return True
    except (urllib.error.HTTPError, HTTPException, *CLOSED):
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, CLOSED)
    except OSError:
        return False


def free_ports(num: int) -> list[int]:
    """Different ports on loopback that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def free_address() -> Address:
    """On loopback, with three ports that are free now."""
    return Address(LOOPBACK, *free_ports(3))


def with_internal_ports(address: Address) -> Address:
    """The same address with free ports for Triton itself."""
    candidates = random.sample(INTERNAL_PORTS, 100)
    free = (port for port in candidates if can_bind(LOOPBACK, port))
    return replace(
        address,
        triton_http_port=next(free),
        triton_grpc_port=next(free),
        triton_metrics_port=next(free),
    )


def taken_ports(address: Address) -> list[int]:
    """The ports of the address that are already in use."""
    return [
        port
        for port in (address.http_port, address.grpc_port, address.metrics_port)
        if not can_bind(address.host, port)
    ]


def can_bind(host: str, port: int) -> bool:
    """Whether the port is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Triton sets this option too: a port whose last connection is in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
