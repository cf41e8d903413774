"""Builds an image and runs one container of it: with docker, podman, or buildah.

Every container has a read-only root, a volume for /var/cache/smartspec, /tmp in memory, and no
capabilities. Buildah runs none by itself, so here `unshare` and `chroot` do: as root, with the
network and the /dev of this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

REPOSITORY = Path(__file__).resolve().parents[2]
NAME = "smartspec-check"
PORTS = (8000, 8001, 8002, 9000)
CACHE = "/var/cache/smartspec"
USER = 1000
STOP_S = 60
"""Longer than `limits.drain_s`, by default 20 s, plus 20 s."""

Completed = subprocess.CompletedProcess[str]


class Containers(Protocol):
    """One image and at most one container of it at a time."""

    isolation: str
    """What runs the container, in words."""

    def build(self, image: str, options: Sequence[str]) -> None:
        """Raises CalledProcessError."""

    def size(self, image: str) -> str:
        """The size of the image without compression, such as 1.8 GB."""

    def start(self, image: str, models: Path | None) -> None:
        """models: mounted at /models."""

    def port(self, inside: int) -> int:
        """The port of this machine for a port of the container."""

    def is_running(self) -> bool: ...

    def run(self, *command: str) -> Completed:
        """Run a command in the container."""

    def stop(self) -> int:
        """SIGTERM, and SIGKILL after STOP_S. Returns the exit code of the entry point."""

    def log(self) -> str:
        """What the container has printed."""

    def remove(self) -> None:
        """Remove the container, if there is one."""

    def remove_volume(self) -> None: ...


def found(name: str | None) -> Containers:
    """The program of this name, or the first one that works here. Raises LookupError."""
    for each in [name] if name else ["docker", "podman", "buildah"]:
        # The client of docker is often installed without its daemon.
        if shutil.which(each) and output(each, "info").returncode == 0:
            return Buildah() if each == "buildah" else Docker(each)
    raise LookupError(f"{name or 'docker, podman and buildah'}: not installed, or not running")


def output(*command: str | Path) -> Completed:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def checked(*command: str | Path) -> str:
    """The output of a command. Raises CalledProcessError."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


class Docker:
    """Docker, or podman with the same commands."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.isolation = checked(program, "--version")
        self._ports: dict[int, int] = {}

    def build(self, image: str, options: Sequence[str]) -> None:
        # Podman's own format has no health checks.
        form = ["--format", "docker"] if self.program == "podman" else []
        command = [self.program, "build", *form, "--target", "cpu", "--tag", image, *options]
        subprocess.run([*command, REPOSITORY], check=True)

    def size(self, image: str) -> str:
        return checked(self.program, "images", "--format", "{{.Size}}", image)

    def start(self, image: str, models: Path | None) -> None:
        command = [self.program, "run", "--detach", "--name", NAME, "--read-only"]
        command += ["--tmpfs", "/tmp", "--shm-size", "256m", "--cap-drop", "ALL"]
        command += ["--security-opt", "no-new-privileges", "--volume", f"{NAME}:{CACHE}"]
        command += [] if models is None else ["--volume", f"{models}:/models:ro"]
        for port in PORTS:
            command += ["--publish", f"127.0.0.1::{port}"]
        checked(*command, image)
        for port in PORTS:
            text = checked(self.program, "port", NAME, str(port))
            self._ports[port] = int(text.splitlines()[0].rpartition(":")[2])

    def port(self, inside: int) -> int:
        return self._ports[inside]

    def is_running(self) -> bool:
        state = checked(self.program, "inspect", "--format", "{{.State.Running}}", NAME)
        return state == "true"

    def run(self, *command: str) -> Completed:
        return output(self.program, "exec", NAME, *command)

    def stop(self) -> int:
        checked(self.program, "stop", "-t", str(STOP_S), NAME)
        return int(checked(self.program, "inspect", "--format", "{{.State.ExitCode}}", NAME))

    def log(self) -> str:
        done = output(self.program, "logs", NAME)
        return done.stdout + done.stderr

    def remove(self) -> None:
        output(self.program, "rm", "--force", NAME)

    def remove_volume(self) -> None:
        output(self.program, "volume", "rm", "--force", NAME)


ENTER = """
root=$1 cache=$2 models=$3
mount --bind "$root" "$root"
mount --bind "$cache" "$root/var/cache/smartspec"
[ -z "$models" ] || mount --bind -o ro "$models" "$root/models"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
mount -o remount,bind,ro "$root"
shift 3
exec chroot --userspec=1000:1000 "$root" "$@"
"""
"""In a mount namespace of its own. Each program replaces the one before, so that the process id
stays that of the entry point."""


class Buildah:
    """Buildah with chroot isolation. The ports of the image must be free on this machine."""

    def __init__(self) -> None:
        version = checked("buildah", "--version")
        self.isolation = f"{version} with chroot isolation; run by unshare and chroot"
        self._folder = Path(tempfile.mkdtemp(prefix=f"{NAME}-"))
        self._cache, self._log = self._folder / "cache", self._folder / "log"
        self._cache.mkdir()
        os.chown(self._cache, USER, USER)
        self._process: subprocess.Popen[bytes] | None = None
        self._root = ""
        self._environment: list[str] = []

    def build(self, image: str, options: Sequence[str]) -> None:
        command = ["buildah", "build", "--isolation", "chroot", "--format", "docker"]
        command += ["--target", "cpu", "--tag", image, *options]
        subprocess.run([*command, REPOSITORY], check=True)

    def size(self, image: str) -> str:
        return checked("buildah", "images", "--format", "{{.Size}}", image)

    def start(self, image: str, models: Path | None) -> None:
        checked("buildah", "from", "--name", NAME, image)
        self._root = checked("buildah", "mount", NAME)
        config = json.loads(checked("buildah", "inspect", NAME))["OCIv1"]["config"]
        # This machine's network is not that of a container: listen on loopback.
        self._environment = ["env", "-i", *config["Env"], "SMARTSPEC_HOST=127.0.0.1"]
        command = ["unshare", "--mount", "sh", "-ec", ENTER, "sh", self._root, str(self._cache)]
        command += [str(models or ""), *self._environment, *config["Entrypoint"]]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def port(self, inside: int) -> int:
        return inside

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def run(self, *command: str) -> Completed:
        assert self._process is not None
        enter = ["nsenter", "--mount", "--target", str(self._process.pid), "chroot"]
        enter += [f"--userspec={USER}:{USER}", self._root]
        return output(*enter, *self._environment, *command)

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def remove(self) -> None:
        if self.is_running():
            self.stop()
        output("buildah", "rm", NAME)

    def remove_volume(self) -> None:
        shutil.rmtree(self._folder)
