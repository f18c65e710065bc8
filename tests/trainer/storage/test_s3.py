"""Tests damaged uploads to S3, and the endpoints and credentials of stores."""

import builtins
import os

import pytest

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage import s3
from flotilla.trainer.storage.manifest import MANIFEST
from flotilla.trainer.storage.s3 import client
from flotilla.trainer.storage.uri import (
    KFP_ENDPOINT,
    Endpoint,
    find_endpoint,
    kfp_credentials,
    locate,
    plain_http_remark,
)
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name

from .conftest import FILES
from .places import BucketPlace, fetched


@pytest.fixture
def place(s3):
    """Return a bucket in a store that does not check MD5 sums."""
    return BucketPlace(s3, f"s3://{bucket_name()}")


def uri_in(place):
    return storage.join(place.root, "a")


@pytest.mark.parametrize("path", [MANIFEST, r"a\.bin"])
def test_what_arrives_damaged_is_sent_again(make, place, tmp_path, path):
    place.plan.add(Fault("mangle", method="PUT", path=path, times=2))
    manifest = storage.publish(make(), uri_in(place), kind="x")
    assert place.plan.faults[0].times == 0
    assert storage.verify(uri_in(place)) == manifest
    assert fetched(uri_in(place), tmp_path) == FILES
    assert len(place.content(uri_in(place))) == len(FILES) + 1


def test_a_manifest_that_always_arrives_damaged_is_not_published(make, place, monkeypatch):
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.3")
    place.plan.add(Fault("mangle", method="PUT", path=MANIFEST, times=1000))
    with pytest.raises(storage.Unavailable, match=r"was damaged during the upload"):
        storage.publish(make(), uri_in(place), kind="x")
    assert MANIFEST not in place.content(uri_in(place))
    assert not storage.is_published(uri_in(place))


@pytest.mark.parametrize("trouble", ["its removal fails at first", "there is no MD5"])
def test_a_damaged_manifest_is_replaced_where(make, place, monkeypatch, trouble):
    if trouble == "there is no MD5":
        monkeypatch.setattr(s3, "_is_md5", lambda _: False)
    else:
        place.plan.add(Fault(503, method="DELETE", path=MANIFEST))
    place.plan.add(Fault("mangle", method="PUT", path=MANIFEST))
    manifest = storage.publish(make(), uri_in(place), kind="x")
    assert storage.verify(uri_in(place)) == manifest


def test_a_file_that_is_replaced_arrives_whole(place):
    place.plan.add(Fault("mangle", method="PUT"))
    storage.write_bytes(uri_in(place), b"twelve bytes")
    assert storage.read_bytes(uri_in(place)) == b"twelve bytes"


EXPIRED = (
    b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code>'
    b"<Message>The provided token has expired.</Message></Error>"
)


def test_credentials_that_have_expired_are_one_line(place):
    place.plan.add(Fault(400, body=EXPIRED, times=2))
    with pytest.raises(UserError) as error:
        storage.write_bytes(uri_in(place), b"1")
    line = str(error.value)
    assert ": the credentials have expired (" in line
    assert "; renew them (aws sso login, or a new AWS_SESSION_TOKEN), or use a role" in line
    assert "\n" not in line
    assert "hush" not in line


def test_credentials_that_were_renewed_in_their_file_are_used(place, monkeypatch, tmp_path):
    profile = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    text = "[default]\naws_access_key_id={}\naws_secret_access_key=hush-hush\n"
    profile.write_text(text.format("first"))
    s3.client.cache_clear()
    keys = []

    def before(request):
        profile.write_text(text.format("second"))
        keys.append(request)

    place.plan.add(Fault(400, body=EXPIRED))
    with place.before_requests(before):
        storage.write_bytes(uri_in(place), b"1")
        endpoint = find_endpoint(locate(uri_in(place)))
    assert len(keys) == 2
    assert s3.client(os.getpid(), endpoint)._get_credentials().access_key == "second"
    s3.client.cache_clear()


@pytest.mark.parametrize(
    ("uri", "url", "region", "path_style"),
    [
        ("s3://bucket/k", "", "", False),
        ("s3://bucket/k?region=eu-west-1", "", "eu-west-1", False),
        ("s3://bucket/k?endpoint=store:9000", "https://store:9000", "", True),
        ("s3://bucket/k?endpoint=https://store", "https://store", "", True),
        ("minio://mlpipeline/v2", KFP_ENDPOINT, "", True),
        ("minio://mlpipeline/v2?endpoint=minio-service.kubeflow:9000&disableSSL=true&region=x",
         "http://minio-service.kubeflow:9000", "x", True),
        ("minio://b2b/k?endpoint=a:1&disable_https=true&s3ForcePathStyle=true", "http://a:1", "",
         True),
    ],
)  # fmt: skip
def test_endpoints(uri, url, region, path_style):
    own = Endpoint(url=url, region=region, path_style=path_style, kfp_secret=bool(url))
    assert find_endpoint(locate(uri)) == own


def test_the_environment_names_an_endpoint(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one:1")
    assert find_endpoint(locate("minio://bucket/k")).url == "http://one:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://two:2")
    assert find_endpoint(locate("s3://bucket/k")).url == "http://two:2"
    assert find_endpoint(locate("minio://bucket/k?endpoint=three:3")).url == "https://three:3"


def test_the_kfp_secret_is_used_by_stores_that_are_not_amazons(monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("accesskey", "kfp")
    monkeypatch.setenv("secretkey", "hush-hush")
    client.cache_clear()

    def key(endpoint):
        credentials = client(0, endpoint)._get_credentials()
        return credentials.access_key if credentials else ""

    assert key(find_endpoint(locate("minio://bucket/k"))) == "kfp"
    # KFP adds its secret to every namespace, even if a role grants access to Amazon S3.
    assert key(find_endpoint(locate("s3://bucket/k"))) == ""
    amazon = "s3://bucket/k?endpoint=s3.eu-west-1.amazonaws.com"
    assert key(find_endpoint(locate(amazon))) == ""
    assert key(find_endpoint(locate("s3://bucket/k?endpoint=store:9000"))) == "kfp"
    assert "hush" not in repr(find_endpoint(locate("minio://bucket/k")))
    client.cache_clear()
    with monkeypatch.context() as other:
        other.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/nowhere")
        assert not kfp_credentials()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "own")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    assert key(find_endpoint(locate("minio://bucket/k"))) == "own"
    client.cache_clear()


def test_no_credentials_at_all(monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    client.cache_clear()
    with pytest.raises(UserError, match=r"wrong credentials.*set AWS_ACCESS_KEY_ID"):
        storage.read_bytes("s3://bucket/k")
    client.cache_clear()


def test_no_google_credentials(outside_attempts, monkeypatch):
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nowhere")
    with pytest.raises(UserError, match="gcloud auth application-default login"):
        storage.read_bytes("gs://bucket/k")
    assert outside_attempts == []


def test_without_boto3_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name == "flotilla.trainer.storage.s3":
            raise ModuleNotFoundError("No module named 'boto3'", name="boto3")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UserError, match=r"s3:// needs boto3: run pip install 'kfp-flotilla\[s3\]'"):
        storage.read_bytes("s3://bucket/k")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("gs://", "write it as"),
        ("gs://B/k", "'B' is not the name of a bucket"),
        ("gs://a/k", "'a' is not the name of a bucket"),
        ("s3://bucket//k", "empty part"),
        ("s3://bucket/./k", "empty part, '.' or '..'"),
        ("gs://bucket/\udcff", "not UTF-8"),
        ("gs://bucket/k?endpoint=x", "gs:// takes no options"),
        ("s3://bucket/k?enpoint=x", "did you mean 'endpoint'"),
        ("minio://bucket/k?secret=hush", "'secret' is not an option"),
        ("minio://bucket/k?endpoint=http://me:hush@store", "must not contain credentials"),
    ],
)
def test_what_is_no_uri_is_refused(uri, reason):
    with pytest.raises(UserError) as error:
        storage.read_manifest(uri)
    assert reason in str(error.value)
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    ("uri", "url", "is_said"),
    [
        ("s3://bucket/x?endpoint=http://store.example.com:9000", "", True),
        ("s3://bucket/x", "http://store.example.com", True),
        ("s3://bucket/x", "https://store.example.com", False),
        ("s3://bucket/x", "http://127.0.0.1:9000", False),
        ("s3://bucket/x", "", False),
        ("minio://bucket/x", "", False),
        ("gs://bucket/x", "", False),
        ("", "", False),
    ],
)
def test_data_that_is_sent_over_plain_http(monkeypatch, uri, url, is_said):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    assert ("uses plain HTTP" in plain_http_remark(uri)) is is_said


def test_credentials_in_a_variable_are_refused(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://u:sW0rdf1sh@h:9000")
    with pytest.raises(UserError, match=r"^AWS_ENDPOINT_URL_S3: a URI contains a user") as caught:
        find_endpoint(locate("s3://bucket/x"))
    assert "sW0rdf1sh" not in str(caught.value)
