"""Tests the fake kubelet's native sidecars: start order, shared volumes, restarts and shutdown."""

import json

import pytest

from tests.kubernetes import jobset_webhook
from tests.kubernetes.cluster import NAMESPACE, jobset, real_cluster

pytestmark = pytest.mark.timeout(120)

SIDECAR = """
import os, pathlib, signal, sys, time
def end(*_):
    os.write(1, b"sidecar ends\\n")
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
with open("starts", "a") as file:
    file.write("x")
print("sidecar", flush=True)
pathlib.Path("ready").touch()
signal.pause()
"""


@pytest.fixture
def kube(tmp_path):
    with real_cluster(tmp_path / "kubernetes") as made:
        made.install_jobset()
        yield made


def begun(kube, main):
    mounts = [{"name": "shared", "mountPath": "/shared-folder"}]
    where = {"workingDir": "/shared-folder", "volumeMounts": mounts}
    probe = {"exec": {"command": ["test", "-e", "/shared-folder/ready"]}}
    sidecar = {
        "name": "agent",
        "restartPolicy": "Always",
        "command": ["python", "-c", SIDECAR],
        "startupProbe": probe,
        **where,
    }
    container = {"name": "tensorflow", "command": ["python", "-c", main], **where}
    pod = {"containers": [container], "initContainers": [sidecar]}
    tree = jobset(roles={"chief": 1}, pod=json.loads(json.dumps(pod)))
    kube.store.create("jobsets", NAMESPACE, jobset_webhook.defaulted(tree))
    return kube.pod("chief-0")


def status(kube, kind="containerStatuses"):
    [found] = kube.pods_of("chief-0")[-1]["status"].get(kind) or [{}]
    return found


def lines(kube, uid):
    return [text for _, text in kube.server.logs.of(uid, 0).lines]


def test_the_main_container_starts_after_the_probe_and_ends_the_job(kube):
    pod = begun(kube, "import os; print(sorted(os.listdir('.')))")
    uid = pod["metadata"]["uid"]
    kube.store.wait(lambda: kube.pods_of("chief-0")[-1]["status"]["phase"] == "Succeeded")
    assert lines(kube, uid) == ["['ready', 'starts']"]
    assert lines(kube, f"{uid}/agent") == ["sidecar", "sidecar ends"]
    assert status(kube, "initContainerStatuses")["state"] == {"terminated": {"exitCode": 3}}
    kube.store.wait(lambda: kube.jobset()["status"].get("terminalState") == "Completed")


def test_a_killed_sidecar_starts_again_while_the_container_runs(kube):
    main = """
import os, time
while len(open('starts').read()) < 2:
    time.sleep(0.05)
raise SystemExit(7)
"""
    pod = begun(kube, main)
    kube.store.wait(lambda: "running" in status(kube).get("state", {}))
    kube.kubelet.kill_sidecar(NAMESPACE, pod["metadata"]["name"])
    kube.store.wait(lambda: "terminated" in status(kube)["state"])
    assert status(kube)["state"]["terminated"]["exitCode"] == 7
    kube.store.wait(lambda: kube.pods_of("chief-0")[0]["status"]["phase"] == "Failed")
    assert lines(kube, f"{pod['metadata']['uid']}/agent")[0] == "sidecar"


def test_a_deleted_pod_ends_its_sidecar_last(kube):
    main = """
import os, signal, sys, time
def end(*_):
    time.sleep(0.3)
    os.write(1, b"main ends\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("main", flush=True)
signal.pause()
"""
    pod = begun(kube, main)
    uid = pod["metadata"]["uid"]
    kube.store.wait(lambda: lines(kube, uid) == ["main"])
    kube.take_away("chief-0")
    kube.store.wait(lambda: lines(kube, f"{uid}/agent")[1:] == ["sidecar ends"])
    last, ends = kube.server.logs.of(uid, 0).lines[-1], kube.server.logs.of(f"{uid}/agent", 0)
    assert last[1] == "main ends"
    assert last[0] < ends.lines[-1][0]
