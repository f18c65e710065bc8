"""A dataset, checkpoint, evaluation and registry from an earlier version can be read.

`earlier.zip` has the unmodified files of the last version without `import flotilla`.
"""

import json
import zipfile
from pathlib import Path

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.promotion import gate, registry


@pytest.fixture
def earlier(tmp_path):
    with zipfile.ZipFile(Path(__file__).with_name("earlier.zip")) as file:
        file.extractall(tmp_path)
    return tmp_path


def test_a_checkpoint_is_measured_on_its_dataset_as_it_was(earlier):
    checkpoint, step = newest_checkpoint(storage.uri_of(earlier / "checkpoints"))
    assert step == 7
    config = parse_config({"model": {"name": "softmax"}, "evaluation": {"baseline": "none"}})
    output, dataset = (storage.uri_of(earlier / each) for each in ("again", "dataset"))
    (earlier / "scratch").mkdir()
    now = evaluate(config, dataset, checkpoint, output, earlier / "scratch").metrics
    before = json.loads((earlier / "evaluation/metrics.json").read_text())["metrics"]
    assert {name: now[name] for name in before} == pytest.approx(before, abs=1e-5)


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
