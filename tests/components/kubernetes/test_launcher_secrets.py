"""No secret around a launcher is in what Kubernetes gets and keeps, nor in what is written."""

from __future__ import annotations

import json
import logging

import pytest

from components.kubernetes import launcher
from tests.components.kubernetes.attempts import Attempt, job_of, settings, watching_attempt
from tests.kubernetes.cluster import NAMESPACE, kubeconfig
from tests.planted import SECRETS, found_in, plant
from trainer import events


@pytest.fixture
def around(kube, tmp_path, monkeypatch, caplog):
    """Plant all secrets; the token of the kubeconfig is one of them, and the events have a file."""
    caplog.set_level(logging.DEBUG)
    plant(tmp_path / "home", monkeypatch)
    token = SECRETS["kube"]
    kube.server.control.users[token] = kube.server.control.user
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "planted", kube.server.url, token)))
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return kube


def written(kube, tmp_path, caplog, capfd, error=""):
    out, err = capfd.readouterr()
    record = tmp_path / "events.jsonl"
    texts = {str(each)[:60]: each for each in kube.server.received}
    texts |= {
        "stored": json.dumps([each[-1] for each in kube.store.history]).encode(),
        "events": record.read_bytes() if record.exists() else b"",
        "log": caplog.text.encode(),
        "stdout": out.encode(),
        "stderr": err.encode(),
        "error": error.encode(),
    }
    return texts


def test_a_job_has_no_secret_and_the_token_is_sent_as_a_header_alone(
    around, tmp_path, caplog, capfd
):
    attempt = watching_attempt(around)
    around.run_all()
    around.write_log("chief-0", "a line")
    around.finish("chief-0", 0)
    attempt.succeed()
    around.wait_until_deleted()
    assert around.server.tokens == {SECRETS["kube"]}
    texts = written(around, tmp_path, caplog, capfd)
    for said in (b"tfReplicaSpecs", b"networkpolicies"):
        assert any(said in each for each in texts.values())
    assert list(found_in(texts)) == []


@pytest.mark.parametrize("request_of", ["POST .*/tfjobs", "POST .*networkpolicies", "GET .*/pods"])
def test_a_refusal_that_echoes_the_headers_shows_no_token(
    around, tmp_path, caplog, capfd, request_of
):
    around.faults.add(request_of, 403, echoes=True)
    message = Attempt(job_of(settings())).failure()
    assert "denied" in message
    assert list(found_in(written(around, tmp_path, caplog, capfd, message))) == []


@pytest.mark.slow
def test_an_unreachable_api_shows_no_token(around, tmp_path, caplog, capfd, monkeypatch):
    monkeypatch.setattr(launcher, "REMOVAL_SECONDS", 1)
    attempt = watching_attempt(around, unreachable=2)
    around.run_all()
    around.server.go_down()
    message = attempt.failure()
    assert "has not answered" in message
    assert list(found_in(written(around, tmp_path, caplog, capfd, message))) == []


def test_a_secret_in_an_object_is_found(around, tmp_path, caplog, capfd):
    annotated = {"metadata": {"name": "leak", "annotations": {"token": SECRETS["kube"]}}}
    around.store.create("configmaps", NAMESPACE, annotated)
    found = list(found_in(written(around, tmp_path, caplog, capfd)))
    assert found == [("kube", "stored")]
