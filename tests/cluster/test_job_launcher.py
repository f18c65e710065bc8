"""The launcher of a job on Kubernetes is killed: adopted by the next one, or ended by the guard."""

from __future__ import annotations

import os
import random
import signal

import pytest

from components import launchers
from components.kubernetes.launcher import delete_jobs
from tests.cluster.job_training import on_engines
from trainer.config.schema import Config
from trainer.events import AttemptBegin, Progress

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]
KILLS = int(os.environ.get("FLOTILLA_KILLS", "3"))


@on_engines(tfjob=pytest.mark.long)
def test_the_job_of_a_killed_launcher_is_adopted_while_it_trains(training):
    # Longer than the next launcher takes to start.
    settings = {"every": 1000, "kubernetes": {"deadlines": {"heartbeat": 60}}}
    with training.begun(10_000, **settings):
        training.wait(Progress)
        job, pods = training.job()["metadata"]["uid"], training.uids()
        training.kill_launcher()
    with training.begun(10_000, **settings):
        training.wait(Progress)
        assert (training.job()["metadata"]["uid"], training.uids()) == (job, pods)
        code, message = training.end()
    assert (code, training.published()) == (0, 10_000), message
    assert {each.resumed for each in training.said(AttemptBegin)} == {False}
    training.require_nothing_left()


@on_engines(tfjob=pytest.mark.long, jobset=pytest.mark.long)
def test_a_launcher_killed_at_random_leaves_no_orphan_and_a_valid_checkpoint(training):
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    kube = training.kube
    for _ in range(KILLS):
        # Between the creation of the job and the middle of training.
        after = len(kube.server.requests) + chance.randrange(1, 25)
        with training.begun(800):
            process = training.step.process
            kube.store.wait(
                lambda p=process, after=after: (
                    len(kube.server.requests) >= after or p.poll() is not None
                )
            )
            training.kill_launcher()
        if chance.random() < 0.3:
            engine = launchers.engine(training.engine)
            delete_jobs(engine, Config().cluster.kubernetes, "run-1")
            kube.wait_until_deleted()
    with training.begun(800):
        code, message = training.end()
    assert (code, training.published()) == (0, 800), (seed, message)
    training.require_nothing_left()


@on_engines(tfjob=pytest.mark.long)
def test_without_a_heartbeat_the_guard_ends_the_job_with_a_last_checkpoint(training):
    deadlines = {"heartbeat": 10}
    with training.begun(10**7, every=10**7, kubernetes={"deadlines": deadlines}):
        reached = training.wait(Progress).global_step
        training.step.signal(signal.SIGKILL)
        training.require_nothing_left()
    assert training.published() >= reached > 0
