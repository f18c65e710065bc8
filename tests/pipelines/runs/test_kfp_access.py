"""Tests the connection to a KFP instance: options, environment variables and secrets."""

import pytest

from flotilla.pipelines.runs import kfp_access as accesses
from flotilla.pipelines.runs.kfp_access import Access, Instance
from flotilla.trainer.runtime.errors import ConfigError

TOKEN = "ey-secret-token"


@pytest.fixture(autouse=True)
def _outside_a_pod(tmp_path, monkeypatch):
    monkeypatch.setattr(accesses, "TOKEN_VOLUME", tmp_path / "no-volume")


def found(environment=None, **given):
    return Instance(**given).access(environment or {})


@pytest.mark.parametrize(
    ("environment", "given", "endpoint"),
    [
        ({}, {"endpoint": "http://a:8888/"}, "http://a:8888"),
        ({"KF_PIPELINES_ENDPOINT": "http://b"}, {}, "http://b"),
        ({"KFP_ENDPOINT": "http://c"}, {}, "http://c"),
        ({"KF_PIPELINES_ENDPOINT": "http://b", "KFP_ENDPOINT": "http://c"}, {}, "http://b"),
        ({"KF_PIPELINES_ENDPOINT": "http://b"}, {"endpoint": "http://a/pipeline"}, "http://a/pipeline"),
        ({}, {"endpoint": "kfp.example.com"}, "https://kfp.example.com"),
    ],
)  # fmt: skip
def test_the_endpoint(environment, given, endpoint):
    assert found(environment, **given).endpoint == endpoint


def test_without_an_endpoint_both_ways_are_named():
    with pytest.raises(ConfigError, match="--endpoint URL, or set KF_PIPELINES_ENDPOINT"):
        found()


def test_secrets_come_from_the_environment_or_from_a_file_that_is_named(tmp_path):
    given = {"KFP_EXISTING_TOKEN": f"{TOKEN}\n", "KFP_COOKIES": "session=x", "KFP_NAMESPACE": "me"}
    access = found(given, endpoint="http://kfp")
    assert (access.read_token(), access.cookies, access.namespace) == (TOKEN, "session=x", "me")
    token, cookies = tmp_path / "token", tmp_path / "cookies"
    token.write_text("of-the-file\n")
    cookies.write_text("a=1; b=2\n")
    access = found(given, endpoint="http://k", token_file=str(token), cookies_file=str(cookies))
    assert (access.token, access.read_token(), access.cookies) == ("", "of-the-file", "a=1; b=2")
    # A token file is read again for each request.
    access = found({"KF_PIPELINES_SA_TOKEN_PATH": str(token)}, endpoint="http://kfp")
    assert access.read_token() == "of-the-file"
    token.write_text("second")
    assert access.read_token() == "second"


def test_in_a_pod_its_own_token_is_taken_unless_there_is_another(tmp_path, monkeypatch):
    volume = tmp_path / "volume"
    volume.write_text("of-the-pod")
    monkeypatch.setattr(accesses, "TOKEN_VOLUME", volume)
    assert found(endpoint="http://kfp").read_token() == "of-the-pod"
    assert found({"KFP_EXISTING_TOKEN": TOKEN}, endpoint="http://kfp").read_token() == TOKEN
    assert not found({"KFP_COOKIES": "a=1"}, endpoint="http://kfp").has_token()


def test_no_secret_is_in_the_repr_or_in_what_is_reported(tmp_path):
    access = Access(endpoint="http://kfp", token=TOKEN, cookies="session=secret-value")
    assert TOKEN not in repr(access)
    assert "secret-value" not in repr(access)
    answer = f"refused {TOKEN} and session=secret-value, or only secret-value"
    assert access.mask(answer) == "refused *** and ***, or only ***"
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    assert Access(endpoint="http://kfp", token_file=str(file)).mask("of-the-file") == "***"


@pytest.mark.parametrize(
    ("given", "environment", "is_said"),
    [
        ({"endpoint": "http://kfp.example.com", "token_file": "t"}, {}, True),
        ({"endpoint": "http://kfp.example.com"}, {"KFP_COOKIES": "a=b"}, True),
        ({}, {"KF_PIPELINES_ENDPOINT": "http://1.2.3.4", "KFP_EXISTING_TOKEN": "x"}, True),
        ({"endpoint": "http://kfp.example.com"}, {}, False),
        ({"endpoint": "kfp.example.com", "token_file": "t"}, {}, False),
        ({"endpoint": "http://localhost:8888", "token_file": "t"}, {}, False),
        ({"endpoint": "http://ml-pipeline.kubeflow.svc:8888", "token_file": "t"}, {}, False),
    ],
)
def test_credentials_over_plain_http_are_one_line(given, environment, is_said):
    remark = Instance(**given).plain_http_remark(environment)
    assert ("is plain http" in remark) is is_said
    assert "\n" not in remark
