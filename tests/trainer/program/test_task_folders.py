"""Tests the environment and the command line that a program receives."""

import json

import pytest

from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.program.task_folders import guard_environment, make_start
from tests.trainer.program.runs import make_job

CLUSTER = Cluster(addresses={"ps": ("a:1",), "worker": ("b:1", "c:1")})
TASK = Task(role="worker", index=1)


POD = {"resources": {"limits": {"nvidia.com/gpu": 2}}}


@pytest.mark.parametrize(
    "cluster", [{"gpus_per_worker": 2}, {"launcher": "jobset", "kubernetes": {"pod": POD}}]
)
def test_the_words_and_the_environment_are_filled(tmp_path, cluster):
    words = [
        "--ps_hosts={ps_hosts}", "--worker_hosts={worker_hosts}", "--job_name={role}",
        "--task_index={task_index}", "--gpu={gpu}", "--data={dataset_files}", '{"a": 1}',
    ]  # fmt: skip
    job = make_job(
        tmp_path,
        "",
        *words,
        roles={"ps": 1, "worker": 2},
        program={"env": {"OWN": "{steps} {seed}"}, "data": "files"},
        cluster=cluster,
    )
    start = make_start(job, CLUSTER, TASK, 3)
    assert start["command"][2:] == [
        "--ps_hosts=a:1", "--worker_hosts=b:1,c:1", "--job_name=worker", "--task_index=1",
        "--gpu=1", f"--data={job.workdir}/dataset", '{"a": 1}',
    ]  # fmt: skip
    env = start["env"]
    assert env["OWN"] == "1500 0"
    assert json.loads(env["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert env["FLOTILLA_CHECKPOINTS"] == f"{job.workdir}/checkpoints"
    assert env["FLOTILLA_RUN_ID"] == "run"


def test_a_guard_inherits_nothing_of_our_own_processes(monkeypatch):
    for name in ("FLOTILLA_JOB", "FLOTILLA_HEARTBEAT", "PYTHONSAFEPATH", "OWN"):
        monkeypatch.setenv(name, "1")
    found = guard_environment("/bin/of/python")
    assert found["OWN"] == "1"
    assert not {"FLOTILLA_JOB", "FLOTILLA_HEARTBEAT", "PYTHONSAFEPATH"} & found.keys()
    assert found["PATH"].startswith("/bin/of/python:")
