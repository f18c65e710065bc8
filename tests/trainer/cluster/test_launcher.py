"""What every launcher takes: a job that is data, and one way to be called."""

import inspect
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from components import launchers
from trainer.cluster import local
from trainer.cluster.launcher import Job, Launcher
from trainer.config.schema import Config

JOB = Job(config=Config(), dataset="file:///d", checkpoints="file:///c", workdir=Path("work"))


def test_a_job_is_frozen_and_named_by_keyword():
    with pytest.raises(FrozenInstanceError):
        JOB.dataset = "file:///other"
    with pytest.raises(TypeError):
        Job(Config(), "file:///d", "file:///c", Path("work"))


def test_a_job_has_no_defaults_that_hide():
    for field in fields(Job):
        arguments = {each.name: getattr(JOB, each.name) for each in fields(Job)}
        del arguments[field.name]
        with pytest.raises(TypeError, match=field.name):
            Job(**arguments)


@pytest.mark.parametrize("uri", ["gs://b/a/{}", "minio://b/{}?endpoint=http://store:9000&region=x"])
def test_a_job_knows_its_run_by_where_it_publishes(uri):
    checkpoints = uri.format("run-7/checkpoints")
    job = Job(config=Config(), dataset="", checkpoints=checkpoints, workdir=Path())
    assert job.run_id == "run-7"


@pytest.mark.parametrize("launch", [local.launch, launchers.launch])
def test_a_launcher_is_called_with_a_job_and_gives_nothing_back(launch):
    asked = inspect.signature(Launcher.__call__)
    given = inspect.signature(launch)
    needed = [p.name for p in given.parameters.values() if p.default is inspect.Parameter.empty]
    assert needed == list(asked.parameters)[1:]
    assert given.return_annotation == asked.return_annotation == "None"
