"""One run on three engines: begun as a TFJob, continued as a JobSet, ended on this machine."""

from __future__ import annotations

import itertools
import signal

import pytest

from tests.cluster.test_job_training import PUBLISHED
from tests.pipelines.called import Called, call, calling, setting
from trainer import storage
from trainer.checkpoints.history import read_history
from trainer.errors import INTERRUPTED
from trainer.events import AttemptBegin, CheckpointPublished

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]
# More than any machine trains before the interrupt, and few enough for a history of each leg.
ENDLESS, MORE = 2 * 10**5, 40


@pytest.fixture
def run(kube, tmp_path, monkeypatch):
    """Return what starts or resumes the run on an engine, and cancels it unless it may end."""
    monkeypatch.delenv("FLOTILLA_EVENTS")
    kube.install_jobset()
    workdir = tmp_path / "runs"
    resume = []

    def run_on(launcher, steps=ENDLESS):
        options = setting(
            cluster__launcher=launcher, training__steps=steps, training__checkpoint_every=ENDLESS
        )
        if steps != ENDLESS:
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
    # Each engine has added its own.
    for begin, end in itertools.pairwise([0, *reached, reached[-1] + MORE]):
        assert [step for step in steps if begin < step <= end]
