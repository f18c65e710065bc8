"""`flotilla run` on an S3 store that goes out in every stage: nothing ends, all is whole."""

import threading

import pytest

from tests.pipelines.called import call, setting
from tests.stores.fixtures import bucket_name
from tests.stores.link import link
from trainer import storage

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

# A part of what each stage asks the store for.
STAGES = (
    "/datasets/", "/step-", "/logs/", "/evaluation/", "/decision/", "/model/", "/registry/",
    "report.html",
)  # fmt: skip


def test_an_outage_in_every_stage_ends_no_run(s3, monkeypatch, tmp_path):
    bucket = bucket_name()
    s3.create_bucket(bucket)
    left, healers = list(STAGES), []
    with link(int(s3.url.rpartition(":")[2])) as wire:

        def strike(request):
            if stage := next((each for each in left if each in request), ""):
                left.remove(stage)
                wire.becomes("refuse")
                healers.append(threading.Timer(1.0, wire.becomes, ["whole"]))
                healers[-1].start()

        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.url)
        monkeypatch.setattr(s3.plan, "before", strike)
        settings = setting(
            storage__root=f"s3://{bucket}/root",
            training__strategy="single",
            training__steps=200,
            training__checkpoint_every=100,
            gate__min__accuracy=0.5,
        )
        done = call("run", tmp_path / "runs", *settings, cwd=tmp_path)
        for each in healers:
            each.join()
        assert done.code == 0, done.err + done.log
        assert left == []
        assert done.answer["global_step"] == 200
        assert set(done.statuses().values()) == {"done"}
        artifacts = dict(done.answer["artifacts"])
        assert storage.read_bytes(artifacts.pop("report"))
        for uri in artifacts.values():
            storage.verify(uri)
        assert storage.collect_garbage(f"s3://{bucket}/root") == []
