"""Which version of a dataset a run takes when none is named: the newest, and later the same one."""

from __future__ import annotations

import pytest
import tensorflow_datasets as tfds
from kfp import dsl

from components import prepare_data
from components.records import run_store
from tests.components.called_steps import artifact_in
from trainer import storage
from trainer.config.data import DataConfig
from trainer.data.embedded.scikit import Digits
from trainer.events import NewestVersion


@pytest.fixture
def offered(monkeypatch):
    """Let the builder offer another version, and no other than that."""

    def offer(version):
        monkeypatch.setattr(Digits, "VERSION", tfds.core.Version(version))

    return offer


@pytest.fixture
def prepared(root, emitted, monkeypatch, tmp_path):
    """Prepare in a run of this name; return the version, and what the step said of itself."""

    said = []

    def prepare(run, **section):
        monkeypatch.setenv(run_store.RUN_FOLDER, str(tmp_path / run))
        artifact = artifact_in(tmp_path, dsl.Dataset)
        uri = prepare_data.prepare_data.python_func(
            DataConfig(**section).model_dump_json(), root, "", "", artifact
        )
        version = storage.read_manifest(uri).fields["version"]
        *_, before, step = emitted()
        metrics = step.metrics
        said.append(before.version if isinstance(before, NewestVersion) else "")
        assert artifact.metadata["version"] == metrics["version"] == version
        return version, metrics["reused"]

    return prepare, said


def test_a_new_run_takes_the_newest_and_a_resumed_one_keeps_its_own(offered, prepared):
    prepared, said = prepared
    assert prepared("run-1") == ("1.0.0", False)
    offered("1.1.0")
    # The builder does not offer it any more; the dataset is published.
    assert prepared("run-1") == ("1.0.0", True)
    assert prepared("run-2") == ("1.1.0", False)
    assert prepared("run-2") == ("1.1.0", True)
    # Who names one gets it.
    assert prepared("run-2", version="1.0.0") == ("1.0.0", True)
    # Where the newest was looked for, it is said.
    assert said == ["1.0.0", "", "1.1.0", "", ""]
