"""Tests a task's process: its folder, environment, log, cores and GPUs."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import tensorflow as tf

from flotilla.trainer.cluster import process as resources
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.process import TaskProcess
from flotilla.trainer.config.load import load_config, parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task, from_tf_config
from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.errors import FAILED, ConfigError, UserError
from flotilla.trainer.training.server import configure_gpus, server_settings

CLUSTER = Cluster(
    addresses={"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",), "worker": ("127.0.0.1:3",)}
)
CHIEF, SERVER, WORKER = (Task(role=role, index=0) for role in ("chief", "ps", "worker"))
PRINT_ENVIRONMENT = "import json, os; print(json.dumps({**os.environ, 'CWD': os.getcwd()}))"
WAIT = "import signal; signal.pause()"


@pytest.fixture
def job(tmp_path):
    return Job(
        config=Config(),
        dataset="file:///data",
        checkpoints="file:///run/check%20points",
        workdir=tmp_path / "the work",
    )


@pytest.fixture
def process(job):
    made = []

    def make(task=CHIEF, job=job, cluster=CLUSTER, code=None):
        process = TaskProcess(job, cluster, task)
        if code is not None:
            process._command = lambda: [sys.executable, "-c", code]
        made.append(process)
        return process

    yield make
    for each in made:
        each.kill()


def test_a_task_has_a_folder_of_its_own(process, job):
    names = {process(task).folder for task in (CHIEF, SERVER, Task(role="worker", index=12))}
    assert names == {job.workdir / name for name in ("chief-0", "ps-0", "worker-12")}
    assert not job.workdir.exists()


def test_the_command_names_the_work_folder_so_that_a_run_can_be_found(process, job):
    command = process()._command()
    assert command[:4] == [sys.executable, "-m", "flotilla.trainer", "task"]
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert options == {
        "--config": str(job.workdir / "chief-0" / "config.json"),
        "--dataset": "file:///data",
        "--checkpoints": "file:///run/check%20points",
        "--workdir": str(job.workdir / "chief-0"),
    }


def test_a_relative_work_folder_is_made_absolute(process, job, monkeypatch):
    monkeypatch.chdir(job.workdir.parent)
    relative = replace(job, workdir=job.workdir.relative_to(job.workdir.parent))
    one = process(job=relative, code="print('here')")
    assert one.folder == job.workdir / "chief-0"
    assert one.start().wait() == 0
    assert one.log.read_text() == "here\n"


def test_the_environment_of_a_task(process, job, monkeypatch):
    task = WORKER
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    monkeypatch.setenv("OF_THE_USER", "kept")
    monkeypatch.setenv("TF_CONFIG", "of another cluster")
    one = process(task, code=PRINT_ENVIRONMENT)
    assert one.start().wait() == 0
    found = json.loads(one.last_line())
    assert from_tf_config(found["TF_CONFIG"]) == (CLUSTER, task)
    assert found[signals.PARENT_VARIABLE] == str(os.getpid())
    assert found["GRPC_FAIL_FAST"] == "use_caller"
    assert found["GRPC_EXPERIMENTS"] == "tcp_frame_size_tuning"
    assert found["PYTHONPATH"] == "/somewhere/else"
    assert found["PYTHONSAFEPATH"] == "1"
    assert found["FLOTILLA_USER_FOLDER"] == os.getcwd()
    assert found["OF_THE_USER"] == "kept"
    assert found["CWD"] == str(job.workdir / str(task))


@pytest.mark.parametrize(
    "assignments",
    [
        ["model.args={hidden_units: [10], text: 'ö 😀: # {}'}", "gate.max.loss=1e22"],
        ["training.optimizer.learning_rate=1e-7", "storage.root=file:///tmp/a b"],
    ],
)
def test_the_task_reads_the_same_configuration(process, job, assignments):
    config = load_config(None, assignments)
    one = process(job=replace(job, config=config), code="")
    one.start().wait()
    assert load_config(one.folder / "config.json") == config


def test_it_is_terminated_and_killed(process):
    terminated, killed, idle = (
        process(code=WAIT),
        process(SERVER, code=WAIT),
        process(WORKER, code=WAIT),
    )
    first, second = terminated.start(), killed.start()
    terminated.terminate()
    assert first.wait() == -signal.SIGTERM
    # A stopped task can be killed, too.
    second.send_signal(signal.SIGSTOP)
    killed.kill()
    assert second.poll() == -signal.SIGKILL
    for ended_or_never_begun in (terminated, killed, idle):
        ended_or_never_begun.terminate()
        ended_or_never_begun.kill()


def test_a_ctrl_c_of_the_terminal_does_not_reach_it(process):
    popen = process(code=WAIT).start()
    assert os.getsid(popen.pid) == popen.pid != os.getsid(0)


def test_both_streams_are_appended_to_the_log(process):
    one = process(code="import sys; print('out'); print('err', file=sys.stderr)")
    for times in (1, 2):
        assert one.start().wait() == 0
        assert one.log.read_text().count("out\n") == times
        assert one.log.read_text().count("err\n") == times


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("", "(nothing)"),
        ("print('first'); print('last'); print()", "last"),
        ("import sys; sys.stdout.buffer.write(b'a\\xff')", "a\ufffd"),
    ],
)
def test_the_last_line_of_the_log(process, code, last):
    one = process(code=code)
    one.start().wait()
    assert one.last_line() == last


def test_a_new_attempt_deletes_the_termination_message(process):
    one = process(code="import pathlib; pathlib.Path('termination.txt').write_text('it was so\\n')")
    one.start().wait()
    assert one.termination_message() == "it was so"
    one._command = lambda: [sys.executable, "-c", ""]
    one.start().wait()
    # A task that was killed or that ends without a message has none.
    assert one.termination_message() == ""


def test_a_real_task_writes_why_it_ends(process):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        one = process(
            SERVER, cluster=Cluster(addresses={"ps": (address,), "worker": ("127.0.0.1:1",)})
        )
        assert one.start().wait() == FAILED
    expected = (
        f"ps-0 cannot serve on {address}: Address already in use; "
        "end the process that uses the port, or give the task another port"
    )
    assert one.termination_message() == expected
    assert one.last_line() == f"flotilla: {expected}"
    assert len(one.log.read_text().splitlines()) == 1


def test_a_folder_that_cannot_be_created_is_one_line(process, job):
    job.workdir.write_text("in the way")
    with pytest.raises(UserError) as caught:
        process().start()
    assert str(caught.value) == f"cannot write to {job.workdir / 'chief-0'}: Not a directory"


OF_TWO = Cluster(
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
    found = [resources.cores_of_worker(own, workers, task("worker", n)) for n in range(workers)]
    assert found == expected
    # The tasks of other roles run where there is room.
    others = [resources.cores_of_worker(own, workers, task(role)) for role in OTHERS]
    assert others == [[]] * len(OTHERS)


@pytest.mark.parametrize(("own", "intra", "inter"), [(1, 1, 64), (8, 2, 64)])
def test_threads(monkeypatch, own, intra, inter):
    monkeypatch.setattr(resources.threads, "usable", lambda: own)
    monkeypatch.setattr(resources.threads, "present", lambda: 64)
    found = resources.core_environment(OF_TWO)
    assert found == {"TF_NUM_INTRAOP_THREADS": str(intra), "TF_NUM_INTEROP_THREADS": str(inter)}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_process_is_kept_to_its_cores(monkeypatch):
    (first, *_) = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(resources, "cores_of_worker", lambda *_: [first])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        resources.pin_to_cores(child.pid, OF_TWO, task("worker"))
        assert os.sched_getaffinity(child.pid) == {first}
        child.communicate(b"\n")
    resources.pin_to_cores(child.pid, OF_TWO, task("worker"))


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

        monkeypatch.setattr(resources, "glob", listed)

    return give


def test_gpus_that_this_machine_has_not_are_refused(present):
    present(0)
    resources.require_gpus(config_of(0))
    with pytest.raises(ConfigError, match=r"^cluster.gpus_per_worker is 2, but this"):
        resources.require_gpus(config_of(2))
    present(1)
    # One GPU is enough, because several workers may share a GPU.
    resources.require_gpus(config_of(2))


def test_a_model_that_this_machine_cannot_hold_is_refused():
    resources.require_memory(config_of(0), 10**6)
    with pytest.raises(ConfigError, match=r"^model mlp has 1,000,000,000,000,000 parameters, "):
        resources.require_memory(config_of(0), 10**15)


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
    assert resources.gpu_count(config_of(2, strategy), task(role)) == count
    assert resources.gpu_count(config_of(0, strategy), task(role)) == 0


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
    found = [
        resources.gpu_environment(config_of(each), task("worker", index)) for index in range(3)
    ]
    assert found == [{"CUDA_VISIBLE_DEVICES": each} for each in seen]


@pytest.mark.parametrize(
    ("there", "asked", "role"),
    [*((4, 1, each) for each in OTHERS), (4, 0, "worker"), (0, 1, "worker")],
)
def test_who_only_leads_or_was_given_none_sees_none(present, there, asked, role):
    present(there)
    assert resources.gpu_environment(config_of(asked), task(role)) == NONE


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
    monkeypatch.setattr(resources.ctypes, "CDLL", lambda _name: Driver(2))
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
    monkeypatch.setattr(resources.ctypes, "CDLL", driver)
    with pytest.raises(ConfigError) as caught:
        resources.list_gpu_limits(config_of(1, gpu_memory_fraction=0.5).cluster, 2)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("set cluster.gpu_memory_mb instead")
    assert resources.list_gpu_limits(config_of(1, gpu_memory_fraction=0.5).cluster, 0) == []
