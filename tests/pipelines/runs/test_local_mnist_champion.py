"""MNIST, whole and real: who may follow a champion, and who may not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from kfp import dsl

from components import check_gate, evaluate_model
from components.records import run_store
from tests.components.called_steps import artifact_in
from tests.pipelines.called import call, calling, processes_of, setting
from tests.trainer.small_run import publish_checkpoint
from trainer import events, storage
from trainer.config.load import load_config
from trainer.config.thresholds import ChampionRule
from trainer.data.read import evaluation_batches, stage_shards
from trainer.data.spec import DatasetSpec
from trainer.evaluation.evaluate import restored
from trainer.events import StepEnd
from trainer.promotion import registry
from trainer.storage.local import locked
from trainer.tasks.registry import objective_of

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[3]
SOFTMAX = setting(model__name="softmax", model__args="{}")
FEW = setting(training__strategy="single", training__validate_every=0, gate__min="{}")
BETTER = setting(gate__champion__margin=-0.01, training__steps=900)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("mnist") / "runs"


@pytest.fixture(scope="module")
def words(mnist_dir):
    """What every run is called with."""
    return [
        str(ROOT / "configs/mnist.yaml"), *FEW, *setting(data__manual_dir=mnist_dir),
        *setting(export__formats="[saved_model]"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def root(workdir):
    return storage.uri_of(workdir)


@pytest.fixture(scope="module")
def first(workdir, words):
    """A linear model that has seen a fifth of the examples: champion, since there was none."""
    run = call("run", workdir, *words, *SOFTMAX, *setting(training__steps=100), cwd=workdir.parent)
    assert run.code == 0, run.err
    return run


def champion(root):
    return registry.champion(root, "mnist").number


def test_the_confusion_matrix_holds_every_test_example(first):
    measured = first.read("evaluation", "metrics.json")
    matrix = np.array(measured["confusion_matrix"])
    assert matrix.sum() == measured["examples"] == 10_000
    assert matrix.trace() / 10_000 == measured["metrics"]["accuracy"] > 0.7
    assert matrix.sum(axis=1).tolist() == [row["support"] for row in measured["per_class"]]


def test_one_that_was_made_worse_on_purpose_is_refused(first, workdir, words, root):
    few = setting(training__steps=3)
    run = call("run", workdir, *words, *SOFTMAX, *few, cwd=workdir.parent)
    assert run.code == 3, run.err
    assert "accuracy_difference -0." in run.answer["message"]
    assert run.answer["metrics"]["accuracy"] < first.answer["metrics"]["accuracy"]
    assert "model" not in run.answer["artifacts"]
    assert champion(root) == 1


def test_one_that_is_better_by_noise_alone_is_refused(first, tmp_path, root, monkeypatch):
    monkeypatch.setenv(run_store.RUN_FOLDER, str(tmp_path))
    config = load_config(first.folder / "config.json")
    rule = ChampionRule(margin=0.0)
    config = config.model_copy(update={"gate": config.gate.model_copy(update={"champion": rule})})
    dataset = first.answer["artifacts"]["dataset"]
    checkpoint = _noisy(config, dataset, first.answer["artifacts"]["checkpoint"], tmp_path)
    given = (config.model_dump_json(), root, "noise")
    kinds = (dsl.Metrics, dsl.ClassificationMetrics, dsl.ClassificationMetrics)
    ui_artifacts = [artifact_in(tmp_path, kind) for kind in kinds]
    evaluation = evaluate_model.evaluate_model.python_func(
        *given, dataset, checkpoint, *ui_artifacts
    )
    given = (*given, evaluation, str(tmp_path / "decision"))
    assert check_gate.check_gate.python_func(*given, artifact_in(tmp_path)) == "refused"
    decision = (tmp_path / "decision").read_text()
    [rule] = json.loads(storage.read_file(decision, "decision.json"))["rules"]
    assert (rule["metric"], rule["passed"]) == ("accuracy_difference", False)
    paired = json.loads(storage.read_file(evaluation, "metrics.json"))["champion"]["paired"]
    assert paired["difference"] > 0, "it has more examples right than the champion"


def _noisy(config, dataset, checkpoint, folder):
    """Shake the champion until a few more examples than before happen to be right; publish that."""
    spec = DatasetSpec.from_manifest(storage.read_manifest(dataset))
    model, step = restored(config, spec, objective_of(config, spec), checkpoint, folder)
    files = stage_shards(dataset, folder / "test", "test")
    [(images, labels)] = evaluation_batches(spec, files, batch_size=10_000)
    genuine, generator = model.get_weights(), np.random.default_rng(0)

    def right():
        return int((model.predict(images, verbose=0).argmax(axis=1) == labels.numpy()).sum())

    before = right()
    while not 0 < right() - before <= 5:
        noise = (generator.normal(scale=1e-3, size=each.shape) for each in genuine)
        model.set_weights([each + more for each, more in zip(genuine, noise, strict=True)])
    return publish_checkpoint(folder / "checkpoints", model, step)


@pytest.mark.usefixtures("first")
def test_one_that_dies_between_export_and_promotion_leaves_the_champion_and_goes_on(
    workdir, words, root
):
    promotions = storage.local_path(storage.join(registry.home(root, "mnist"), "promotions"))
    # With the folder locked a promotion waits at its last moment.
    with locked(promotions), calling("run", workdir, *words, *BETTER, cwd=workdir.parent) as run:
        folder = _until_it_is_registered(run, workdir, root)
        for process in processes_of(workdir):
            process.kill()
        out, err = run.communicate()
    assert run.returncode != 0, out + err
    done = {e.step for e in events.read(folder / "events.jsonl") if isinstance(e, StepEnd)}
    assert "export_model" in done
    assert "register_model" not in done
    assert champion(root) == 1
    assert [each.number for each in registry.promotions(root, "mnist")] == [1]

    resume = ["--resume", folder.name]
    again = call("run", workdir, *words, *BETTER, *resume, cwd=workdir.parent)
    assert again.code == 0, again.err
    assert champion(root) == 2
    assert registry.newest(root, "mnist") == 2
    assert again.read("registration", "registration.json")["promotion"] == 2
    rules = {rule["metric"]: rule for rule in again.read("decision", "decision.json")["rules"]}
    assert rules["accuracy_difference"]["value"] > 0.01


def _until_it_is_registered(run, workdir, root):
    """Wait until version 2 stands in the registry; return the folder of the run."""
    while run.poll() is None:
        if len(registry.versions(root, "mnist")) == 2:
            [folder] = {path.parent for path in workdir.glob("*/events.jsonl")} - {
                path.parent for path in workdir.glob("*/report.html")
            }
            return folder
        time.sleep(0.05)
    raise AssertionError(run.communicate())
