"""Fixtures: a fake KFP instance, submissions without a trial of the model, and models."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.pipelines.runs import submission
from flotilla.trainer import storage
from flotilla.trainer.preflight.check import Checked, require_source
from flotilla.trainer.promotion import registry
from tests.kfp_instance.fixtures import compiled, instance, remote, uploaded

__all__ = ["compiled", "instance", "remote", "uploaded"]


@pytest.fixture(autouse=True)
def _without_trial(monkeypatch) -> None:
    """Check only the data source before a submission, because a trial takes seconds."""

    def check(config, *, is_remote):
        return Checked(notes=require_source(config.data, is_remote=is_remote))

    monkeypatch.setattr(submission, "check", check)


def publish_model(folder: Path, number: int, **fields: Any) -> str:
    """Publish a model that consists of its number, and return its URI."""
    source, uri = folder / f"source-{number}", storage.uri_of(folder / f"model-{number}")
    (source / "serving").mkdir(parents=True)
    (source / "serving" / "saved_model.pb").write_text(f"{folder} {number}")
    storage.publish(source, uri, kind="model", fields={"saved_model": "serving", **fields})
    return uri


def register_models(
    root: str, folder: Path, count: int, champions: int = 0, name: str = "digits", **lineage: Any
) -> None:
    """Register versions of a model, the first of which become the champion one after the other."""
    for number in range(1, count + 1):
        uri = publish_model(folder, number, global_step=100 * number)
        registry.register(root, name, uri, lineage=lineage, scratch=folder)
    for number in range(1, champions + 1):
        registry.promote(root, name, number, after=number - 1, by="run a")
