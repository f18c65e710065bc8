"""Tests of measurements: speed, memory, imported modules, and the cost of checkpoints."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import launched, memory, training, watched, whole_run
from benchmarks.launched import _speed, clocked
from benchmarks.on_gpu import on_gpu, present
from benchmarks.startup import PROCESSES
from benchmarks.storage import WINDOW, taken
from benchmarks.watched import Look, Used
from flotilla.trainer.config.load import load_config
from flotilla.trainer.events import Progress, RunBegin, Saved
from tests.house_rules.source import ROOT


def progress(step, time, **metrics):
    known = {"steps": 90, "loss": 1.0, "steps_per_second": 0.0, "seconds_left": 0.0}
    return Progress(time=time, global_step=step, metrics=metrics, **known)


def test_the_clock_stops_for_checkpoints_only():
    rows = clocked(
        [
            RunBegin(time=90.0, run_id="bench", number=1),
            progress(10, 100.0),
            Saved(time=103.0, uri="", global_step=10, seconds=3.0),
            progress(20, 105.0),
            progress(30, 107.0),
        ]
    )
    assert [row.seconds for row in rows] == [100.0, 102.0, 104.0]
    assert [row.global_step for row in rows] == [10, 20, 30]


def test_speed_is_that_after_the_first_tenth():
    rows = clocked([progress(5, 10.0), progress(10, 20.0), progress(50, 24.0), progress(90, 28.0)])
    assert _speed(rows, lambda row: row.global_step) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("measure", "theirs"),
    [
        (training.asynchronous, "baseline"),
        (training.synchronous, "baseline"),
        (training.one_process, "fit"),
        (training.one_process_compiled, "fit"),
    ],
)
def test_a_ratio_is_ours_over_theirs(monkeypatch, measure, theirs):
    class Trained:
        steps_per_second = 30.0

    monkeypatch.setattr(training._Bench, "train", lambda *_args, **_settings: Trained())
    monkeypatch.setattr(training._Bench, theirs, lambda *_args, **_settings: 10.0)
    found = measure()
    assert found.ratio == pytest.approx(3.0)
    assert len(found.rounds) >= 3
    assert found.more["steps_per_second"] == [[30.0, 10.0]] * len(found.rounds)


MEGABYTE = 1 << 20


def look(step, **megabytes):
    tasks = {
        name.replace("_", "-"): Used(resident_bytes=each * MEGABYTE, cpu_seconds=1.0)
        for name, each in megabytes.items()
    }
    return Look(global_step=step, time=0.0, tasks=tasks)


EARLY = look(5_000, chief_0=800, ps_0=500, worker_0=600, worker_1=600)


@pytest.mark.parametrize(
    ("late", "ratio", "holds"),
    [
        (look(50_000, chief_0=800, ps_0=500, worker_0=600, worker_1=600), 1.0, True),
        (look(50_000, chief_0=800, ps_0=500, worker_0=600, worker_1=636), 1.06, False),
        (look(50_000, chief_0=880, ps_0=500, worker_0=600, worker_1=600), 1.1, False),
        # The growth of a server's memory is reported, but not limited.
        (look(50_000, chief_0=800, ps_0=900, worker_0=600, worker_1=540), 1.0, True),
    ],
)
def test_the_task_that_grows_most_is_judged(monkeypatch, late, ratio, holds):
    asked = []

    def seen(config, workdir, steps, dataset=""):  # noqa: ARG001
        asked.append((config.training.steps, steps))
        return EARLY, late

    monkeypatch.setattr(memory, "watched", seen)
    tree = memory.memory().tree()
    assert (tree["ratio"], tree["holds"]) == (pytest.approx(ratio), holds)
    assert tree["megabytes"][0]["ps-0"] == [500, late.tasks["ps-0"].resident_bytes // MEGABYTE]
    assert asked == [(51_000, [5_000, 50_000])] * memory.ROUNDS


@pytest.mark.cluster
@pytest.mark.long
def test_rows_of_the_table_that_is_watched_are_given_to_other_ids(tmp_path):
    settings = {**memory.OF_TABLE, "training.steps": 3_000}
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    (last,) = watched.watched(config, tmp_path, [2_500])
    found = last.metrics["tables"]["table"]
    assert found["rows"] <= 6_000
    assert found["evicted"] > 1_000


@pytest.mark.cluster
@pytest.mark.long
def test_a_run_is_looked_at_when_its_steps_are_reached(tmp_path):
    config = load_config(None, ["training.steps=600", "model.name=softmax", "model.args={}"])
    first, last = watched.watched(config, tmp_path, [100, 400])
    assert 100 <= first.global_step < 400 <= last.global_step <= 600
    assert set(last.tasks) == {"chief-0", "ps-0", "worker-0", "worker-1"}
    for task, used in last.tasks.items():
        assert used.cpu_seconds > first.tasks[task].cpu_seconds > 0.1
        assert used.resident_bytes > 100 * MEGABYTE
    assert first.time < last.time


@pytest.mark.slow
def test_a_run_that_fails_is_reported(tmp_path):
    config = load_config(None, ["data.dataset=no_such_dataset"])
    with pytest.raises(RuntimeError, match="no_such_dataset"):
        watched.watched(config, tmp_path, [100])


def test_a_whole_run_is_timed_with_its_words(tmp_path, monkeypatch):
    said = tmp_path / "said"
    (tmp_path / "flotilla").write_text(f'#!/bin/sh\necho "$@" > {said}\necho "{{}}"\n')
    (tmp_path / "flotilla").chmod(0o755)
    monkeypatch.setattr(whole_run.sys, "executable", str(tmp_path / "python"))
    assert whole_run.run_seconds(tmp_path / "runs", "training.steps=5") > 0
    words = said.read_text().split()
    assert words[:2] == ["run", whole_run.CONFIG]
    assert Path(words[words.index("--workdir") + 1]) == tmp_path / "runs"
    assert words[-1] == "--set=training.steps=5"


NEVER = {
    "apache_beam", "boto3", "google.cloud.storage", "IPython", "kfp.client", "kubernetes",
    "matplotlib", "mlflow", "pandas",
}  # fmt: skip
TENSORFLOW = {"tensorflow", "keras"}
# Processes that compute with the model; only these load TensorFlow.
COMPUTE = {
    "evaluate_model", "export_model", "task: chief", "task: worker", "task: evaluator",
    "task: server",
}  # fmt: skip
PROGRAM = """
import importlib, sys
from flotilla.trainer.runtime import tensorflow_import
tensorflow_import.prepare()
names, forbidden = (each.split(",") for each in sys.argv[1:])
for name in names:
    importlib.import_module(name)
print(",".join(each for each in forbidden if each in sys.modules))
"""


def loads(name, forbidden):
    command = [sys.executable, "-c", PROGRAM, ",".join(PROCESSES[name]), ",".join(forbidden)]
    environment = {"_KFP_RUNTIME": "true", "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": ""}
    if name == "task: server":
        environment["TF_USE_LEGACY_KERAS"] = "1"
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROCESSES))
def test_a_process_loads_nothing_heavy_that_it_does_not_need(name):
    if name in COMPUTE:
        others = {"keras", "sklearn", "kfp"} if name == "task: server" else set()
    else:
        others = TENSORFLOW | ({"sklearn"} if name == "prepare_data" else {"sklearn", "scipy"})
    assert not loads(name, sorted(NEVER | others))


def saving(saved, *, stall, drift=0.0):
    """Return events of a minute of training, with a pause after each second in `saved`."""
    events, step, time = [], 0.0, 0.0
    for second in range(60):
        step, time = step + 100 + drift * second, time + 1
        events.append(progress(step, time))
        if second + 1 in saved:
            time += stall
            events.append(Saved(time=time, uri="", global_step=0, seconds=stall))
    return events


@pytest.mark.parametrize("stall", [0.0, 0.25, 1.0])
def test_the_seconds_of_a_stall_are_what_it_took(stall):
    (found,) = taken(saving([30], stall=stall))
    assert found.seconds == pytest.approx(stall, abs=1e-6)
    assert found.stall == stall


def test_slow_seconds_after_it_count_too():
    events = [
        replace(each, global_step=each.global_step - 50 * min(2.0, max(0.0, each.time - 30)))
        for each in saving([30], stall=0.0)
    ]
    (found,) = taken(events)
    assert found.seconds == pytest.approx(1.0)


def test_only_those_count_that_have_windows_around_them():
    whole = [10, 30, 45]
    assert len(taken(saving([1, 2, *whole, 46 + WINDOW, 60], stall=0.0))) == len(whole)


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.skipif(not present(), reason="needs a GPU")
def test_both_sides_train(mnist_dir, monkeypatch):
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(mnist_dir))
    monkeypatch.setitem(launched.SAME_AS_BASELINE, "data.manual_dir", str(mnist_dir))
    found = on_gpu(steps=60)
    assert len(found.rounds) == 3
    assert min(found.rounds) > 0
    assert all(each > 0 for pair in found.more["examples_per_second"] for each in pair)
