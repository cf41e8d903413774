"""Where a server listens, how it is asked, and which ports are free."""

from __future__ import annotations

import random
import socket
import urllib.request
from dataclasses import dataclass, replace

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without a proxy: the server is on this machine."""


LOOPBACK = "127.0.0.1"
INTERNAL_PORTS = range(20_000, 30_000)
"""Below those that Linux gives to outgoing connections: Triton binds its port only when the model
is loaded, which may take minutes."""


@dataclass(frozen=True)
class Address:
    """Where the server listens. host: loopback unless the caller wants it seen.

    triton_http_port: where Triton itself answers HTTP, on loopback, while a front listens on
    http_port. None: there is no front, and Triton listens on http_port.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    triton_http_port: int | None = None

    @property
    def is_loopback(self) -> bool:
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")

    @property
    def reach(self) -> str:
        """The host under which this machine reaches it: a wildcard is none to connect to."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host

    @property
    def http_url(self) -> str:
        return f"http://{self.reach}:{self.http_port}"

    @property
    def triton_host(self) -> str:
        """Where Triton's own HTTP port is bound."""
        return self.host if self.triton_http_port is None else LOOPBACK

    @property
    def triton_url(self) -> str:
        if self.triton_http_port is None:
            return self.http_url
        return f"http://{LOOPBACK}:{self.triton_http_port}"

    @property
    def grpc_url(self) -> str:
        """Without a scheme, as tritonclient wants it."""
        return f"{self.reach}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.reach}:{self.metrics_port}/metrics"


def free_address(host: str = "127.0.0.1") -> Address:
    """An address on three ports that are free now."""
    sockets = [socket.socket() for _ in range(3)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return Address(host, *(each.getsockname()[1] for each in sockets))
    finally:
        for each in sockets:
            each.close()


def behind_front(address: Address) -> Address:
    """The address with a front on its HTTP port, and Triton's own HTTP on a port that is free."""
    candidates = random.sample(INTERNAL_PORTS, 100)
    port = next(port for port in candidates if _can_bind(LOOPBACK, port))
    return replace(address, triton_http_port=port)


def taken_ports(address: Address) -> list[int]:
    """Those ports of the address that another process listens on."""
    return [
        port
        for port in (address.http_port, address.grpc_port, address.metrics_port)
        if not _can_bind(address.host, port)
    ]


def _can_bind(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As Triton does it: a port whose last connection is in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
