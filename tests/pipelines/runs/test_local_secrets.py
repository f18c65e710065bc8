"""A whole run writes none of the secrets that are around it, in a good end and in a bad one."""

from __future__ import annotations

import base64
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.pipelines.called import call, setting
from tests.planted import SECRETS, found_in, plant
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

FEW = setting(
    training__steps=20,
    training__strategy="single",
    training__checkpoint_every=10,
    training__validate_every=10,
    gate__min__accuracy=0.01,
)
# A body of a store whose words have what it was sent.
REFUSAL = (
    "<Error><Code>AccessDenied</Code><Message>denied: Authorization: Bearer {0} at "
    "https://u:{0}@h/x?X-Amz-Signature={0}</Message></Error>"
)


@pytest.fixture
def planted(tmp_path, monkeypatch, s3):
    plant(tmp_path / "home", monkeypatch)
    return s3


def written(tmp_path: Path, called, server, bucket):
    folder = tmp_path / "work"
    texts = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts |= {key: server.content(bucket, key) for key in server.keys(bucket)}
    return texts | {"stdout": called.out.encode(), "stderr": called.err.encode()}


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_found_in_every_form(secret):
    plain = SECRETS[secret]
    for text in (plain, quote(plain, safe=""), base64.b64encode(f"user:{plain}".encode()).decode()):
        assert (secret, "x") in list(found_in({"x": f"a {text} b".encode()}))


def test_a_whole_run_writes_no_secret(planted, tmp_path):
    bucket = bucket_name()
    planted.create_bucket(bucket)
    (tmp_path / "work").mkdir()
    root = setting(storage__root=f"s3://{bucket}/runs")
    done = call("run", tmp_path / "work" / "runs", *FEW, *root, cwd=tmp_path / "work")
    assert done.code == 0, done.err + done.log
    texts = written(tmp_path, done, planted, bucket)
    assert {"events.jsonl", "config.json", "pipeline.log"} <= {Path(name).name for name in texts}
    assert any(name.endswith("report.html") for name in texts)
    assert list(found_in(texts)) == []


def test_a_run_that_the_store_refuses_writes_no_secret(planted, tmp_path):
    bucket = bucket_name()
    planted.create_bucket(bucket)
    (tmp_path / "work").mkdir()
    body = REFUSAL.format(SECRETS["key"]).encode()
    planted.plan.add(Fault(403, method="PUT", path="MANIFEST", body=body, times=99))
    root = setting(storage__root=f"s3://{bucket}/runs")
    done = call("run", tmp_path / "work" / "runs", *FEW, *root, cwd=tmp_path / "work")
    assert done.code == 1
    assert list(found_in(written(tmp_path, done, planted, bucket))) == []
