"""Tests the id that a job derives from its checkpoint folder."""

from pathlib import Path

import pytest

from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.schema import Config


@pytest.mark.parametrize("uri", ["gs://b/a/{}", "minio://b/{}?endpoint=http://store:9000&region=x"])
def test_a_job_knows_its_run_by_where_it_publishes(uri):
    checkpoints = uri.format("run-7/checkpoints")
    job = Job(config=Config(), dataset="", checkpoints=checkpoints, workdir=Path())
    assert job.run_id == "run-7"
