"""A cancelled job publishes its last checkpoint, also when channels have to be opened for it.

The names of pods vanish with the job: what TensorFlow connects after that finds nobody.
"""

from __future__ import annotations

import os
import signal

import pytest

from components.kubernetes import names
from tests.components.kubernetes.attempts import step
from tests.kubernetes.cluster import NAMESPACE, real_cluster
from trainer import events, storage
from trainer.checkpoints.index import newest_checkpoint
from trainer.events import AttemptBegin, Progress

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
CANCELS = int(os.environ.get("FLOTILLA_CANCELS", "1"))
TRAINING = {"steps": 10**7, "checkpoint_every": 10**7, "validate_every": 0}
LOST = "worker-1"


@pytest.fixture
def kube(tmp_path, monkeypatch):
    with real_cluster(tmp_path) as made:
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
        yield made


class Training:
    """One cancelled run: a process that trains, and what it says."""

    def __init__(self, kube, folder, dataset):
        self.kube = kube
        self.root = storage.uri_of(folder)
        tree = {"training": TRAINING, "cluster": {"workers": 2, "max_restarts": 9}}
        self.step = step(kube, tree, root=self.root, dataset=dataset)

    def __enter__(self):
        self.process = self.step.__enter__()
        return self

    def __exit__(self, *error):
        self.step.__exit__(*error)

    def wait(self, kind, accept=lambda _: True):
        """Return the next event of a kind that is accepted."""
        for line in self.process.process.stdout:
            found = events.parse(line)
            if isinstance(found, kind) and accept(found):
                return found
        raise AssertionError(f"no such {kind.__name__}: {self.process.end()}")

    def lose(self, task):
        """Kill the container of a task, and wait for its new pod."""
        pod = self.kube.pod(task)["metadata"]
        self.kube.kubelet.kill(NAMESPACE, pod["name"])
        self.kube.pod(task, but=pod["uid"])

    def lose_a_worker(self):
        """Lose a worker, and wait until it takes part again."""
        before = steps_of(self.wait(Progress), LOST)
        self.lose(LOST)
        # What was dispatched to it before is counted as well.
        last = [before]

        def goes_on(progress):
            last.append(steps_of(progress, LOST))
            return len(last) > 3 and last[-4] < last[-3] < last[-2] < last[-1]

        self.wait(Progress, goes_on)

    def lose_a_server(self):
        """Lose the parameter server, and wait until the next attempt trains."""
        self.wait(Progress)
        self.lose("ps-0")
        self.wait(AttemptBegin)
        self.wait(Progress)

    def published(self):
        """Return the global step of the newest checkpoint, which has to be whole."""
        uri, reached = newest_checkpoint(storage.join(self.root, "checkpoints"))
        storage.verify(uri)
        return reached


def steps_of(progress, worker):
    return progress.metrics["workers"].get(worker, {}).get("local_steps", 0)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [pytest.param("worker", marks=pytest.mark.long), "server"])
def test_a_cancel_after_a_restart_publishes_the_last_checkpoint(kube, dataset, tmp_path, lost):
    for number in range(CANCELS):
        with Training(kube, tmp_path / f"run-{number}", dataset) as training:
            training.lose_a_worker() if lost == "worker" else training.lose_a_server()
            reached = training.wait(Progress).global_step
            training.process.signal(signal.SIGTERM)
            code, _, message = training.process.end()
        assert code == 130
        assert training.published() >= reached > 0, (number, message)
        assert f"interrupted at global step {training.published()}; checkpoint" in message
        kube.wait_until_deleted()


@pytest.mark.slow
def test_a_launcher_killed_after_its_request_leaves_a_checkpoint_and_no_job(
    kube, dataset, tmp_path
):
    with Training(kube, tmp_path / "run-0", dataset) as training:
        training.lose_a_worker()
        reached = training.wait(Progress).global_step
        training.process.signal(signal.SIGTERM)
        # As KFP may kill it a second later, and the exit step too.
        kube.store.wait(
            lambda: any(names.STOP in job["metadata"]["annotations"] for job in kube.jobs())
        )
        training.process.signal(signal.SIGKILL)
        training.process.end()
        kube.wait_until_deleted()
    assert training.published() >= reached > 0
