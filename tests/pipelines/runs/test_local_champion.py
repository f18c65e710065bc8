"""`flotilla run` that begins with the champion: from scratch, then at the champion's loss."""

from __future__ import annotations

import shutil

import pytest

from tests.pipelines.called import call, setting
from trainer import storage
from trainer.events import AttemptBegin, Progress, WarmStart
from trainer.promotion import registry

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

FEW = setting(training__checkpoint_every=100, gate__min__accuracy=0.5)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("champion") / "runs"


@pytest.fixture(scope="module")
def first(workdir):
    """A run that asks for the champion when there is none, and becomes it."""
    steps = setting(training__steps=600, training__warm_start="champion")
    called = call("run", workdir, *FEW, *steps, cwd=workdir.parent)
    assert called.code == 0, called.err + called.log
    return called


@pytest.fixture(scope="module")
def second(workdir, first):
    assert first.answer["status"] == "blessed"
    steps = setting(
        training__steps=60,
        training__warm_start="champion",
        training__validate_every=20,
        training__optimizer__learning_rate=0.0005,
    )
    called = call("run", workdir, *FEW, *steps, cwd=workdir.parent)
    assert called.code == 0, called.err + called.log
    return called


def test_the_first_run_begins_from_scratch_and_says_so(first):
    root = storage.uri_of(first.workdir)
    line = f"training begins from scratch: digits has no champion yet below {root}"
    assert first.err.splitlines().count(line) == 1
    manifest = storage.read_manifest(first.answer["artifacts"]["checkpoint"])
    assert manifest.fields["warmed_from"] == ""


def test_the_second_run_begins_at_the_champions_loss(first, second):
    champion = first.answer["metrics"]["loss"]
    rows = [e for e in second.events(Progress) if e.global_step <= 20]
    cold = first.events(Progress)[0]
    assert champion < 0.5 < cold.loss
    assert rows
    assert all(row.loss < champion + 0.15 for row in rows)
    uri = first.answer["artifacts"]["checkpoint"]
    line = f"training begins with the weights of {uri}: 4 variables taken"
    assert line in second.err.splitlines()


def test_manifest_and_lineage_say_what_it_began_with(first, second):
    uri = first.answer["artifacts"]["checkpoint"]
    manifest = storage.read_manifest(second.answer["artifacts"]["checkpoint"])
    assert manifest.fields["warmed_from"] == uri
    root = storage.uri_of(second.workdir)
    one, two = registry.versions(root, "digits")
    assert one.manifest.fields["lineage"]["warmed_from"] == ""
    assert two.manifest.fields["lineage"]["warmed_from"] == uri


def test_a_resumed_run_goes_on_from_its_own_checkpoint(workdir, first, second):
    # The champion is the second run itself by now, and the checkpoint of the first one is gone.
    shutil.rmtree(first.folder / "checkpoints")
    more = [*setting(training__steps=90), "--resume", second.answer["run_id"]]
    called = call("train", workdir, *more, cwd=workdir.parent)
    assert called.code == 0, called.err + called.log
    first_attempt, second_attempt = called.events(AttemptBegin)
    assert (first_attempt.resumed, second_attempt.resumed) == (False, True)
    assert second_attempt.global_step == 60
    assert len(called.events(WarmStart)) == 1
    manifest = storage.read_manifest(called.answer["artifacts"]["checkpoint"])
    assert called.answer["global_step"] == 90
    assert manifest.fields["warmed_from"] == first.answer["artifacts"]["checkpoint"]
