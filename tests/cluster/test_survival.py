"""Tests that a cluster survives lost or stalled tasks, failed attempts, and storage failures."""

import itertools
import json
import shutil
import signal
import subprocess
from contextlib import suppress

import psutil
import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import read_history
from flotilla.trainer.cluster import local, termination
from flotilla.trainer.cluster.launcher import END_FILE, Job
from flotilla.trainer.cluster.local import MAX_GROWTH, reserve_cluster
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import STRATEGIES
from flotilla.trainer.config.topology import Task
from flotilla.trainer.events import AttemptBegin, CheckpointPublished, Restart, TaskFailed
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import BEGIN_AGAIN, INTERRUPTED, TransientError
from tests.cluster.by_hand import by_hand
from tests.cluster.launched import SECONDS, launched, run_to_end, sections, some_of
from tests.cluster.test_job import PUBLISHED
from tests.kubernetes.cluster import shared
from tests.pipelines.called import Called, call, calling, setting
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SETTINGS = sections(2000, 200, max_restarts=3)


def test_a_second_interrupt_ends_at_once(dataset, tmp_path):
    endless = {**SETTINGS, "training": {**SETTINGS["training"], "steps": 10**7}}
    with launched(endless, dataset, tmp_path) as run:
        run.wait_for_step(50)
        tasks = run.tasks()
        run.task("chief-0").send_signal(signal.SIGSTOP)
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGTERM)
        code, said = run.end()
    assert code == 130
    assert "interrupted" in said
    _, alive = psutil.wait_procs(tasks, timeout=SECONDS)
    assert not alive


def test_past_the_limit_of_restarts_the_task_and_its_end_are_named(dataset, tmp_path):
    cluster = {**SETTINGS["cluster"], "max_restarts": 0}
    with launched({**SETTINGS, "cluster": cluster}, dataset, tmp_path) as run:
        run.wait_for_step(50)
        tasks = run.tasks()
        run.kill("worker-0")
        code, said = run.end()
    assert code == 1
    assert said.startswith("worker-0 ended with signal SIGKILL, and no restarts are left")
    log = str(tmp_path / "cluster" / "worker-0" / "log.txt")
    assert log in said
    (failed,) = run.events(TaskFailed)
    assert (failed.task, failed.cause) == ("worker-0", "signal SIGKILL")
    assert failed.log == log
    assert failed.last_lines[-1] in said
    _, alive = psutil.wait_procs(tasks, timeout=SECONDS)
    assert not alive


COMPLETION_STEPS = 60
MODULE = """
import os
import signal
from pathlib import Path

from flotilla.trainer.models.classifiers import softmax
from flotilla.trainer.training import chief

publish = chief.record_end


def die_once(job, checkpoint):
    mark = Path(job.workdir, "died")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return publish(job, checkpoint)


def model(spec):
    # The interrupt comes at the last moment: all steps are done, and the last checkpoint is
    # published.
    chief.record_end = die_once
    return softmax(spec)
"""


@pytest.mark.parametrize("strategy", some_of(STRATEGIES, "multi_worker_mirrored"))
def test_a_kill_between_the_last_checkpoint_and_the_record_costs_no_step(
    dataset, tmp_path, monkeypatch, strategy
):
    (tmp_path / "ends.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    training = {"strategy": strategy, "steps": COMPLETION_STEPS, "validate_every": 0}
    config = {"model": {"name": "ends:model"}, "training": training, "cluster": {"workers": 2}}
    run = run_to_end(config, dataset, tmp_path / "run")
    assert run.newest() == COMPLETION_STEPS
    path = tmp_path / "run" / "checkpoints" / END_FILE
    assert json.loads(path.read_text(encoding="utf-8"))["global_step"] == COMPLETION_STEPS
    # A mirrored strategy also restarts the other worker, which may be the first on a busy machine.
    restarts = run.events(Restart)
    assert f"signal {signal.SIGKILL.name}" in {each.cause for each in restarts}
    assert {each.restarts for each in restarts} == {1}


ATTEMPTS = 5
SERVERS = ("ps-0", "worker-0", "worker-1")
# With full recovery, the servers do not keep values between attempts. Kept values would take
# memory.
CHIEF_ATTEMPTS_SETTINGS = sections(10**7, 200, max_restarts=ATTEMPTS, recovery="full")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_after_five_attempts_the_servers_have_not_grown(dataset, tmp_path):
    with launched(CHIEF_ATTEMPTS_SETTINGS, dataset, tmp_path) as run:
        sizes = []
        for attempt in range(1, ATTEMPTS + 1):
            begun = run.wait_for(lambda event: isinstance(event, AttemptBegin))
            run.wait_for_step(begun.global_step + 400)
            sizes.append({name: run.task(name).memory_info().rss for name in SERVERS})
            if attempt < ATTEMPTS:
                run.kill("chief-0")
        run.process.send_signal(signal.SIGINT)
        code, said = run.end()
    assert code == 130, said
    restarts = run.events(Restart)
    assert [e.restarts for e in restarts if e.task == "chief-0"] == [1, 2, 3, 4]
    for event in restarts:
        grown = event.cause.startswith("memory growth from")
        assert grown == (event.task in SERVERS), event
    for name in SERVERS:
        megabytes = [round(size[name] / 2**20) for size in sizes]
        assert megabytes[-1] <= (1 + MAX_GROWTH) * megabytes[0], (name, megabytes)


# The interrupt comes before this step on any machine. With many more steps, the history would omit
# most rows.
HANDOVER_ENDLESS, MORE = 2 * 10**5, 40


@pytest.fixture
def run(kube, tmp_path, monkeypatch):
    """Return a function that starts or resumes the run on an engine, and may cancel it."""
    monkeypatch.delenv("FLOTILLA_EVENTS")
    kube.install_jobset()
    workdir = tmp_path / "runs"
    resume = []

    def run_on(launcher, steps=HANDOVER_ENDLESS):
        options = setting(
            cluster__launcher=launcher,
            training__steps=steps,
            training__checkpoint_every=HANDOVER_ENDLESS,
        )
        options += ["--set", shared(tmp_path)]
        if steps != HANDOVER_ENDLESS:
            return call("run", workdir, *resume, *options, cwd=tmp_path)
        with calling("run", workdir, *resume, *options, cwd=tmp_path) as process:
            next(line for line in process.stderr if line.startswith("global step"))
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate()
        ended = Called(code=process.returncode, out=out, err=err, workdir=workdir)
        assert ended.code == INTERRUPTED, err
        resume[:] = ["--resume", ended.answer["run_id"]]
        return ended

    return run_on


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_that_changes_its_engine_twice_ends_at_its_exact_step(kube, run):
    reached = []
    for launcher in ("tfjob", "jobset"):
        ended = run(launcher)
        kube.wait_until_deleted()
        reached.append(ended.events(CheckpointPublished)[-1].global_step)
        assert ended.answer["message"].startswith(f"interrupted at global step {reached[-1]}; ")
    ended = run("local", reached[-1] + MORE)
    assert (ended.code, ended.answer["global_step"]) == (0, reached[-1] + MORE), ended.err
    assert [begin.global_step for begin in ended.events(AttemptBegin)] == [0, *reached]
    assert 0 < reached[0] < reached[1]
    for artifact in PUBLISHED:
        storage.verify(ended.answer["artifacts"][artifact])
    checkpoints = storage.join(storage.uri_of(ended.workdir), ended.folder.name, "checkpoints")
    steps = [row["global_step"] for row in read_history(checkpoints)]
    assert steps == sorted(set(steps))
    assert steps[-1] == reached[-1] + MORE
    for begin, end in itertools.pairwise([0, *reached, reached[-1] + MORE]):
        assert [step for step in steps if begin < step <= end]


EVERY = 200

STALLED_STEPS = 1500
STALL_SECONDS = 8


def settings(strategy: str, **cluster: object) -> dict[str, object]:
    training = {"strategy": strategy, "stall_timeout": STALL_SECONDS}
    return sections(STALLED_STEPS, EVERY, training, max_restarts=2, **cluster)


ASYNC, SYNC, MIRRORED = "async_parameter_server", "sync_parameter_server", "multi_worker_mirrored"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("strategy", "task", "attempts"),
    [
        (ASYNC, "chief-0", 2),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                (ASYNC, "ps-0", 2),
                (ASYNC, "worker-1", 1),
                (SYNC, "worker-1", 1),
                (MIRRORED, "worker-0", 2),
                (MIRRORED, "worker-1", 2),
                ("in_graph", "worker-0", 2),
            )
        ),
    ],
)
def test_a_stopped_task_costs_at_most_an_attempt(dataset, tmp_path, strategy, task, attempts):
    ring = {"communication": "ring"} if strategy == MIRRORED else {}
    with launched(settings(strategy, **ring), dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 1)
        run.task(task).send_signal(signal.SIGSTOP)
        code, said = run.end()
        assert code == 0, said
    assert STALLED_STEPS <= run.newest() <= STALLED_STEPS + 1
    restarts, begun = run.events(Restart), run.events(AttemptBegin)
    # Mirrored workers begin again together, and the waiting one may be the first.
    together = {"worker-0", "worker-1"} if strategy == MIRRORED else {task}
    seconds = 2 * STALL_SECONDS if task == "chief-0" else STALL_SECONDS
    assert (restarts[0].task, restarts[0].cause) in [
        (task, f"no heartbeat for {seconds} s"),
        *((each, f"exit code {BEGIN_AGAIN}") for each in together - {task}),
    ]
    assert strategy != MIRRORED or {event.task for event in restarts} == together
    assert {event.restarts for event in restarts} == {1}
    assert len(begun) == attempts
    for attempt in begun[1:]:
        assert attempt.global_step >= EVERY
        assert attempt.global_step % EVERY == 0


@pytest.mark.long
def test_without_a_supervisor_a_waiting_task_names_the_silent_one(dataset, tmp_path):
    waits, stops = (Task(role="worker", index=index) for index in range(2))
    config = settings("multi_worker_mirrored", communication="ring")
    config["training"]["steps"] = 100_000
    with (
        reserve_cluster({"worker": 2}) as cluster,
        by_hand(tmp_path, dataset, cluster, config) as tasks,
    ):
        for task in (waits, stops):
            tasks.start(task)
        tasks.wait_for(waits, '"event": "progress"')
        tasks.processes[stops].send_signal(signal.SIGSTOP)
        assert tasks.end_of(waits) == BEGIN_AGAIN, tasks.log(waits)
    message = termination.read(tmp_path / str(waits))
    # A heartbeat of TensorFlow may have timed out first.
    assert message.startswith(
        (
            f"no progress for {STALL_SECONDS} s: worker-1 does not answer",
            "a task of the cluster is gone",
        )
    )
    assert "worker-1" in message


DISK_EVERY = 100


def settings_of_disk(steps):
    return sections(steps, DISK_EVERY, {"strategy": "single", "keep": 9})


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of one megabyte as the checkpoint folder."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder):
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while True:
                    file.write(b"." * size)
    assert not shutil.disk_usage(folder).free
    return filler


def test_a_full_disk_ends_with_one_line_and_training_goes_on_when_there_is_room(
    dataset, tmp_path, small_disk
):
    with launched(settings_of_disk(10**7), dataset, tmp_path) as run:
        run.wait_for(lambda e: isinstance(e, CheckpointPublished) and e.global_step >= DISK_EVERY)
        filler = fill(small_disk)
        code, said = run.end()
        last = run.newest()
    assert code == 1
    assert said.count("\n") == 1
    assert "No space left on device" in said
    assert not run.events(Restart)
    filler.unlink()
    again = run_to_end(settings_of_disk(last + DISK_EVERY), dataset, tmp_path)
    assert [event.global_step for event in again.events(AttemptBegin)] == [last]
    assert again.newest() == last + DISK_EVERY


def test_a_store_that_is_out_for_too_long_is_a_failure_that_may_pass(
    dataset, tmp_path, monkeypatch, s3
):
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.5")
    s3.plan.add(Fault(503, times=10**6))
    job = Job(
        config=parse_config(settings_of_disk(DISK_EVERY)),
        dataset=dataset,
        checkpoints=f"s3://{bucket_name()}/run",
        workdir=tmp_path / "cluster",
    )
    with pytest.raises(TransientError, match=r"has not been available .* \(chief-0, log "):
        local.launch(job)
