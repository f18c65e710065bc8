"""Tests a cluster of local processes."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.config.schema import STRATEGIES
from flotilla.trainer.events import AttemptBegin, Restart, UserCodeFailed
from flotilla.trainer.runtime import user_code
from tests.cluster.launched import SECONDS, launched, some_of
from tests.cluster.strangers import open_ports, other_addresses, reached
from tests.conftest import ROOT
from tests.trainer.telemetry.test_metrics import scrape

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


RUN = {"training": {"steps": 10**7, "checkpoint_every": 200}, "cluster": {"workers": 2}}


def run_of(strategy, **cluster):
    return {
        "training": {**RUN["training"], "strategy": strategy},
        "cluster": {**RUN["cluster"], **cluster},
    }


def read_as_task(address: str, port: int, path: str, seconds: int = 2) -> bytes:
    """Make the task at an address read a file; raise TensorFlow's error if it fails."""
    host = f"[{address}]" if ":" in address else address
    settings = tf.compat.v1.ConfigProto(operation_timeout_in_ms=1000 * seconds)
    with tf.Graph().as_default():
        content = tf.io.read_file(path)
        with tf.compat.v1.Session(f"grpc://{host}:{port}", config=settings) as session:
            return session.run(content)


def require_no_stranger(run, count, others, metrics_port=0):
    found = {process: open_ports(process) for process in run.tasks()}
    assert len(found) == count
    ports = sorted(port for each in found.values() for port in each)
    # Metrics are served only over IPv4.
    expected = [(address, port) for address in ("127.0.0.1", "::1") for port in ports]
    assert reached(["127.0.0.1", "::1"], ports) == [
        each for each in expected if each != ("::1", metrics_port)
    ]
    assert reached(others, ports) == []


def scrape_until(port, wanted):
    """Return the first scrape that `wanted` accepts.

    Poll, because only the metrics show that a task is alive.
    """
    until, pause = time.monotonic() + SECONDS, threading.Event()
    while not wanted(found := scrape(port)):
        assert time.monotonic() < until, found
        pause.wait(0.2)
    return found


def require_scraped_and_profiled(run, port, leader):
    found = scrape_until(port, lambda each: ("flotilla_loss",) in each)
    assert found["flotilla_global_step",] >= 100
    assert found["flotilla_steps_per_second",] > 0
    assert found["flotilla_tasks_alive", leader] >= 1
    assert found["flotilla_checkpoint_age_seconds",] >= 0
    profiles = run.folder / "checkpoints/logs" / run.folder.name / "train/plugins/profile"
    assert list(profiles.glob("*/*.xplane.pb"))


def watched(config, port):
    training = {**config["training"], "profile": [60, 80]}
    return {"training": training, "cluster": {**config["cluster"], "metrics_port": port}}


def test_strangers_reach_no_task_of_a_run_that_is_scraped_and_profiled(dataset, tmp_path, port):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret", encoding="utf-8")
    others = other_addresses()
    config = watched(run_of("async_parameter_server", evaluator=True), port)
    with launched(config, dataset, tmp_path) as run:
        run.wait_for_step(100)
        require_no_stranger(run, 5, others, port)
        (served,) = open_ports(run.task("ps-0"))
        # Any process on this machine can read files through a task.
        assert read_as_task("127.0.0.1", served, str(secret), seconds=120) == b"secret"
        for address in others:
            if "%" not in address:
                with pytest.raises(tf.errors.OpError):
                    read_as_task(address, served, str(secret))
        require_scraped_and_profiled(run, port, "chief")
        run.task("worker-1").kill()
        run.wait_for(lambda event: isinstance(event, Restart))
        back = ("flotilla_restarts_total", "worker")
        alive = ("flotilla_tasks_alive", "worker")
        # A task counts as alive as soon as it is started, even before it responds.
        scrape_until(port, lambda each: (each.get(back), each.get(alive)) == (1, 2))


@pytest.mark.parametrize(
    ("config", "tasks"),
    [
        (run_of("multi_worker_mirrored"), 2),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                (run_of("async_parameter_server", in_process=True), 1),
                (run_of("sync_parameter_server"), 4),
                (run_of("in_graph"), 4),
                (run_of("single"), 1),
            )
        ),
    ],
)
def test_a_run_is_scraped_and_profiled_and_no_stranger_reaches_it(
    dataset, tmp_path, port, config, tasks
):
    others = other_addresses()
    leader = "worker" if config["training"]["strategy"] == "multi_worker_mirrored" else "chief"
    with launched(watched(config, port), dataset, tmp_path) as run:
        run.wait_for_step(100)
        require_no_stranger(run, tasks, others, port)
        require_scraped_and_profiled(run, port, leader)


# A script that makes all mounts in its mount namespace read-only, except the folder $1, /dev/shm
# and the kernel's file systems, and then runs a command.
READ_ONLY = r"""
mount --bind "$1" "$1" && mount -t tmpfs tmpfs /dev/shm || exit 77
while read -r _ place _; do
    case "$place" in "$1"|/proc|/proc/*|/dev|/dev/*|/sys|/sys/*) ;;
    *) mount -o remount,bind,ro "$(printf %b "$place")" || exit 77 ;;
    esac
done < /proc/self/mounts
cd "$1" && shift && exec "$@"
"""
UNSHARED = ["unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, "sh"]


@pytest.fixture
def folder(tmp_path):
    """Return the only writable folder; skip the test if this machine does not allow mounts."""
    refused = f"! touch {ROOT}/probe 2>/dev/null && ! touch {tmp_path.parent}/probe 2>/dev/null"
    probe = [*UNSHARED, str(tmp_path), "sh", "-c", f"touch probe && {refused}"]
    try:
        ended = subprocess.run(probe, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `unshare`")
    if ended.returncode in (1, 77):
        pytest.skip(f"no mount namespace: {ended.stderr.decode().strip()}")
    assert ended.returncode == 0
    assert (tmp_path / "probe").exists()
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_all_tasks_train_and_publish(folder, dataset):
    training = {"steps": 100, "checkpoint_every": 50, "validate_every": 0}
    checkpoints = storage.uri_of(folder / "checkpoints")
    job = {
        "config": {"training": training, "cluster": {"workers": 2, "evaluator": True}},
        "dataset": dataset,
        "checkpoints": checkpoints,
        "workdir": str(folder / "cluster"),
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOME": "/absent",
        "TMPDIR": str(folder / "tmp"),
        # Keras imports matplotlib if it is installed, and matplotlib writes to this folder. The
        # image does not contain matplotlib.
        "MPLCONFIGDIR": str(folder / "tmp"),
        events.VARIABLE: str(folder / "events.jsonl"),
    }
    (folder / "events.jsonl").touch()
    launch = [sys.executable, "-m", "tests.cluster.launch", str(folder / "job.json")]
    ended = subprocess.run(
        [*UNSHARED, str(folder), *launch],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert newest_checkpoint(checkpoints)[1] == 100
    logs = {path.parent.name: path.read_text() for path in (folder / "cluster").glob("*/log.txt")}
    assert set(logs) == {"chief-0", "ps-0", "worker-0", "worker-1", "evaluator-0"}
    for task, text in logs.items():
        assert "Read-only file system" not in text, task


MODULE = """
import keras
import tensorflow as tf


class Late(keras.layers.Layer):
    def __init__(self, error, **settings):
        super().__init__(**settings)
        self.error = error

    def call(self, inputs, training=False):
        if not training:
            return inputs
        if self.error == "traced":
            return self.reshaped(inputs)
        tf.debugging.assert_less(tf.reduce_sum(inputs), -1.0, message="too much")
        return inputs

    def reshaped(self, inputs):
        raise ValueError("bad shape")


def late(spec, error):
    inputs = keras.Input(spec.shape, dtype=spec.dtype)
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 16)(inputs))
    return keras.Model(inputs, keras.layers.Dense(spec.num_classes)(Late(error)(flat)))


def frozen(spec):
    inputs = keras.Input(spec.shape, dtype=spec.dtype)
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 16)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(spec.num_classes)(flat))
    model.trainable = False
    return model


def never(spec):
    raise ValueError("no weights here")
"""


def line_with(text):
    return next(number for number, line in enumerate(MODULE.splitlines(), 1) if text in line)


@pytest.fixture
def fail(dataset, tmp_path, monkeypatch):
    """Return a function that trains a user's failing model and returns the event of the failure."""
    (tmp_path / "blocks.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))

    def run(strategy, model, ends=1, **args):
        settings = {
            "model": {"name": f"blocks:{model}", "args": args},
            "training": {"strategy": strategy, "steps": 50, "validate_every": 0},
            "cluster": {"workers": 1},
            # The Keras format would require the layer to define `get_config`.
            "export": {"formats": ["saved_model"]},
        }
        with launched(settings, dataset, tmp_path / "run") as run:
            code, said = run.end()
        assert run.events(Restart) == []
        (failed,) = run.events(UserCodeFailed)
        log = (tmp_path / "run" / "cluster" / "chief-0" / "log.txt").read_text(encoding="utf-8")
        assert "Traceback (most recent call last):" in log
        assert said.count("\n") == 1
        assert said.startswith(" ".join(failed.error.split()))
        assert code == ends
        return failed

    return run


def test_a_function_that_raises(fail):
    failed = fail("single", "never", ends=2)
    line = line_with("no weights here")
    assert failed.error == f"model blocks:never: ValueError: no weights here (blocks.py:{line})"
    assert 'raise ValueError("no weights here")' in failed.traceback


@pytest.mark.parametrize("strategy", some_of(STRATEGIES, "multi_worker_mirrored"))
def test_a_model_with_nothing_to_train(dataset, tmp_path, monkeypatch, strategy):
    (tmp_path / "blocks.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    settings = {
        "model": {"name": "blocks:frozen"},
        "training": {"strategy": strategy, "steps": 50},
        "cluster": {"workers": 1},
    }
    with launched(settings, dataset, tmp_path / "run") as run:
        code, said = run.end()
    assert code == 2
    assert said.startswith(
        "model blocks:frozen: nothing can be trained, because all variables are frozen, by "
        "layers or by training.freeze ("
    )
    assert run.events(AttemptBegin) == []


@pytest.mark.parametrize("strategy", ["single", "async_parameter_server"])
def test_a_layer_that_raises_only_while_it_is_trained(fail, strategy):
    failed = fail(strategy, "late", error="traced")
    line = line_with('ValueError("bad shape")')
    assert failed.error == (f"your code raised ValueError: bad shape (blocks.py:{line})")
    assert "in reshaped" in failed.traceback


@pytest.mark.parametrize("strategy", ["single", "async_parameter_server"])
def test_a_layer_whose_graph_fails_on_an_example(fail, strategy):
    failed = fail(strategy, "late", error="run")
    line = line_with("assert_less")
    assert "too much" in failed.error
    assert failed.error.endswith(f"(blocks.py:{line})")
