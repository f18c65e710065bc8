"""Tests the DNS names of a JobSet's pods, and pods that find each other by these names."""

import socket
import sys

import pytest
from kubernetes import client

from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE, jobset
from tests.kubernetes.network import Network
from tests.kubernetes.resolver import VARIABLE, endpoint_of
from tests.kubernetes.test_jobsets import ARGS

HOST = "a-worker-0-0.a"
CLUSTER = '{"cluster": {"worker": ["a-worker-0-0.a:2222"]}, "task": {"index": $(INDEX)}}'
# A program that listens on all addresses, as TensorFlow does, and on its own address, as Python
# does.
SERVE = """
import json, os, socket, sys
host, _, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].rpartition(":")
wide = socket.socket(socket.AF_INET6)
wide.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
wide.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
wide.bind(("", int(port)))
wide.listen()
own = socket.create_server(("", int(sys.argv[1])))
print("serving", host, os.environ["INDEX"], os.environ["WHO"], os.environ["POD"], flush=True)
for server in (wide, own):
    server.accept()[0].sendall(os.environ["POD"].encode())
"""
ASK = """
import socket, sys
with socket.create_connection(("a-worker-0-0.a", int(sys.argv[1]))) as peer:
    print("from", peer.getpeername()[0], peer.makefile().read(), flush=True)
"""


@pytest.fixture
def network(kube, api):
    kube.install_jobset()
    kube.job_controller.backoff_seconds = 0.05
    kube.store.graceful.add("pods")
    client.CustomObjectsApi(api).create_namespaced_custom_object(*ARGS, jobset())
    kube.all_pods()
    with Network(kube.store) as made:
        yield made


def test_a_name_resolves_while_the_service_is_there_and_the_pod_runs(kube, network):
    assert not network.resolves(HOST)
    kube.run_all()
    assert network.resolves(HOST)
    assert network.resolves(f"{HOST}.{NAMESPACE}.svc")
    assert network.resolves(f"{HOST}.{NAMESPACE}.svc.cluster.local")
    assert not network.resolves("a-worker-7-0.a")
    assert not network.resolves(f"{HOST}.other.svc")
    kube.take_away("worker-0")
    # The Service publishes pods that are not ready, so terminating pods still resolve.
    assert network.resolves(HOST)
    kube.end_deleted()
    assert not network.resolves(HOST)
    # The lock prevents the controller from recreating the Service in the meantime.
    with kube.store.changed:
        kube.store.remove("services", NAMESPACE, "a")
        assert not network.resolves("a-chief-0-0.a")


def test_names_vanish_with_the_jobset_whose_pods_still_end(kube, network):
    kube.run_all()
    kube.store.delete("jobsets", NAMESPACE, "a")
    assert kube.pods()["worker-0"]["status"]["phase"] == "Running"
    assert not network.resolves(HOST)
    with pytest.raises(socket.gaierror, match="not known"):
        endpoint_of(HOST, 2222, network.environment[VARIABLE])


def test_a_new_pod_has_a_new_address(kube, network):
    first = kube.run_all()["worker-0"]
    [before] = network.endpoints(HOST, 2222)
    pods.finished(kube.store, first, 137)
    pods.running(kube.store, kube.pod("worker-0", but=first["metadata"]["uid"]))
    [after] = network.endpoints(HOST, 2222)
    assert before != after


def test_a_foreign_service_selects_no_pod(kube, network):
    kube.run_all()
    spec = {"clusterIP": "None", "selector": {"app": "other"}}
    with kube.store.changed:
        kube.store.remove("services", NAMESPACE, "a")
        kube.store.create("services", NAMESPACE, {"metadata": {"name": "a"}, "spec": spec})
    assert not network.resolves(HOST)


def test_names_of_others_are_left_to_the_machine(network):
    assert endpoint_of("example.org", 80, network.environment[VARIABLE]) is None


def fields(path):
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def test_processes_find_each_other_by_the_names_of_their_manifest(real_kube, port):
    real_kube.install_jobset()
    real_kube.job_controller.backoff_seconds = real_kube.job_controller.longest_seconds = 0.1
    env = [
        {"name": "INDEX", **fields("metadata.labels['jobset.sigs.k8s.io/job-index']")},
        {"name": "POD", **fields("metadata.name")},
        {"name": "TF_CONFIG", "value": CLUSTER},
        {"name": "WHO", "value": "$$(INDEX) $(INDEX) $(LATER)"},
        {"name": "LATER", "value": "x"},
    ]
    # The chief fails and is retried until the worker listens.
    tree = jobset(roles={"chief": 1, "worker": 1}, job={"backoffLimit": 1000})
    for role, program in zip(tree["spec"]["replicatedJobs"], (ASK, SERVE), strict=True):
        [container] = role["template"]["spec"]["template"]["spec"]["containers"]
        container.update(command=[sys.executable, "-c", program, str(port)], env=env)
    made = real_kube.server.control.jobsets.created(tree, strict=True)
    real_kube.store.create("jobsets", NAMESPACE, made)
    worker = real_kube.pod("worker-0")
    logs = real_kube.server.logs

    def lines(pod):
        return [text for _, text in logs.of(pod["metadata"]["uid"], 0).lines]

    real_kube.store.wait(lambda: lines(worker))
    assert lines(worker) == [f"serving {HOST} 0 $(INDEX) 0 $(LATER) {worker['metadata']['name']}"]
    [endpoint] = real_kube.network.endpoints(HOST, 2222)
    assert endpoint[0].startswith("127.")
    assert endpoint[1] != 2222
    at = real_kube.network.environment[VARIABLE].rpartition(":")
    with socket.create_connection((at[0], int(at[2]))) as connection:
        connection.sendall(f"CONNECT {HOST}:2222 HTTP/1.1\r\n\r\n".encode())
        answer = connection.makefile().read()
    assert answer == f"HTTP/1.1 200 OK\n\n{worker['metadata']['name']}"
    real_kube.store.wait(lambda: real_kube.jobset().get("status", {}).get("terminalState"))
    said = [text for pod in real_kube.pods_of("chief-0") for text in lines(pod)]
    assert said[-1] == f"from {endpoint[0]} {worker['metadata']['name']}"


def test_a_container_begins_again_in_its_pod_with_on_failure(real_kube, tmp_path):
    real_kube.install_jobset()
    real_kube.kubelet.crash_seconds = 0.05
    count = f"p = open({str(tmp_path / 'n')!r}, 'a+'); p.write('x'); n = p.tell(); p.close()"
    program = f"{count}; print('start', n, flush=True); raise SystemExit(0 if n == 3 else 9)"
    tree = jobset(roles={"chief": 1}, pod={"restartPolicy": "OnFailure"})
    [role] = tree["spec"]["replicatedJobs"]
    [container] = role["template"]["spec"]["template"]["spec"]["containers"]
    container["command"] = [sys.executable, "-c", program]
    made = real_kube.server.control.jobsets.created(tree, strict=True)
    real_kube.store.create("jobsets", NAMESPACE, made)
    real_kube.store.wait(lambda: real_kube.jobset().get("status", {}).get("terminalState"))
    [pod] = real_kube.pods_of("chief-0")
    [state] = pod["status"]["containerStatuses"]
    assert (state["restartCount"], state["state"]["terminated"]["exitCode"]) == (2, 0)
    assert state["lastState"]["terminated"]["exitCode"] == 9
    logs = [real_kube.server.logs.of(pod["metadata"]["uid"], n).lines for n in range(3)]
    assert [[text for _, text in lines] for lines in logs] == [
        ["start 1"],
        ["start 2"],
        ["start 3"],
    ]
    assert real_kube.child_jobs()["chief-0"]["status"]["failed"] == 0
