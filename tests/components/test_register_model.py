"""From the champion of one run to the judgement on the next, through the steps of a pipeline."""

import json
from types import SimpleNamespace

import pytest
from kfp import dsl

from components import check_gate, evaluate_model, export_model, register_model
from components.records import run_store
from tests.components.called_steps import artifact_in
from tests.trainer import small_run
from trainer import events, storage
from trainer.promotion import registry

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def pipeline(run, tmp_path, monkeypatch):
    """Return a function that runs all steps after training, under a run id."""
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    monkeypatch.setenv(run_store.RUN_FOLDER, str(tmp_path))
    root = storage.uri_of(tmp_path / "root")

    def go(run_id, checkpoint=run.checkpoint, **sections):
        gate = {"champion": {"margin": 0.05}}
        tree = {**run.config.model_dump(mode="json"), "gate": gate, **sections}
        tree["export"] = {"formats": ["saved_model"]}
        given = (json.dumps(tree), root, run_id)
        measured = evaluate_model.evaluate_model.python_func(
            *given,
            run.dataset,
            checkpoint,
            artifact_in(tmp_path, dsl.Metrics),
            *(artifact_in(tmp_path, dsl.ClassificationMetrics) for _ in range(2)),
        )
        word = check_gate.check_gate.python_func(
            *given, measured, str(tmp_path / "decision"), artifact_in(tmp_path)
        )
        decision = (tmp_path / "decision").read_text()
        if word == "refused":
            return SimpleNamespace(word=word, decision=decision, metrics={})
        made = (*given, run.dataset, checkpoint, decision)
        uri = export_model.export_model.python_func(*made, artifact_in(tmp_path, dsl.Model))
        artifact = artifact_in(tmp_path, dsl.Model)
        word = register_model.register_model.python_func(*given, uri, "our/image:2", artifact)
        last = list(events.read(tmp_path / "events.jsonl"))[-1]
        return SimpleNamespace(
            word=word,
            model=uri,
            decision=decision,
            uri=last.uri,
            metrics=last.metrics,
            artifact=artifact,
        )

    return SimpleNamespace(go=go, root=root)


@pytest.mark.slow
def test_an_unchanged_second_run_is_blessed_and_a_better_one_is_asked_for_on_demand(
    run, pipeline, tmp_path, monkeypatch
):
    monkeypatch.setenv(run_store.RUN_ID, "first")
    first = pipeline.go("first")
    assert (first.word, first.metrics["version"], first.metrics["promotion"]) == ("promoted", 1, 1)
    displayed = {"model": first.model, "decision": "promoted", "version": 1, "promotion": 1}
    assert first.artifact.metadata == {"uri": first.uri, **displayed}
    champion = registry.champion(pipeline.root, "digits")
    lineage = champion.manifest.fields["lineage"]
    assert lineage["checkpoint"] == run.checkpoint
    assert (lineage["run_id"], lineage["fingerprint"]) == ("first", "00000000")
    assert (lineage["image"], lineage["decision"]) == ("", first.decision)
    assert lineage["metrics"]["accuracy"] > 0.5

    again = small_run.publish_checkpoint(tmp_path / "again", run.model)
    second = pipeline.go("second", again)
    assert (second.word, second.metrics["version"]) == ("promoted", 2)
    decided = json.loads(storage.read_file(second.decision, "decision.json"))
    assert decided["champion"] == champion.uri

    third = pipeline.go("third", gate={"champion": {"margin": -0.1}})
    assert third.word == "refused"
    assert registry.champion(pipeline.root, "digits").number == 2


@pytest.mark.slow
def test_a_run_that_is_resumed_after_its_promotion_ends_as_it_did(pipeline):
    better = {"gate": {"champion": {"margin": -0.1}}}
    first, again = (pipeline.go("first", **better) for _ in range(2))
    assert (again.word, again.model, again.metrics) == ("promoted", first.model, first.metrics)
    assert registry.newest(pipeline.root, "digits") == 1


def test_a_refusal_of_the_registry_keeps_its_reasons(pipeline):
    made = pipeline.go("first", registry={"max_megabytes": 0.001})
    assert made.word == "refused"
    assert made.metrics["reasons"][0].startswith("megabytes ")
    assert made.metrics["version"] == 0
    assert registry.champion(pipeline.root, "digits") is None
