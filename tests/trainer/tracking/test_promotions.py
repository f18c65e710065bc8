"""Tests that MLflow's registry uses Flotilla's version numbers; see also `test_mlflow_run`."""

from types import SimpleNamespace

import pytest

from flotilla.trainer.tracking import promotions
from flotilla.trainer.tracking.hub import PromotedModel
from flotilla.trainer.tracking.promotions import register_in_mlflow


class Registry:
    """Numbers versions as MLflow does, without reusing the numbers of deleted versions."""

    def __init__(self):
        self.found, self.last, self.aliases = [], 0, {}

    def get_registered_model(self, name):
        return name

    def search_model_versions(self, _chosen):
        return self.found

    def create_model_version(self, _name, source, _run, tags):
        self.last += 1
        made = SimpleNamespace(version=str(self.last), source=source, tags=tags)
        self.found.append(made)
        return made

    def delete_model_version(self, _name, number):
        self.found = [each for each in self.found if each.version != number]

    def set_registered_model_alias(self, _name, alias, number):
        self.aliases[alias] = number

    @property
    def numbers(self):
        return {each.version: each.tags["flotilla.version"] for each in self.found}


@pytest.fixture
def there(monkeypatch):
    made = Registry()
    monkeypatch.setattr(promotions, "client_of_mlflow", lambda: made)
    monkeypatch.setattr(promotions, "_ensure_model", lambda *_: None)
    monkeypatch.setattr(promotions, "_place", lambda _client, model: (None, model.uri))
    return made


def model(version, champion=0):
    return PromotedModel(
        name="m", version=version, uri=f"s3://m/{version}", run_id="r", properties={},
        is_champion=champion == version,
    )  # fmt: skip


def test_versions_that_mlflow_has_missed_come_with_the_next_one(there):
    register_in_mlflow(model(1, champion=1))
    assert register_in_mlflow(model(3, champion=3), lambda: [model(n) for n in (1, 2, 3)]) == "3"
    assert there.numbers == {"1": "1", "2": "2", "3": "3"}
    assert there.aliases == {"champion": "3"}


def test_a_number_that_is_old_or_removed_is_not_given_to_another_version(there):
    earlier = [model(n) for n in range(1, 40) if n != 38]
    assert register_in_mlflow(model(40, champion=40), lambda: earlier) == "40"
    assert there.numbers == {str(n): str(n) for n in (35, 36, 37, 39, 40)} | {"34": "34"}


def test_an_earlier_champion_becomes_it_again(there):
    for number in (1, 2):
        register_in_mlflow(model(number, champion=number))
    assert register_in_mlflow(model(1, champion=1)) == "1"
    assert there.aliases == {"champion": "1"}
    assert there.numbers == {"1": "1", "2": "2"}


def test_a_number_that_is_taken_is_said(there, caplog):
    there.create_model_version("m", "s3://other", None, {"flotilla.version": "9"})
    assert register_in_mlflow(model(1, champion=1)) == "2"
    assert there.aliases == {"champion": "2"}
    assert "version 1 of m is version 2 in MLflow" in caplog.text
