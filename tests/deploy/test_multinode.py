"""One model on several machines: the LeaderWorkerSet of the chart, and what its pods run."""

from __future__ import annotations

import copy
import json
import os
import shlex
import subprocess
import threading
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import multinode
import pytest
from charts import EXAMPLES, Documents, render
from custom_schemas import validate_custom

from smartspec_py.serving.config import ConfigError, ServerConfig

VALUES = EXAMPLES["multi-node"]


@cache
def rendered() -> Documents:
    return render(VALUES)


def group() -> dict[str, Any]:
    return rendered()["LeaderWorkerSet"]


def templates() -> dict[str, dict[str, Any]]:
    """The pods of a group, by role."""
    template = group()["spec"]["leaderWorkerTemplate"]
    return {role: template[f"{role}Template"] for role in ("leader", "worker")}


def only_container(template: dict[str, Any]) -> dict[str, Any]:
    [container] = template["spec"]["containers"]
    return dict(container)


def test_the_group_has_fields_of_the_api_only() -> None:
    validate_custom(group())
    changed = copy.deepcopy(group())
    changed["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Always"
    with pytest.raises(jsonschema.ValidationError):
        validate_custom(changed)


@pytest.mark.parametrize("role", ["leader", "worker"])
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_accepts_the_pods(role: str, version: str) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": role},
        "template": templates()[role],
    }
    kubernetes_validate.validate(pod, version, strict=True)


def test_requests_go_to_leaders_only() -> None:
    documents = rendered()
    selector = documents["Service"]["spec"]["selector"].items()
    labels = {role: pod["metadata"]["labels"].items() for role, pod in templates().items()}
    assert selector <= labels["leader"]
    assert not selector <= labels["worker"]
    budget = documents["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items()
    assert not budget <= labels["worker"]


def test_the_pods_of_a_group_reach_each_other() -> None:
    policy = rendered()["NetworkPolicy"]["spec"]
    [expression] = policy["podSelector"]["matchExpressions"]
    names = {pod["metadata"]["labels"]["app.kubernetes.io/name"] for pod in templates().values()}
    assert set(expression["values"]) == names
    inside = {"podSelector": policy["podSelector"]}
    assert {"from": [inside]} in policy["ingress"]
    assert {"to": [inside]} in policy["egress"]


def test_the_example_has_as_many_nodes_and_gpus_as_its_engine_json() -> None:
    engine = ServerConfig.model_validate(VALUES["engineJson"]).engine.model_dump()
    assert engine["num_nodes"] == VALUES["multiNode"]["size"]
    assert group()["spec"]["leaderWorkerTemplate"]["size"] == 2
    for pod in templates().values():
        assert only_container(pod)["resources"]["limits"]["nvidia.com/gpu"] == 8


def pod_of(role: str) -> dict[str, Any]:
    return templates()[role]


def test_a_group_is_replaced_as_a_whole_and_before_a_new_one_starts() -> None:
    spec = group()["spec"]
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    update = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert update == {"maxSurge": 0, "maxUnavailable": 1}


def test_workers_end_after_the_connection_of_the_leader(tmp_path: Path) -> None:
    """The hook waits for all processes named sshd but one. Here they have another name, which no
    other process has, and the second one ends after half a second."""
    hook = only_container(pod_of("worker"))["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:2] == ["sh", "-c"]
    assert "'^sshd'" in hook[2]
    fake = tmp_path / f"sshd{os.getpid()}"
    fake.symlink_to("/bin/sleep")
    command = ["sh", "-c", hook[2].replace("sshd", fake.name)]
    with subprocess.Popen([fake, "30"]) as listener:
        subprocess.run(command, timeout=5, check=True)
        with subprocess.Popen([fake, "0.5"]) as session:
            # A zombie keeps its name, so it is reaped beside the hook.
            reaper = threading.Thread(target=session.wait)
            reaper.start()
            subprocess.run(command, timeout=5, check=True)
            reaper.join(5)
            assert session.returncode == 0
        listener.kill()


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_autoscalers_scale_groups(kind: str) -> None:
    documents = render({**VALUES, "autoscaling": {"kind": kind}})
    scaler = documents["HorizontalPodAutoscaler" if kind == "hpa" else "ScaledObject"]
    workload = documents["LeaderWorkerSet"]
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "name": workload["metadata"]["name"],
    }
    # The controller makes a Service of the group's name for the addresses of the pods.
    assert workload["metadata"]["name"] != documents["Service"]["metadata"]["name"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"gpu": {"count": 0}}, "gpu.count: got 0, must be at least 1"),
        ({"multiNode": {"size": 2}}, "multiNode.sshKeySecret: missing"),
        (
            {"multiNode": {"size": 3, "sshKeySecret": "key"}},
            "engineJson.engine.num_nodes: got 2, must be multiNode.size 3",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(helm_python.HelmError, match=sentence):
        render({**VALUES, **change})


def test_names_of_the_machines() -> None:
    assert multinode.hosts_of("demo-nodes-0.demo-nodes.prod", 3) == [
        "demo-nodes-0.demo-nodes.prod",
        "demo-nodes-0-1.demo-nodes.prod",
        "demo-nodes-0-2.demo-nodes.prod",
    ]
    assert multinode.host_file(["a.b", "c.d"], 8) == "a.b slots=8\nc.d slots=8\n"


def engine_json(folder: Path, tp_size: int = 14, **engine: Any) -> Path:
    (folder / "target").mkdir()
    mapping = {"tp_size": tp_size, "pp_size": 1, "cp_size": 1}
    of_engine = {"build_config": {}, "pretrained_config": {"mapping": mapping}}
    (folder / "target" / "config.json").write_text(json.dumps(of_engine))
    path = folder / "engine.json"
    settings = {"kind": "trtllm", "target": "target", "tokenizer": "words", **engine}
    path.write_text(json.dumps({"engine": settings}))
    return path


def test_a_machine_has_as_many_slots_as_ranks_of_the_target(tmp_path: Path) -> None:
    """14 ranks on two machines, whose eighth GPU is for the draft."""
    path = engine_json(tmp_path, num_nodes=2, devices=[0, 1, 2, 3, 4, 5, 6], draft_devices=[7])
    assert multinode.ranks_per_machine(path, 2) == 7


def test_another_number_of_machines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.num_nodes: got 1, must be 2"):
        multinode.ranks_per_machine(engine_json(tmp_path), 2)


def test_another_kind_of_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text('{"engine": {"kind": "torch", "model": "m"}}')
    with pytest.raises(ConfigError, match=r"engine\.kind: got 'torch', must be 'trtllm'"):
        multinode.ranks_per_machine(tmp_path / "engine.json", 2)


def test_sessions_have_the_environment_of_the_pod(tmp_path: Path) -> None:
    path = tmp_path / "environment"
    text = "it's $HOME\n"
    path.write_text(multinode.environment_script({"WITH_QUOTES": text, "BASH_FUNC_x%%": "()"}))
    shown = subprocess.check_output(["sh", "-c", f'. {path}; printf %s "$WITH_QUOTES"'], text=True)
    assert shown == text


def test_a_machine_with_another_key_is_not_trusted() -> None:
    """The private key of all pods is their host key, and the only one that a leader knows."""
    key, folder = Path("/etc/smartspec-ssh/key"), Path("/work")
    server = multinode.sshd_config(folder, key).splitlines()
    assert f"HostKey {key}" in server
    assert f"AuthorizedKeysFile {key}.pub" in server
    assert "PasswordAuthentication no" in server
    client = multinode.ssh_config(folder, key)
    assert "StrictHostKeyChecking yes" in client
    mounts = {mount["mountPath"] for mount in only_container(pod_of("worker"))["volumeMounts"]}
    assert str(key.parent) in mounts


def test_a_leader_waits_for_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fake ssh that succeeds at its second call; another one that never does."""
    count = tmp_path / "count"
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" >> {count}\n[ $(wc -l < {count}) -gt 1 ]\n')
    ssh.chmod(0o755)
    monkeypatch.setattr(multinode.time, "sleep", lambda seconds: None)
    multinode.wait_for(["worker"], shlex.quote(str(ssh)))
    assert count.read_text() == "worker true\n" * 2
    assert capsys.readouterr().out == "worker is ready\n"
    monkeypatch.setattr(multinode, "WAIT_S", 0.0)
    with pytest.raises(SystemExit, match="worker cannot be reached after 0 s: no route"):
        multinode.wait_for(["worker"], "sh -c 'echo no route >&2; exit 255'")


def test_the_image_has_the_program_and_ssh() -> None:
    dockerfile = (Path(__file__).parents[2] / "Dockerfile").read_text()
    gpu = dockerfile.split(" AS gpu")[1]
    assert "deploy/image/multinode.py" in gpu
    assert "openssh-server" in gpu
    command = only_container(pod_of("leader"))["command"]
    assert command[-2:] == ["/opt/smartspec/multinode.py", "leader"]
    assert os.access(Path(multinode.__file__), os.R_OK)
