"""Tests when the names of pods resolve, and that connections outlast the names."""

import socket

import pytest

from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.network import Network, host_of
from tests.kubernetes.resolver import VARIABLE, address_of
from tests.kubernetes.test_api_server import tfjob

HOST = host_of("job-chief-0", NAMESPACE)


@pytest.fixture
def network(kube):
    kube.store.create("tfjobs", NAMESPACE, tfjob())
    kube.all_pods()
    with Network(kube.store) as made:
        yield made


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def connect(network, host, listener):
    """Connect to a port through the proxy, as gRPC does; return the connection and HTTP status."""
    at, _, port = network.environment["grpc_proxy"].rpartition("/")[2].partition(":")
    connection = socket.create_connection((at, int(port)))
    target = f"{host}:{listener.getsockname()[1]}"
    connection.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    return connection, int(head.split()[1])


def test_a_name_resolves_while_its_pod_runs(kube, network):
    assert not network.resolves(HOST)
    kube.run_all()
    assert network.resolves(HOST)
    assert not network.resolves(host_of("job-chief-1", NAMESPACE))
    kube.store.graceful.add("pods")
    kube.store.delete("pods", NAMESPACE, "job-chief-0")
    assert not network.resolves(HOST)


def test_names_vanish_with_the_job_whose_pods_still_end(kube, network):
    kube.run_all()
    kube.store.graceful.add("pods")
    kube.store.delete("tfjobs", NAMESPACE, "job")
    assert kube.pods()["chief-0"]["status"]["phase"] == "Running"
    assert not network.resolves(HOST)


def test_a_pod_that_is_made_anew_has_the_name_again(kube, network):
    first = kube.run_all()["ps-0"]
    host = host_of("job-ps-0", NAMESPACE)
    pods.finished(kube.store, first, 137)
    second = kube.pod("ps-0", but=first["metadata"]["uid"])
    assert not network.resolves(host)
    pods.running(kube.store, second)
    assert network.resolves(host)


def test_an_open_connection_outlasts_the_name_and_a_new_one_finds_nobody(kube, network, listener):
    kube.run_all()
    ours, status = connect(network, HOST, listener)
    assert status == 200
    theirs, _ = listener.accept()
    kube.store.graceful.add("pods")
    kube.store.delete("tfjobs", NAMESPACE, "job")
    ours.sendall(b"still here")
    assert theirs.recv(10) == b"still here"
    theirs.sendall(b"and back")
    assert ours.recv(8) == b"and back"
    later, status = connect(network, HOST, listener)
    assert (status, network.refused) == (502, [HOST])
    theirs.close()
    assert ours.recv(1) == b""
    for each in (ours, later):
        each.close()


def test_the_sockets_of_a_pods_python_resolve_the_same_names(kube, network):
    kube.run_all()
    resolver = network.environment[VARIABLE]
    assert address_of(HOST, resolver) == "127.0.0.1"
    kube.store.delete("tfjobs", NAMESPACE, "job")
    with pytest.raises(socket.gaierror, match="not known"):
        address_of(HOST, resolver)
