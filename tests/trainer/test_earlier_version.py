"""Tests that checkpoints, evaluations and registries of an earlier version can be read.

`earlier.zip` contains unmodified files of the last version that had no `flotilla` package.
"""

import json
import zipfile
from pathlib import Path

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.promotion import gate, registry
from flotilla.trainer.runtime.errors import UserError


@pytest.fixture
def earlier(tmp_path):
    with zipfile.ZipFile(Path(__file__).with_name("earlier.zip")) as file:
        file.extractall(tmp_path)
    return tmp_path


def test_a_dataset_of_single_records_has_to_be_prepared_again(earlier):
    manifest = storage.read_manifest(storage.uri_of(earlier / "dataset"))
    with pytest.raises(UserError, match=r"schema 4, but this version reads 5; prepare it again$"):
        DatasetSpec.from_manifest(manifest)


def test_a_checkpoint_is_measured_on_the_dataset_prepared_again(earlier):
    checkpoint, step = newest_checkpoint(storage.uri_of(earlier / "checkpoints"))
    assert step == 7
    config = parse_config({"model": {"name": "softmax"}, "evaluation": {"baseline": "none"}})
    output, root = (storage.uri_of(earlier / each) for each in ("again", "root"))
    dataset = prepare(config.data, root, earlier / "scratch").uri
    now = evaluate(config, dataset, checkpoint, output, earlier / "scratch").metrics
    before = json.loads((earlier / "evaluation/metrics.json").read_text())["metrics"]
    assert before.keys() <= now.keys()
    # The test split differs now, but a model that lost its weights would have an accuracy of 0.1.
    assert now["accuracy"] == pytest.approx(before["accuracy"], abs=0.05)


def test_an_evaluation_passes_the_gate_as_it_did(earlier):
    config = parse_config(
        {"model": {"name": "softmax"}, "gate": {"min": {"accuracy": 0.5}, "constant": "reported"}}
    )
    evaluation, decision = (storage.uri_of(earlier / each) for each in ("evaluation", "again"))
    assert gate.check(config, evaluation, decision).blessed
    assert storage.verify(storage.uri_of(earlier / "decision")).kind == "decision"


def test_a_registry_has_its_versions_and_can_be_rolled_back(earlier):
    root = storage.uri_of(earlier / "models/root")
    assert registry.names(root) == ["digits"]
    assert [each.number for each in registry.versions(root, "digits")] == [1, 2]
    assert [each.number for each in registry.promotions(root, "digits")] == [1, 2]
    assert registry.champion_number(root, "digits") == 2
    registry.rollback(root, "digits", by="test")
    assert registry.champion_number(root, "digits") == 1
    for each in registry.versions(root, "digits"):
        storage.verify(each.uri)
