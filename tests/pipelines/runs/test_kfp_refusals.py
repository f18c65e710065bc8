"""What an instance refuses, and what it has no page for: one line each."""

from __future__ import annotations

import pytest

from tests.kfp_instance.store import Store

JSON = {"Content-Type": "application/json"}


def in_one_line(answer, *words):
    assert answer.code == 1
    assert answer.err.count("\n") == 1
    for word in words:
        assert word in answer.err


def gone(monkeypatch, instance, method, things):
    """Remove things when a method of the store begins, as another client may."""
    real = getattr(Store, method)

    def called(store, *arguments):
        getattr(store, things).clear()
        return real(store, *arguments)

    monkeypatch.setattr(Store, method, called)
    assert instance.store


def test_an_experiment_that_another_client_creates_meanwhile(instance, remote, uploaded):
    del uploaded
    experiment = instance.store.create_experiment({"display_name": "flotilla"})
    instance.faults.add("GET .*/experiments", 200, body=b"{}", headers=JSON, times=1)
    assert remote("submit").code == 0
    [run] = instance.store.runs.values()
    assert run["experiment_id"] == experiment["experiment_id"]
    assert len(instance.asked("POST .*/experiments")) == 1


def test_a_version_that_is_deleted_meanwhile(instance, remote, uploaded, monkeypatch):
    del uploaded
    gone(monkeypatch, instance, "create_run", "versions")
    in_one_line(
        remote("submit"), "answered 500", "not found", "check --endpoint and the name or id"
    )


def test_a_pipeline_that_is_deleted_meanwhile(instance, remote, monkeypatch):
    gone(monkeypatch, instance, "upload_version", "pipelines")
    in_one_line(remote("upload"), "answered 400", "Failed to create a pipeline version")


def test_plain_words_of_a_proxy_are_kept_and_a_web_page_is_not(instance, remote):
    instance.faults.add(".", 400, body=b"Pipeline.Name length cannot exceed 128", times=1)
    in_one_line(remote("runs"), "(Pipeline.Name length cannot exceed 128)")
    instance.faults.add(".", 400, body=b"<html>secret form</html>")
    assert "secret" not in remote("runs").err


@pytest.mark.parametrize("account", [(), ("--service-account", "trainer")], ids=["", "account"])
def test_a_schedule_of_the_newest_version_is_recognised(instance, remote, uploaded, account):
    del uploaded
    words = ("schedule", "--every", "6h", "--latest", *account)
    assert remote(*words).code == 0
    assert "is there already" in remote(*words).err
    assert len(instance.asked("POST .*recurringruns")) == 1


def test_a_link_leads_to_the_interface_where_the_endpoint_serves_it(instance, remote):
    instance.has_ui = True
    made = remote("upload", "--json")
    page = made.json["artifacts"]["pipeline"]
    assert page.startswith(f"{instance.url}/#/pipelines/details/")
    assert page in made.err
    run = remote("submit", "--json").json
    assert run["artifacts"]["run"] == f"{instance.url}/#/runs/details/{run['run_id']}"


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_link_leads_to_the_interface_that_is_named(instance, remote, monkeypatch, how):
    named = "https://kfp.example.com/pipeline/#/runs"
    words = ("--ui", named) if how == "option" else ()
    if how == "variable":
        monkeypatch.setenv("FLOTILLA_KFP_UI", named)
    assert remote("upload", *words).code == 0
    run = remote("submit", *words, "--json").json
    at = "https://kfp.example.com/pipeline/#/runs/details"
    assert run["artifacts"]["run"] == f"{at}/{run['run_id']}"
    status = remote("status", run["run_id"], *words, "--json")
    assert status.json["artifacts"]["run"] == run["artifacts"]["run"]
    if how == "option":
        assert not instance.asked("GET /$")


@pytest.mark.parametrize("answer", [404, 503, 0, b"<html>Sign in</html>"], ids=str)
def test_without_an_interface_there_is_no_link_but_a_command(instance, remote, uploaded, answer):
    del uploaded
    status, body = (200, answer) if isinstance(answer, bytes) else (answer, b"")
    instance.faults.add("GET /$", status, body=body)
    made = remote("submit", "--json")
    run_id = made.json["run_id"]
    assert (made.code, made.json["artifacts"]) == (0, {})
    assert f"no link: {instance.url} serves no user interface; name it by --ui" in made.err
    assert f"flotilla status {run_id} --endpoint {instance.url}" in made.err
    assert "/#/" not in made.err


@pytest.mark.parametrize("url", ["https://me:secret@host", "ftp://host", "https://a b"])
def test_an_address_of_the_interface_that_is_none(remote, url):
    answer = remote("runs", "--ui", url)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "--ui" in answer.err
    assert "secret" not in answer.err
