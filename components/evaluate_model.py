"""Evaluates a checkpoint and the champion on the test split, and applies the gate."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp import dsl

from flotilla.components import descriptor
from flotilla.components.image import component
from flotilla.components.records.record import Step
from flotilla.components.records.run_store import choose_output, scratch_folder
from flotilla.components.table import TRAINED
from flotilla.trainer import storage
from flotilla.trainer.code import load_bundle
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.config.schema import Config
from flotilla.trainer.promotion import gate
from flotilla.trainer.promotion import training_data as trained
from flotilla.trainer.promotion.registry import opponent


# Return the decision, because KFP's local runner resolves conditions only on return values.
@component
def evaluate_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    decision_uri: dsl.OutputPath(str),
    evaluation_metrics: dsl.Output[dsl.Metrics],
    confusion_matrix: dsl.Output[dsl.ClassificationMetrics],
    roc_curve: dsl.Output[dsl.ClassificationMetrics],
    decision: dsl.Output[dsl.Artifact],
    dataset_descriptor: dsl.Input[dsl.Dataset] = None,
    checkpoint_descriptor: dsl.Input[dsl.Model] = None,
) -> str:
    """Evaluate the checkpoint and apply the gate; return "blessed" or "refused".

    The URI of the decision is written to `decision_uri`. Without a checkpoint, the run ends with
    training, and the result is "trained".
    """
    from flotilla.components.evaluate_model import work
    from flotilla.components.records.record import run

    return run(work, locals())


def work(step: Step) -> str:
    """Return `blessed` or `refused`, and write the decision's URI to the file `decision_uri`.

    If the run ends with training, there is no checkpoint, and the result is `trained`. The step
    handles this case, because a condition in the pipeline would add a pod to every run.
    """
    if not step.checkpoint:
        Path(step.decision_uri).write_text("", encoding="utf-8")
        return TRAINED
    evaluation = step.stage("evaluate_model", evaluate)
    return step.stage("check_gate", check_gate, evaluation=evaluation)


def evaluate(step: Step) -> str:
    """Evaluate the checkpoint, write artifacts for the UI, and return the evaluation's URI."""
    with scratch_folder() as scratch:
        descriptor.check(step.dataset_descriptor, step.dataset)
        descriptor.check(step.checkpoint_descriptor, step.checkpoint)
        settings = load_bundle(step.config)
        found = opponent(step.root, settings.name, step.checkpoint)
        champion = found.uri if found else ""
        inputs = (step.dataset, step.checkpoint, champion)
        result = evaluate_checkpoint(settings, step.root, step.run_id, *inputs, scratch)
        measured = storage.read_json(result.uri, "metrics.json")
        metrics = {**result.metrics, **_baseline_metrics(measured)}
        step.output.done(result.uri, metrics, MainMetric.of(measured))
        descriptor.describe(step.evaluation_metrics, result.uri, descriptor.scalars(metrics))
        matrix = measured.get("confusion_matrix", ())
        descriptor.log_confusion(step.confusion_matrix, measured.get("labels", ()), matrix)
        descriptor.log_roc(step.roc_curve, measured.get("roc", ()))
        return result.uri


def check_gate(step: Step) -> str:
    """Apply the gate to the evaluation, and return `blessed` or `refused`."""
    policy = load_bundle(step.config)
    found = decide(policy, step.root, step.run_id, step.evaluation)
    if not found.blessed:
        trained.end(step.root, step.run_id, found.word)
    step.output.done(found.uri, found.in_words)
    descriptor.describe(step.decision, found.uri, found.in_words)
    Path(step.decision_uri).write_text(found.uri, encoding="utf-8")
    return found.word


def decide(config: Config, root: str, run_id: str, evaluation: str) -> gate.Decision:
    """Apply the gate to an evaluation, publish the decision and return it."""
    output = choose_output(root, run_id, "decision", evaluation, config.gate.digest())
    return gate.check(config, evaluation, output)


def _baseline_metrics(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return each baseline's main metric, named like `baseline_gradient_boosting_auc`."""
    main = measured["main_metric"]
    values = {each["name"]: each["metrics"].get(main) for each in measured.get("baselines", ())}
    return {
        f"baseline_{re.sub(r'[^a-z]+', '_', name.lower())}_{main}": value
        for name, value in values.items()
        if value is not None
    }


def evaluate_checkpoint(
    config: Config,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    champion: str,
    scratch: Path,
) -> Any:
    """Evaluate a checkpoint and the champion, and return the `Evaluation`.

    `champion` is empty if there is none.
    """
    from flotilla.trainer.evaluation import evaluate

    created = storage.read_manifest(checkpoint).created
    origin = (dataset, created, *evaluate.describe_request(config, champion).values())
    output = choose_output(root, run_id, "evaluation", checkpoint, *origin)
    return evaluate.evaluate(config, dataset, checkpoint, output, scratch, champion)
