"""Tests that a process uses only the CPUs of its container."""

import os

import pytest

from flotilla.components.records import record
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.process import TaskProcess
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime import threads

THREADS = {"TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"}


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Simulate a machine with 64 CPUs and no limits."""
    monkeypatch.setattr(threads, "affinity", lambda: list(range(64)))
    monkeypatch.setattr(threads, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(threads, "_OWN", tmp_path / "own")
    monkeypatch.setattr(threads, "_LIMITED", {})
    for name in THREADS:
        monkeypatch.setenv(name, "set again after the test")
        del os.environ[name]
    return tmp_path


def groups(folder, own, **files):
    (folder / "own").write_bytes(own.encode("latin-1"))
    for name, said in files.items():
        path = folder / "cgroup" / name.replace("__", "/").replace("_max", ".max")
        path = path.with_name(path.name.replace("cfs", ".cfs"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        # A container sees its own cgroup as the root.
        ("0::/\n", {"cpu_max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu_max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu_max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu_max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu_max": "9900000 100000\n"}, 64),
        ("0::/\n", {"cpu_max": "nonsense"}, 64),
        # A parent cgroup's limit also applies.
        ("0::/pods/one\n", {"pods__cpu_max": "400000 100000", "pods__one__cpu_max": "max 1"}, 4),
        ("0::/pods/one\n", {"pods__cpu_max": "max 1", "pods__one__cpu_max": "800000 100000"}, 8),
        # In cgroup v1, a container sees its own cgroup as the root, but /proc has the path on the
        # host.
        (
            "5:memory:/x\n4:cpu,cpuacct:/kubepods/pod1\n",
            {"cpu,cpuacct__cpucfs_quota_us": "150000", "cpu,cpuacct__cpucfs_period_us": "100000"},
            2,
        ),
        (
            "4:cpu,cpuacct:/kubepods/pod1\n",
            {"cpu,cpuacct__cpucfs_quota_us": "-1", "cpu,cpuacct__cpucfs_period_us": "100000"},
            64,
        ),
        # RHEL 7 names the folder in the reverse order and also has a folder for `cpu` alone.
        (
            "4:cpuacct,cpu:/kubepods/pod1\n",
            {"cpu__cpucfs_quota_us": "300000", "cpu__cpucfs_period_us": "100000"},
            3,
        ),
        ("0::/\n", {}, 64),
        ("0::/\n", {"cpu_max": "200000 0\n"}, 64),
        # A cgroup may have any name; some of these lines are never written by a kernel.
        ("\nwithout colons\n0::/caf\xe9\x0b:x/..\n", {"cpu_max": "200000 100000"}, 2),
    ],
    ids=str,
)
def test_the_smallest_limit_counts(machine, own, files, expected):
    groups(machine, own, **files)
    assert threads.usable() == expected


def test_a_system_without_groups_has_no_limit():
    assert threads.usable() == 64
    threads.limit_threads()
    assert not THREADS & set(os.environ)


def test_fewer_processors_than_a_limit_are_what_there_is(machine, monkeypatch):
    groups(machine, "0::/\n", cpu_max="400000 100000")
    monkeypatch.setattr(threads, "affinity", lambda: [5, 7])
    assert threads.usable() == 2


def test_threads_are_limited_but_for_what_the_user_has_set(machine):
    groups(machine, "0::/\n", cpu_max="200000 100000")
    os.environ["OMP_NUM_THREADS"] = "1"
    for _ in range(2):
        threads.limit_threads()
        assert {name: os.environ[name] for name in THREADS} == {
            "TF_NUM_INTRAOP_THREADS": "2",
            "OMP_NUM_THREADS": "1",
        }
        # Thread limits are not passed on, because each task of a cluster sets its own.
        given = threads.environment()
        assert THREADS & set(given) == {"OMP_NUM_THREADS"}
        assert given["PATH"] == os.environ["PATH"]
    os.environ["TF_NUM_INTRAOP_THREADS"] = "7"
    threads.limit_threads()
    assert threads.environment()["TF_NUM_INTRAOP_THREADS"] == "7"


def test_a_step_keeps_to_the_limit_and_a_task_of_its_cluster_to_its_share(machine):
    groups(machine, "0::/\n", cpu_max="400000 100000")

    def finish(_step):
        assert {os.environ[name] for name in THREADS} == {"4"}
        addresses = {"chief": ("a:1",), "worker": ("a:2",)}
        job = Job(config=Config(), dataset="", checkpoints="", workdir=machine)
        cluster = Cluster(addresses=addresses)
        task = TaskProcess(job, cluster, Task(role="worker", index=0))
        return task._environment()["TF_NUM_INTRAOP_THREADS"]

    finish.__module__ = "flotilla.components.finish"
    assert record.run(finish, {"root": "", "run_id": ""}) == "2"
