"""Tests that workers on one machine get equal shares of its cores and GPUs."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from flotilla.trainer.cluster import process
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.training.server import configure_gpus, server_settings

CLUSTER = Cluster(
    addresses={"chief": ("a:1",), "ps": ("a:2",), "worker": tuple(f"a:{n}" for n in (3, 4))}
)


OTHERS = ("chief", "ps", "evaluator")


def task(role, index=0):
    return Task(role=role, index=index)


@pytest.mark.parametrize(
    ("own", "workers", "expected"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([2, 3, 5, 7], 2, [[2, 3], [5, 7]]),
        # The remaining cores are for the other tasks.
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3]]),
        ([0, 1], 3, [[], [], []]),
        ([0, 1], 1, [[]]),
        # Some systems do not report the cores of a process.
        ([], 2, [[], []]),
    ],
    ids=str,
)
def test_parts_of_workers(own, workers, expected):
    found = [process.cores_of_worker(own, workers, task("worker", n)) for n in range(workers)]
    assert found == expected
    # The tasks of other roles run where there is room.
    others = [process.cores_of_worker(own, workers, task(role)) for role in OTHERS]
    assert others == [[]] * len(OTHERS)


@pytest.mark.parametrize(("own", "intra", "inter"), [(1, 1, 64), (8, 2, 64)])
def test_threads(monkeypatch, own, intra, inter):
    monkeypatch.setattr(process.threads, "usable", lambda: own)
    monkeypatch.setattr(process.threads, "present", lambda: 64)
    found = process.core_environment(CLUSTER)
    assert found == {"TF_NUM_INTRAOP_THREADS": str(intra), "TF_NUM_INTEROP_THREADS": str(inter)}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_process_is_kept_to_its_cores(monkeypatch):
    (first, *_) = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(process, "cores_of_worker", lambda *_: [first])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process.pin_to_cores(child.pid, CLUSTER, task("worker"))
        assert os.sched_getaffinity(child.pid) == {first}
        child.communicate(b"\n")
    process.pin_to_cores(child.pid, CLUSTER, task("worker"))


NONE = {"CUDA_VISIBLE_DEVICES": "-1"}


def config_of(count, strategy="async_parameter_server", **cluster):
    tree = {"training": {"strategy": strategy}, "cluster": {"gpus_per_worker": count, **cluster}}
    return parse_config(tree)


@pytest.fixture
def present(monkeypatch):
    """Return a function that simulates a machine with a given number of GPUs."""

    def give(count):
        def listed(pattern):
            assert pattern == "/dev/nvidia[0-9]*"
            return [f"/dev/nvidia{index}" for index in range(count)]

        monkeypatch.setattr(process, "glob", listed)

    return give


def test_gpus_that_this_machine_has_not_are_refused(present):
    present(0)
    process.require_gpus(config_of(0))
    with pytest.raises(ConfigError, match=r"^cluster.gpus_per_worker is 2, but this"):
        process.require_gpus(config_of(2))
    present(1)
    # One GPU is enough, because several workers may share a GPU.
    process.require_gpus(config_of(2))


def test_a_model_that_this_machine_cannot_hold_is_refused():
    process.require_memory(config_of(0), 10**6)
    with pytest.raises(ConfigError, match=r"^model mlp has 1,000,000,000,000,000 parameters, "):
        process.require_memory(config_of(0), 10**15)


@pytest.mark.parametrize(
    ("role", "strategy", "count"),
    [
        ("worker", "async_parameter_server", 2),
        ("worker", "multi_worker_mirrored", 2),
        ("worker", "my.own:Strategy", 2),
        ("chief", "single", 2),
        ("chief", "in_graph", 0),
        ("ps", "async_parameter_server", 0),
        ("evaluator", "async_parameter_server", 0),
    ],
)
def test_who_computes_is_given_gpus(role, strategy, count):
    assert process.gpu_count(config_of(2, strategy), task(role)) == count
    assert process.gpu_count(config_of(0, strategy), task(role)) == 0


@pytest.mark.parametrize(
    ("there", "each", "seen"),
    [
        (4, 1, ["0", "1", "2"]),
        (8, 2, ["0,1", "2,3", "4,5"]),
        (2, 1, ["0", "1", "0"]),
        (1, 1, ["0", "0", "0"]),
        (3, 2, ["0,1", "2,0", "1,2"]),
    ],
)
def test_workers_see_their_own_by_index_and_share_them_in_turn(present, there, each, seen):
    present(there)
    found = [process.gpu_environment(config_of(each), task("worker", index)) for index in range(3)]
    assert found == [{"CUDA_VISIBLE_DEVICES": each} for each in seen]


@pytest.mark.parametrize(
    ("there", "asked", "role"),
    [*((4, 1, each) for each in OTHERS), (4, 0, "worker"), (0, 1, "worker")],
)
def test_who_only_leads_or_was_given_none_sees_none(present, there, asked, role):
    present(there)
    assert process.gpu_environment(config_of(asked), task(role)) == NONE


@pytest.fixture
def seen(monkeypatch):
    """Return a function that simulates GPUs in TensorFlow, and records calls about each of them."""
    calls = []

    def give(count):
        devices = [f"GPU:{index}" for index in range(count)]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda _kind: devices)
        monkeypatch.setattr(
            tf.config.experimental, "set_memory_growth", lambda gpu, on: calls.append((gpu, on))
        )
        monkeypatch.setattr(
            tf.config,
            "set_logical_device_configuration",
            lambda gpu, parts: calls.append((gpu, [part.memory_limit for part in parts])),
        )
        return calls

    return give


def test_a_gpu_that_was_asked_for_and_is_not_seen_is_one_line(seen):
    seen(1)
    with pytest.raises(UserError) as caught:
        configure_gpus(config_of(2), task("worker", 3))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(
        "worker-3 was assigned 2 GPUs (cluster.gpus_per_worker) but finds 1: "
    )
    configure_gpus(config_of(2), task("ps"))


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_this_machine_without_gpus_is_refused_one():
    with pytest.raises(UserError, match="finds 0"):
        configure_gpus(config_of(1), task("worker"))
    configure_gpus(config_of(0), task("worker"))


class Driver:
    """A CUDA driver whose GPU `n` has `n + 1` GB."""

    def __init__(self, count):
        self.count = count

    def cuInit(self, flags):  # noqa: N802
        return flags

    def cuDeviceGet(self, device, index):  # noqa: N802
        device._obj.value = index
        return 0 if index < self.count else 101

    def tell_memory(self, size, device):
        size._obj.value = (device.value + 1) << 30
        return 0


# The driver exports the function under this name.
Driver.cuDeviceTotalMem_v2 = Driver.tell_memory


def test_the_memory_of_a_gpu_grows_or_is_a_fixed_share(seen, monkeypatch):
    calls = seen(2)
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _name: Driver(2))
    for given, limits in (
        ({}, []),
        ({"gpu_memory_mb": 512}, [512, 512]),
        ({"gpu_memory_fraction": 0.25}, [256, 512]),
    ):
        config = config_of(2, **given)
        calls.clear()
        configure_gpus(config, task("worker"))
        assert calls == [(f"GPU:{n}", [limits[n]] if limits else True) for n in range(2)]
        options = server_settings(config).gpu_options
        assert options.allow_growth is not bool(limits)
        shares = [list(each.memory_limit_mb) for each in options.experimental.virtual_devices]
        assert shares == [[limit] for limit in limits]


def no_driver(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize("driver", [no_driver, lambda _name: Driver(1), lambda _name: object()])
def test_a_driver_that_does_not_tell_the_memory_is_one_line(driver, monkeypatch):
    monkeypatch.setattr(process.ctypes, "CDLL", driver)
    with pytest.raises(ConfigError) as caught:
        process.list_gpu_limits(config_of(1, gpu_memory_fraction=0.5).cluster, 2)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("set cluster.gpu_memory_mb instead")
    assert process.list_gpu_limits(config_of(1, gpu_memory_fraction=0.5).cluster, 0) == []
