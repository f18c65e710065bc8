"""Tests the stages between the first stage and the exit step, except training."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tensorflow_datasets as tfds
from kfp import dsl

from flotilla.components import descriptor, evaluate_model, export_model, prepare_data
from flotilla.components.records import run_store
from flotilla.trainer import events, storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.schema import Config, EvaluationConfig
from flotilla.trainer.data.builders.embedded import Digits
from flotilla.trainer.events import NewestVersion, StepEnd
from flotilla.trainer.promotion import registry
from tests.components.called_steps import (
    RUN,
    artifact_in,
    evaluated,
    gated,
    no_larger_files_than,
    refused,
    stage,
    text_of,
    to_evaluate,
)
from tests.trainer import small_run
from tests.trainer.small_run import GLOBAL_STEP, TEST_EXAMPLES


@pytest.fixture
def offered(monkeypatch):
    """Return a function that makes the builder offer only the given version."""

    def offer(version):
        monkeypatch.setattr(Digits, "VERSION", tfds.core.Version(version))

    return offer


@pytest.fixture
def prepared(root, emitted, monkeypatch, tmp_path):
    """Return a function that prepares data in a named run and returns its version."""

    said = []

    def prepare(run, **section):
        monkeypatch.setenv(run_store.RUN_FOLDER, str(tmp_path / run))
        artifact = artifact_in(tmp_path, dsl.Dataset)
        config = Config(data=DataConfig(**section)).model_dump_json()
        uri, _ = stage("prepare_data", prepare_data.prepare, config, root, dataset=artifact)
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
    # The builder no longer offers this version, but its dataset is published.
    assert prepared("run-1") == ("1.0.0", True)
    assert prepared("run-2") == ("1.1.0", False)
    assert prepared("run-2") == ("1.1.0", True)
    assert prepared("run-2", version="1.0.0") == ("1.0.0", True)
    assert said == ["1.0.0", "", "1.1.0", "", ""]


def validated(run, root, folder, **gate):
    tree = json.loads(text_of(run))
    tree["data"]["gate"] = gate
    page = artifact_in(folder, dsl.HTML)
    page.path = str(folder / "page.html")
    artifacts = {"validation": artifact_in(folder), "page": page}
    given = {"dataset_uri": run.dataset, **artifacts}
    word = stage("validate_data", prepare_data.validate, json.dumps(tree), root, **given)
    return word, artifacts["validation"].metadata["uri"], (folder / "page.html").read_text()


def test_data_that_is_accepted(run, root, tmp_path, emitted):
    word, uri, page = validated(run, root, tmp_path)
    assert word == "accepted"
    tree = json.loads(storage.read_file(uri, "validation.json"))
    assert tree["champion"]["note"] == "digits has no champion yet"
    assert tree["decision"] == "accepted"
    assert storage.read_file(uri, "page.html").decode() == page
    assert "has no champion yet" in page
    end = emitted()[-1]
    assert (end.uri, end.metrics["decision"]) == (uri, "accepted")


@pytest.mark.usefixtures("emitted")
def test_it_fills_what_the_ui_shows(run, root, emitted, tmp_path):
    uri, metrics, confusion, roc = evaluated(run, root, tmp_path)
    descriptor.check(metrics, uri)
    assert uri.startswith(storage.join(root, RUN, "evaluation", f"step-{GLOBAL_STEP:08d}-"))
    written = json.loads(storage.read_file(uri, "metrics.json"))
    assert {**written["metrics"], "uri": uri} == metrics.metadata
    assert emitted()[-1].metrics == written["metrics"]
    matrix = confusion.metadata["confusionMatrix"]
    names = [each["displayName"] for each in matrix["annotationSpecs"]]
    assert names == [str(digit) for digit in range(10)]
    assert sum(sum(row["row"]) for row in matrix["rows"]) == TEST_EXAMPLES
    points = roc.metadata["confidenceMetrics"]
    assert [
        [each[key] for key in ("falsePositiveRate", "recall", "confidenceThreshold")]
        for each in points
    ] == written["roc"]
    assert (points[0]["recall"], points[-1]["recall"]) == (0, 1)


@pytest.mark.usefixtures("emitted")
def test_baselines_are_metrics_next_to_those_of_the_model(run, root, emitted, tmp_path):
    with_baselines = run.config.model_copy(update={"evaluation": EvaluationConfig()})
    uri, metrics, *_ = evaluated(replace(run, config=with_baselines), root, tmp_path)
    assert uri != evaluated(run, root, tmp_path)[0]
    written = json.loads(storage.read_file(uri, "metrics.json"))
    names = ("baseline_linear_accuracy", "baseline_gradient_boosting_accuracy")
    found = [each["metrics"]["accuracy"] for each in written["baselines"]]
    assert found == [metrics.metadata[name] for name in names]
    assert found[0] > 0.5
    ends = [each for each in emitted() if isinstance(each, StepEnd)]
    assert [ends[0].metrics[name] for name in names] == found
    assert not {*names} & {*ends[1].metrics, *written["metrics"]}
    fields = storage.read_manifest(uri).fields
    assert not {*names} & {*fields["metrics"]}


@pytest.mark.usefixtures("emitted")
@pytest.mark.parametrize("size", [0, 6000])
def test_a_full_disk_is_one_line(run, root, tmp_path, capsys, size):
    def evaluate():
        given = to_evaluate(run, tmp_path)
        stage("evaluate_model", evaluate_model.evaluate, text_of(run), root, "full", **given)

    with no_larger_files_than(size):
        code, line = refused(evaluate, capsys=capsys)
    assert (code, "File too large" in line) == (1, True)
    assert not storage.names(storage.join(root, "full"))


@pytest.mark.usefixtures("emitted")
def test_a_checkpoint_that_is_not_there(run, root, tmp_path, capsys):
    missing = replace(run, checkpoint=f"{run.checkpoint}9")
    code, line = refused(evaluated, missing, root, tmp_path, capsys=capsys)
    assert code == 1
    assert f"{run.checkpoint}9 is not published" in line


@pytest.mark.usefixtures("emitted")
def test_a_checkpoint_that_was_made_again_is_evaluated_again(root, tmp_path):
    run = small_run.small_run(tmp_path / "run")
    first, *_ = evaluated(run, root, tmp_path)
    assert evaluated(run, root, tmp_path)[0] == first
    storage.fetch(run.checkpoint, tmp_path / "again")
    fields = storage.read_manifest(run.checkpoint).fields
    storage.delete(run.checkpoint)
    storage.publish(tmp_path / "again", run.checkpoint, kind="checkpoint", fields=fields)
    second, *_ = evaluated(run, root, tmp_path)
    assert first != second
    assert len(storage.list_published(storage.join(root, RUN, "evaluation"))) == 2


@pytest.mark.usefixtures("emitted")
def test_under_another_policy_the_same_run_is_judged_anew(run, root, tmp_path, emitted):
    word, uri = refusal = gated(run, root, tmp_path, 1.0)
    reasons = json.loads(storage.read_file(uri, "decision.json"))["reasons"]
    assert (word, reasons) == ("refused", emitted()[-1].metrics["reasons"])
    assert reasons[0].endswith("; it must be at least 1 (gate.min).")
    word, uri = gated(run, root, tmp_path, 0.1)
    assert word == json.loads(storage.read_file(uri, "decision.json"))["decision"] == "blessed"
    end = emitted()[-1]
    assert (end.uri, end.metrics["decision"]) == (uri, "blessed")
    assert gated(run, root, tmp_path, 1.0) == refusal


def to_export(run, decision, folder):
    inputs = {"dataset": run.dataset, "checkpoint": run.checkpoint, "decision": decision}
    described = {f"{name}_descriptor": None for name in inputs}
    return {**inputs, **described, "model": artifact_in(folder, dsl.Model)}


@pytest.mark.usefixtures("emitted")
@pytest.mark.parametrize("size", [0, 30_000])
def test_a_full_disk_is_one_line_of_export_model(run, root, tmp_path, capsys, size):
    _, decision = gated(run, root, tmp_path, accuracy=0.1)

    def export():
        config = text_of(run, accuracy=0.1)
        given = to_export(run, decision, tmp_path)
        stage("export_model", export_model.export, config, root, "full", **given)

    with no_larger_files_than(size):
        code, line = refused(export, capsys=capsys)
    assert (code, "File too large" in line) == (1, True)
    assert not storage.names(storage.join(root, "full"))


@pytest.mark.usefixtures("emitted")
@pytest.mark.slow
def test_other_formats_are_published_next_to_the_first(run, root, tmp_path):
    _, decision = gated(run, root, tmp_path, 0.1)
    found = []
    for formats in (["saved_model"], ["saved_model", "keras"], ["saved_model"]):
        tree = {**json.loads(text_of(run)), "export": {"formats": formats}}
        given = to_export(run, decision, tmp_path)
        found.append(stage("export_model", export_model.export, json.dumps(tree), root, **given))
    assert found[0] == found[2] != found[1]
    assert storage.read_manifest(found[1]).fields["formats"] == ["saved_model", "keras"]


@pytest.mark.usefixtures("emitted")
def test_a_refused_model_is_not_exported(run, root, tmp_path, capsys):
    _, decision = gated(run, root, tmp_path, 1.0)

    def export():
        given = {**to_export(run, decision, tmp_path), "registration": artifact_in(tmp_path)}
        component = export_model.export_model.python_func
        component(text_of(run), root, RUN, image="our/image:2", **given)

    code, line = refused(export, capsys=capsys)
    assert code == 1
    assert line.startswith("nothing is exported: the gate refused the model")
    assert not storage.list_published(storage.join(root, RUN, "model"))


@pytest.fixture
def pipeline(run, tmp_path, monkeypatch):
    """Return a function that runs all steps after training under a given run ID."""
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    monkeypatch.setenv(run_store.RUN_FOLDER, str(tmp_path))
    root = storage.uri_of(tmp_path / "root")

    def go(run_id, checkpoint=run.checkpoint, **sections):
        gate = {"champion": {"margin": 0.05}}
        tree = {**run.config.model_dump(mode="json"), "gate": gate}
        tree |= {"export": {"formats": ["saved_model"]}, **sections}
        given = (json.dumps(tree), root, run_id)
        path = tmp_path / "decision"
        own = {"decision_uri": str(path), "decision": artifact_in(tmp_path)}
        trained = replace(run, checkpoint=checkpoint)
        measured = {**to_evaluate(trained, tmp_path), **own}
        word = evaluate_model.evaluate_model.python_func(*given, **measured)
        decision = path.read_text()
        if word == "refused":
            return SimpleNamespace(word=word, decision=decision, metrics={})
        made = to_export(trained, decision, tmp_path)
        artifact = artifact_in(tmp_path, dsl.Model)
        word = export_model.export_model.python_func(
            *given, image="our/image:2", registration=artifact, **made
        )
        last = list(events.read(tmp_path / "events.jsonl"))[-1]
        return SimpleNamespace(
            word=word,
            model=made["model"].metadata["uri"],
            exported=made["model"].metadata,
            decision=decision,
            uri=last.uri,
            metrics=last.metrics,
            artifact=artifact,
        )

    return SimpleNamespace(go=go, root=root)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.slow
def test_an_unchanged_second_run_is_blessed_and_a_better_one_is_asked_for_on_demand(
    run, pipeline, tmp_path, monkeypatch
):
    monkeypatch.setenv(run_store.RUN_ID, "first")
    first = pipeline.go("first")
    assert (first.word, first.metrics["version"], first.metrics["promotion"]) == ("promoted", 1, 1)
    displayed = {"model": first.model, "decision": "promoted", "version": 1, "promotion": 1}
    displayed["headline"] = first.metrics["headline"]
    assert first.artifact.metadata == {"uri": first.uri, **displayed}
    assert displayed["headline"].startswith("digits v1: accuracy 0.")
    champion = registry.champion(pipeline.root, "digits")
    lineage = champion.manifest.fields["lineage"]
    assert lineage["checkpoint"] == run.checkpoint
    assert (lineage["run_id"], lineage["fingerprint"]) == ("first", "00000000")
    assert (lineage["image"], lineage["decision"]) == ("", first.decision)
    assert lineage["metrics"]["accuracy"] > 0.5

    again = small_run.publish_checkpoint(tmp_path / "again", run.model)
    # With so few examples, even two equal models need this large a margin.
    second = pipeline.go("second", again, gate={"champion": {"margin": 0.2}})
    assert (second.word, second.metrics.get("version")) == ("promoted", 2), second.metrics
    decided = json.loads(storage.read_file(second.decision, "decision.json"))
    assert decided["champion"] == champion.uri

    third = pipeline.go("third", gate={"champion": {"margin": -0.1}})
    assert third.word == "refused"
    assert registry.champion(pipeline.root, "digits").number == 2


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.slow
def test_a_run_that_is_resumed_after_its_promotion_ends_as_it_did(pipeline):
    better = {"gate": {"champion": {"margin": -0.1}}}
    first, again = (pipeline.go("first", **better) for _ in range(2))
    assert (again.word, again.model, again.metrics) == ("promoted", first.model, first.metrics)
    assert registry.newest(pipeline.root, "digits") == 1


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_blessed_model_is_exported_and_a_refusal_of_the_registry_keeps_its_reasons(
    pipeline, tmp_path
):
    formats = ["saved_model", "keras"]
    small = {"registry": {"max_megabytes": 0.001}}
    made = pipeline.go("first", export={"formats": formats}, **small)
    name = f"step-{GLOBAL_STEP:08d}-"
    assert made.model.startswith(storage.join(pipeline.root, "first", "model", name))
    storage.verify(made.model)
    ends = [each for each in events.read(tmp_path / "events.jsonl") if isinstance(each, StepEnd)]
    [exported] = [each.metrics for each in ends if each.step == "export_model"]
    assert set(exported) == set(formats)
    assert made.exported == {"uri": made.model, **exported}
    assert made.word == "refused"
    assert made.metrics["reasons"][0].startswith("The size of the model in megabytes ")
    assert made.metrics["version"] == 0
    assert registry.champion(pipeline.root, "digits") is None
