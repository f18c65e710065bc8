"""Ports that are reserved for a cluster: its tasks may have them, and nobody else is given one."""

import errno
import socket
from contextlib import ExitStack

import pytest

from trainer.cluster.local import HOST, held_cluster
from trainer.topology import Task, check_port

TASKS = {"chief": 1, "ps": 2, "worker": 3}


def ports(cluster):
    return [int(each.rpartition(":")[2]) for hosts in cluster.spec().values() for each in hosts]


def bound(port, *, reuse):
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        held.bind((HOST, port))
    except OSError:
        held.close()
        raise
    return held


def test_every_task_has_a_port_of_its_own_on_loopback():
    with held_cluster(TASKS) as cluster:
        assert {role: cluster.count(role) for role in TASKS} == TASKS
        assert len(set(ports(cluster))) == 6
        assert all(cluster.address(Task(role="ps", index=i)).startswith(HOST) for i in range(2))


def test_a_task_may_serve_on_its_port_and_again_after_it_died():
    with held_cluster({"ps": 1}) as cluster:
        (port,) = ports(cluster)
        for _ in range(2):
            check_port(cluster, Task(role="ps", index=0))
            with bound(port, reuse=True) as server:
                server.listen()
                with socket.create_connection((HOST, port)) as client:
                    accepted, _ = server.accept()
                    accepted.close()
                    assert client.recv(1) == b""


def test_nobody_listens_on_a_port_before_its_task_does():
    with held_cluster({"ps": 1}) as cluster:
        (port,) = ports(cluster)
        with socket.socket() as client:
            assert client.connect_ex((HOST, port)) == errno.ECONNREFUSED


def test_two_clusters_at_once_share_no_port():
    with ExitStack() as stack:
        clusters = [stack.enter_context(held_cluster(TASKS)) for _ in range(20)]
        taken = [port for cluster in clusters for port in ports(cluster)]
        assert len(set(taken)) == len(taken) == 120


def test_who_asks_for_any_port_gets_another_one():
    with held_cluster(TASKS) as cluster, ExitStack() as stack:
        given = {stack.enter_context(bound(0, reuse=False)).getsockname()[1] for _ in range(200)}
        assert not given & set(ports(cluster))


def test_a_held_port_is_refused_to_who_does_not_share_and_free_afterwards():
    with held_cluster({"ps": 1}) as cluster:
        (port,) = ports(cluster)
        with pytest.raises(OSError, match="Address already in use"):
            bound(port, reuse=False)
    bound(port, reuse=False).close()


def test_the_ports_are_free_after_an_error():
    def fail():
        with held_cluster({"ps": 1}) as cluster:
            found.extend(ports(cluster))
            raise ValueError("the cluster did not start")

    found = []
    with pytest.raises(ValueError, match="did not start"):
        fail()
    bound(found[0], reuse=False).close()


def test_a_role_without_tasks():
    with held_cluster({"chief": 1, "ps": 0}) as cluster:
        assert cluster.count("ps") == 0
        assert ports(cluster)
