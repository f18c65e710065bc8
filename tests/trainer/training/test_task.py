"""Tests a cluster without a chief, in which worker 0 becomes the chief."""

import json
import os
import subprocess
import threading

import pytest

from flotilla.trainer.config.topology import Cluster, from_tf_config
from flotilla.trainer.training import task
from flotilla.trainer.training.task import CHIEF, FIRST_WORKER, add_chief, start_first_worker

ADDRESSES = {"ps": ("ps-0.ns:2222",), "worker": ("w-0.ns:2222", "w-1.ns:2222")}


@pytest.mark.parametrize("host", ["w-0.ns", "127.0.0.1", "[::1]"])
def test_the_chief_is_on_the_host_of_worker_0(host):
    cluster = add_chief(Cluster(addresses={**ADDRESSES, "worker": (f"{host}:2222", "b:1")}))
    found, _, port = cluster.address(CHIEF).rpartition(":")
    assert found == host
    assert 0 < int(port) < 65536
    assert cluster.count("chief") == 1


def test_the_cluster_with_its_chief_can_be_passed_on():
    before = Cluster(addresses=ADDRESSES)
    cluster = add_chief(before)
    assert {role: cluster.addresses[role] for role in ADDRESSES} == ADDRESSES == before.addresses
    assert from_tf_config(cluster.tf_config(FIRST_WORKER)) == (cluster, FIRST_WORKER)


def test_worker_0_is_served_in_a_child_process_that_is_restarted(monkeypatch):
    restarts, begun, ended = 2, [], threading.Event()

    def recorded(command, *, cwd, env, stdin, check):
        assert cwd == os.getcwd()
        assert stdin is subprocess.DEVNULL
        assert not check
        begun.append((command, env))
        if len(begun) == restarts + 1:
            ended.set()

    monkeypatch.setattr(task.subprocess, "run", recorded)
    cluster = add_chief(Cluster(addresses=ADDRESSES))
    start_first_worker(cluster, ["python", "task"], restarts)
    assert ended.wait(60)
    command, env = begun[0]
    assert command == ["python", "task"]
    assert json.loads(env["TF_CONFIG"])["task"] == {"type": "worker", "index": 0}
    assert env["TF_CONFIG"] == cluster.tf_config(FIRST_WORKER)
    assert len(begun) == restarts + 1
