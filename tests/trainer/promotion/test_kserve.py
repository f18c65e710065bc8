"""Where KServe is told to look, for each scheme of storage."""

from __future__ import annotations

import pytest
import yaml

from trainer.promotion import kserve


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("gs://bucket/run/model", "gs://bucket/run/model/serving/digits"),
        ("s3://bucket/run/model", "s3://bucket/run/model/serving/digits"),
        ("minio://bucket/run/model", "s3://bucket/run/model/serving/digits"),
        (
            "s3://bucket/run/model?endpoint=http://store:9000&disableSSL=true",
            "s3://bucket/run/model/serving/digits",
        ),
        ("minio://bucket/50%25?region=eu", "s3://bucket/50%/serving/digits"),
        ("file:///runs/a%20b/model", "file:///runs/a%20b/model/serving/digits"),
    ],
)
def test_kserve_gets_a_uri_that_it_knows(uri, place):
    service = yaml.safe_load(kserve.service("digits", uri))
    assert service["spec"]["predictor"]["model"]["storageUri"] == place
