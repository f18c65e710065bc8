"""Tests a program whose checkpoints are in an object store."""

import shutil

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import read_history
from flotilla.trainer.cluster import completion
from flotilla.trainer.cluster.local import launch
from flotilla.trainer.program.publication import find_published
from flotilla.trainer.runtime.errors import UserError
from tests.stores.fixtures import bucket_name
from tests.trainer.program.runs import COUNT, make_job, published_steps

# A program that always fails after step 3, unless a certain file exists.
FAILS = COUNT.replace(
    "    save(step)\nmodel",
    "    save(step)\n    step == 3 and not os.path.exists(sys.argv[2]) and sys.exit(3)\nmodel",
)


@pytest.mark.cluster
def test_a_run_is_resumed_from_an_object_store(tmp_path, s3):
    bucket = bucket_name()
    s3.create_bucket(bucket)
    checkpoints = f"s3://{bucket}/run/checkpoints"

    may = tmp_path / "may"
    job = make_job(tmp_path, FAILS, "6", str(may), at=checkpoints, training={"keep": 2})
    with pytest.raises(UserError, match="exit code 3"):
        launch(job)
    assert published_steps(job)[-1] == 3
    may.touch()
    # A different machine has no local files of the first one.
    shutil.rmtree(job.workdir)
    launch(job)
    assert "begins at 3" in (job.workdir / "chief-0" / "log.txt").read_text()
    uri, step = find_published(checkpoints)
    assert step == 6
    assert storage.read_file(uri, "model/a.txt") == b"model"
    assert storage.verify(uri).fields["program"]["checkpoint"]
    assert completion.is_over(job)
    assert read_history(checkpoints)[-1]["global_step"] == 6
