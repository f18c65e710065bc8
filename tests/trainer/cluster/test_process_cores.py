"""Workers of one machine get equal parts of its cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trainer.cluster import process
from trainer.topology import Cluster, Task

CLUSTER = Cluster(
    addresses={"chief": ("a:1",), "ps": ("a:2",), "worker": tuple(f"a:{n}" for n in (3, 4))}
)


def worker(index):
    return Task(role="worker", index=index)


@pytest.mark.parametrize(
    ("own", "workers", "expected"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([2, 3, 5, 7], 2, [[2, 3], [5, 7]]),
        # What is left over is for the others.
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3]]),
        ([0, 1], 3, [[], [], []]),
        ([0, 1], 1, [[]]),
        # A system that does not say.
        ([], 2, [[], []]),
    ],
    ids=str,
)
def test_parts_of_workers(own, workers, expected):
    assert [
        process.cores_of_worker(own, workers, worker(index)) for index in range(workers)
    ] == expected


@pytest.mark.parametrize("role", ["chief", "ps", "evaluator"])
def test_others_run_where_there_is_room(role):
    assert process.cores_of_worker([0, 1], 2, Task(role=role, index=0)) == []


@pytest.mark.parametrize(("own", "intra", "inter"), [(1, 1, 64), (8, 2, 64)])
def test_threads(monkeypatch, own, intra, inter):
    monkeypatch.setattr(process.cores, "usable", lambda: own)
    monkeypatch.setattr(process.cores, "present", lambda: 64)
    found = process.core_environment(CLUSTER)
    assert found == {"TF_NUM_INTRAOP_THREADS": str(intra), "TF_NUM_INTEROP_THREADS": str(inter)}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_process_is_kept_to_its_cores(monkeypatch):
    (first, *_) = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(process, "cores_of_worker", lambda *_: [first])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process.pin_to_cores(child.pid, CLUSTER, worker(0))
        assert os.sched_getaffinity(child.pid) == {first}
        child.communicate(b"\n")
    # One that has ended is no error.
    process.pin_to_cores(child.pid, CLUSTER, worker(0))
