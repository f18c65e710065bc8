"""The KFP instance, where one is named."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Instance(ThreadingHTTPServer):
    """Answers every GET with one document; `closed` are paths with a status of their own."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.answer = 200, {"tag_name": "2.17.0", "multi_user": False}
        self.asked: list[str] = []
        self.paths: list[str] = []
        self.closed: dict[str, int] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Instance

    def do_GET(self) -> None:
        self.server.asked.append(self.headers.get("Authorization", ""))
        self.server.paths.append(self.path)
        text = json.dumps(self.server.answer).encode()
        path = self.path.partition("?")[0]
        self.send_response(self.server.closed.get(path, self.server.status))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def instance() -> Iterator[Instance]:
    with Instance() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def of(report):
    return report["KFP instance"]


def test_an_instance_reports_its_version(doctor, instance):
    report = doctor(options=("--endpoint", instance.url))
    assert (report.code, of(report)["state"]) == (0, "ok")
    assert of(report)["message"] == f"{instance.url} is KFP 2.17.0"


EXPERIMENTS = "/apis/v2beta1/experiments"


def test_an_instance_for_several_users_wants_a_namespace(doctor, instance, monkeypatch):
    instance.answer = {"tag_name": "2.17.0", "multi_user": True}
    report = doctor(options=("--endpoint", instance.url))
    assert report.failed() == ["KFP instance"]
    assert of(report)["message"] == (
        f"{instance.url} has several users: give --namespace, or set KFP_NAMESPACE"
    )
    assert of(report)["remedy"] == "flotilla doctor --namespace NAMESPACE"
    assert not [path for path in instance.paths if path.startswith(EXPERIMENTS)]
    monkeypatch.setenv("KFP_NAMESPACE", "team")
    assert of(doctor(options=("--endpoint", instance.url)))["state"] == "ok"
    report = doctor(options=("--endpoint", instance.url, "--namespace", "mine"))
    assert of(report)["message"] == f"{instance.url} is KFP 2.17.0, in mine"
    asked = [path for path in instance.paths if path.startswith(EXPERIMENTS)]
    assert ["namespace=team" in asked[0], "namespace=mine" in asked[1]] == [True, True]


def test_a_namespace_of_others_is_found_out(doctor, instance):
    instance.answer = {"tag_name": "2.17.0", "multi_user": True}
    instance.closed[EXPERIMENTS] = 403
    report = doctor(options=("--endpoint", instance.url, "-n", "theirs"))
    assert report.failed() == ["KFP instance"]
    assert "does not permit it: give --namespace" in of(report)["message"]


def test_an_instance_for_one_user_is_not_asked_for_a_namespace(doctor, instance):
    # It refuses what names one.
    instance.closed[EXPERIMENTS] = 400
    report = doctor(options=("--endpoint", instance.url, "--namespace", "kubeflow"))
    assert (report.code, of(report)["message"]) == (0, f"{instance.url} is KFP 2.17.0")


def test_a_token_is_sent_and_never_printed(doctor, instance, tmp_path):
    (tmp_path / "token").write_text("ey-secret", encoding="utf-8")
    instance.status = 401
    options = ("--endpoint", instance.url, "--token-file", str(tmp_path / "token"))
    report = doctor(options=options)
    assert set(instance.asked) == {"Bearer ey-secret"}
    assert of(report)["state"] == "fail"
    assert "ey-secret" not in str(report)


def test_the_endpoint_of_the_environment(doctor, instance, monkeypatch):
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", instance.url)
    assert of(doctor())["state"] == "ok"


def test_an_instance_that_keeps_its_version_for_itself(doctor, instance):
    instance.answer = {}
    found = of(doctor(options=("--endpoint", instance.url)))
    assert (found["state"], found["remedy"]) == (
        "warn", f"curl --include {instance.url}/apis/v2beta1/healthz",
    )  # fmt: skip


@pytest.mark.parametrize("status", [401, 403, 500])
def test_an_instance_that_refuses(doctor, instance, status):
    instance.status = status
    report = doctor(options=("--endpoint", instance.url))
    assert report.failed() == ["KFP instance"]
    assert str(status) in of(report)["message"]
    assert of(report)["remedy"].startswith("curl --include")


def test_a_password_in_the_endpoint_is_not_repeated(doctor):
    report = doctor(options=("--endpoint", "http://me:hush@127.0.0.1:1"))
    assert report.code == 2
    assert "--endpoint" in report.answer["message"]
    assert "hush" not in str(report)


def test_an_instance_that_is_not_there(doctor, instance):
    instance.shutdown()
    instance.server_close()
    report = doctor(options=("--endpoint", instance.url))
    assert (report.code, report.failed()) == (1, ["KFP instance"])


def test_an_endpoint_that_is_none(doctor):
    report = doctor(options=("--endpoint", "ftp://kfp"))
    assert (report.code, report.failed()) == (1, ["KFP instance"])
    assert "is not the URL of a KFP instance" in of(report)["message"]


def test_without_an_instance_the_option_is_named(doctor):
    assert of(doctor())["state"] == "skipped"
    assert "give --endpoint" in of(doctor())["message"]
