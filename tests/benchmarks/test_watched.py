"""Runs that are watched: what each task holds and has used, and the comparison of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import memory, watched, whole_run
from benchmarks.watched import Look, Used, tasks_below
from trainer.config.load import load_config

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
        # The server is reported and not judged.
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


def test_with_a_table_the_server_is_judged_too(monkeypatch):
    def seen(config, workdir, steps, dataset=""):  # noqa: ARG001
        assert config.model.name == "benchmarks.growing_tables:drifting"
        tables = {"tables": {"table": {"rows": 6_000, "evicted": 7, "turned_away": 8}}}
        late = look(50_000, chief_0=800, ps_0=550, worker_0=600, worker_1=600)
        return [replace(each, metrics=tables) for each in (*[EARLY] * (len(steps) - 1), late)]

    monkeypatch.setattr(memory, "watched", seen)
    tree = memory.table_memory().tree()
    assert (tree["ratio"], tree["holds"]) == (pytest.approx(1.1), False)
    assert tree["megabytes"]["ps-0"] == [500, 500, 500, 500, 500, 550]
    assert tree["evicted"] == [7] * 6


@pytest.mark.cluster
@pytest.mark.long
def test_rows_of_the_table_that_is_watched_are_given_to_other_ids(tmp_path):
    settings = {**memory.OF_TABLE, "training.steps": 3_000}
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    (last,) = watched.watched(config, tmp_path, [2_500])
    found = last.metrics["tables"]["table"]
    assert found["rows"] <= 6_000
    assert found["evicted"] > 1_000


def test_tasks_are_known_by_their_folder(tmp_path):
    # Any program will do that has a task's command line.
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/__init__.py").touch()
    (tmp_path / "trainer/__main__.py").write_text("print(flush=True)\ninput()\n")
    command = [sys.executable, "-m", "trainer", "task", "--workdir"]
    settings = {**os.environ, "PYTHONPATH": str(tmp_path)}
    running = [
        subprocess.Popen([*command, str(place)], cwd=tmp_path, env=settings, stdin=-1, stdout=-1)
        for place in (tmp_path / "run/cluster/worker-0", tmp_path / "other/cluster/worker-1")
    ]
    try:
        for process in running:
            assert process.stdout.readline() == b"\n"
        found = tasks_below(tmp_path / "run")
        assert list(found) == ["worker-0"]
        assert found["worker-0"].resident_bytes > MEGABYTE
        assert found["worker-0"].cpu_seconds >= 0
    finally:
        for process in running:
            process.communicate()
    assert tasks_below(tmp_path / "run") == {}


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


def test_a_whole_run_that_is_refused_is_no_comparison(tmp_path, monkeypatch):
    (tmp_path / "flotilla").write_text('#!/bin/sh\necho \'{"status": "refused"}\'\nexit 3\n')
    (tmp_path / "flotilla").chmod(0o755)
    monkeypatch.setattr(whole_run.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(RuntimeError, match="exit code 3, refused"):
        whole_run.run_seconds(tmp_path)


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
