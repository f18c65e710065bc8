"""The doctor's checks of trackers: one that is away is a warning, as a run goes on without it."""

from __future__ import annotations

import pytest

from pipelines.doctor.checks import _answers
from tests.trainer.tracking import hub_server
from trainer.tracking import addresses, hub, mlflow_run
from trainer.tracking.hub import Hub

AWAY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.delenv(hub.TOKEN_FILE, raising=False)


def test_trackers_are_checked_only_where_they_are_named(doctor, monkeypatch):
    monkeypatch.setenv(addresses.URI, AWAY)
    monkeypatch.delenv(addresses.HUB, raising=False)
    found = doctor()
    assert "model registry" not in found.states()
    assert found["MLflow"]["state"] == "warn"
    assert found.code == 0
    message = found["MLflow"]["message"]
    assert f"{AWAY}/health does not answer: ConnectionError" in message
    assert message.endswith("a run goes on without it")


def test_a_registry_that_answers_and_one_that_is_away():
    with hub_server.serving() as (address, store):
        found = _answers(Hub(address).check)
        assert found.state == "ok"
        assert f"the model registry answers at {address}" in found.message
        store.fault = lambda _verb, _path: (401, {"message": "who are you"})
        found = _answers(Hub(address).check)
        assert (found.state, "401 who are you" in found.message) == ("warn", True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(addresses.URI, address)
            found = _answers(mlflow_run.health)
    assert found.state == "warn"
    assert "answers 401: is it a server of MLflow?" in found.message
    assert _answers(Hub(AWAY).check).state == "warn"


@pytest.mark.parametrize("address", ["http://", "https://[::1", "http://user:secret@127.0.0.1:1"])
def test_an_address_that_is_none_is_a_warning_without_its_password(monkeypatch, address):
    monkeypatch.setenv(addresses.URI, address)
    found = _answers(mlflow_run.health)
    assert found.state == "warn"
    assert "secret" not in found.message
    assert "\n" not in found.message
