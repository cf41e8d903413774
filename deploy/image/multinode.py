"""Entry point of the pods of a LeaderWorkerSet, which serve one model on several machines.

    multinode.py leader [options of tritonserver]    wait for the workers, then run entrypoint.py
    multinode.py worker                               run sshd, until the pod stops

TensorRT-LLM starts its ranks with MPI_Comm_spawn. Open MPI then starts them on all machines of its
default host file, by ssh. All machines share one key, which is also the host key of each of them.
So the leader refuses to send ranks to other machines.

    LWS_LEADER_ADDRESS      name of the leader, such as smartspec-0.smartspec.prod
    LWS_GROUP_SIZE          number of machines; engine.num_nodes of engine.json
    SMARTSPEC_ENGINE_JSON   path of engine.json, as for entrypoint.py
    SMARTSPEC_SSH_KEY       private key of all machines; the public key is in the same folder, .pub
    SMARTSPEC_WORK_DIR      writable folder; default /var/cache/smartspec/mpi
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from entrypoint import DEFAULT_ENGINE_JSON

from smartspec_py.engines.trtllm.engine_config import EngineDirError, Role, read_engine
from smartspec_py.serving.config import ConfigError, TrtllmEngineConfig, read_config

PORT = 2222
WAIT_S = 1800.0
"""Time for all pods of the group to start."""

ENTRY = Path(__file__).with_name("entrypoint.py")


def main() -> None:
    role, *options = sys.argv[1:] or [""]
    folder = Path(os.environ.get("SMARTSPEC_WORK_DIR", "/var/cache/smartspec/mpi"))
    key = Path(os.environ.get("SMARTSPEC_SSH_KEY", "/etc/smartspec-ssh/key"))
    if role in ("-h", "--help"):
        print(__doc__)
        return
    if role not in ("leader", "worker"):
        sys.exit(f"{__doc__}\ngot {role!r}, must be leader or worker")
    folder.mkdir(parents=True, exist_ok=True)
    if role == "worker":
        (folder / "environment").write_text(environment_script(dict(os.environ)))
        (folder / "sshd_config").write_text(sshd_config(folder, key))
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"  # it must be started by its full path
        os.execv(sshd, [sshd, "-D", "-e", "-f", str(folder / "sshd_config")])
    size = int(os.environ["LWS_GROUP_SIZE"])
    hosts = hosts_of(os.environ["LWS_LEADER_ADDRESS"], size)
    engine_json = Path(os.environ.get("SMARTSPEC_ENGINE_JSON", DEFAULT_ENGINE_JSON))
    try:
        (folder / "hosts").write_text(host_file(hosts, ranks_per_machine(engine_json, size)))
    except (ConfigError, EngineDirError) as error:
        sys.exit(str(error))
    (folder / "known_hosts").write_text(f"* {key.with_name(key.name + '.pub').read_text()}")
    ssh = f"ssh -F {folder / 'ssh_config'}"
    (folder / "ssh_config").write_text(ssh_config(folder, key))
    wait_for(hosts[1:], ssh)
    os.environ.update(mpi_settings(folder / "hosts", ssh))
    os.execv(sys.executable, [sys.executable, str(ENTRY), *options])


def hosts_of(leader: str, size: int) -> list[str]:
    """Names of all machines of the group, as LeaderWorkerSet gives them: a worker's name is that of
    the leader with its index."""
    name, _, domain = leader.partition(".")
    return [leader, *(f"{name}-{index}.{domain}" for index in range(1, size))]


def ranks_per_machine(engine_json: Path, size: int) -> int:
    """Ranks of the target on each of `size` machines. A machine must have as many slots: otherwise
    ranks move to another machine, whose GPUs are taken. Raises ConfigError, EngineDirError."""
    engine = read_config(engine_json).engine
    if not isinstance(engine, TrtllmEngineConfig):
        raise ConfigError(f"engine.json: engine.kind: got {engine.kind!r}, must be 'trtllm'")
    if engine.num_nodes != size:
        raise ConfigError(
            f"engine.json: engine.num_nodes: got {engine.num_nodes}, must be {size}, the number of "
            "machines of the group"
        )
    return read_engine(Role.TARGET, engine_json.parent / engine.target).num_ranks // size


def host_file(hosts: list[str], slots: int) -> str:
    return "".join(f"{host} slots={slots}\n" for host in hosts)


def mpi_settings(hosts: Path, ssh: str) -> dict[str, str]:
    """Environment variables of Open MPI 4. A server that no mpirun has started reads them too."""
    return {
        "OMPI_MCA_orte_default_hostfile": str(hosts),
        # Otherwise names are cut at the first dot, and workers' names have no address without it.
        "OMPI_MCA_orte_keep_fqdn_hostnames": "1",
        "OMPI_MCA_plm_rsh_agent": ssh,
        # The server itself and the draft's ranks need slots beside the target's ranks.
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


def ssh_config(folder: Path, key: Path) -> str:
    return f"""\
Host *
    Port {PORT}
    IdentityFile {key}
    UserKnownHostsFile {folder / "known_hosts"}
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 5
    LogLevel ERROR
"""


def sshd_config(folder: Path, key: Path) -> str:
    """Only the shared key is accepted. Sessions have the environment of the pod, as ranks need its
    library paths."""
    return f"""\
Port {PORT}
HostKey {key}
AuthorizedKeysFile {key}.pub
StrictModes no
UsePAM no
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowTcpForwarding no
ClientAliveInterval 15
ClientAliveCountMax 4
X11Forwarding no
ForceCommand . {folder / "environment"}; exec sh -c "$SSH_ORIGINAL_COMMAND"
"""


def environment_script(environment: dict[str, str]) -> str:
    names = {name for name in environment if name.isidentifier()} - {"PWD", "SHLVL", "_"}
    return "".join(f"export {name}={shlex.quote(environment[name])}\n" for name in sorted(names))


def wait_for(hosts: list[str], ssh: str) -> None:
    """Wait until commands can be run on all hosts. Exits after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    for host in hosts:
        command = [*shlex.split(ssh), host, "true"]
        while (result := subprocess.run(command, capture_output=True, text=True)).returncode:
            if time.monotonic() > deadline:
                sys.exit(f"{host} cannot be reached after {WAIT_S:.0f} s: {result.stderr.strip()}")
            time.sleep(1.0)
        print(f"{host} is ready", flush=True)


if __name__ == "__main__":
    main()
