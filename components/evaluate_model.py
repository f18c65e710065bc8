"""Measure a checkpoint, and the champion, on the test split."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp import dsl

from components import descriptor
from components.image import component
from components.records.record import Step
from components.records.run_store import output_of, scratch_folder
from trainer import storage
from trainer.code.bundle import configured
from trainer.config.main_metric import MainMetric
from trainer.config.schema import Config
from trainer.promotion.registry import opponent


@component
def evaluate_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    evaluation_metrics: dsl.Output[dsl.Metrics],
    confusion_matrix: dsl.Output[dsl.ClassificationMetrics],
    roc_curve: dsl.Output[dsl.ClassificationMetrics],
    dataset_descriptor: dsl.Input[dsl.Dataset] = None,
    checkpoint_descriptor: dsl.Input[dsl.Model] = None,
) -> str:
    """Evaluate the checkpoint on the dataset; return the URI of the evaluation."""
    from components.evaluate_model import work
    from components.records.record import run

    return run(work, locals())


def work(step: Step) -> str:
    """Measure it; what the UI draws goes to the three artifacts."""
    with scratch_folder() as scratch:
        descriptor.check(step.dataset_descriptor, step.dataset)
        descriptor.check(step.checkpoint_descriptor, step.checkpoint)
        settings = configured(step.config)
        found = opponent(step.root, settings.name, step.checkpoint)
        champion = found.uri if found else ""
        inputs = Inputs(dataset=step.dataset, checkpoint=step.checkpoint, champion=champion)
        result = evaluated(settings, step.root, step.run_id, inputs, scratch)
        measured = json.loads(storage.read_file(result.uri, "metrics.json"))
        metrics = {**result.metrics, **_of_baselines(measured)}
        step.output.done(result.uri, metrics, MainMetric.of(measured))
        descriptor.describe(step.evaluation_metrics, result.uri, descriptor.scalars(metrics))
        matrix = measured.get("confusion_matrix", ())
        descriptor.log_confusion(step.confusion_matrix, measured.get("labels", ()), matrix)
        descriptor.log_roc(step.roc_curve, measured.get("roc", ()))
        return result.uri


def _of_baselines(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return the main metric of each baseline, as `baseline_gradient_boosting_auc`."""
    main = measured["main_metric"]
    values = {each["name"]: each["metrics"].get(main) for each in measured.get("baselines", ())}
    return {
        f"baseline_{re.sub(r'[^a-z]+', '_', name.lower())}_{main}": value
        for name, value in values.items()
        if value is not None
    }


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """URIs of a dataset, of the checkpoint to measure and of the champion, empty without one."""

    dataset: str
    checkpoint: str
    champion: str


def evaluated(config: Config, root: str, run_id: str, inputs: Inputs, scratch: Path) -> Any:
    """Measure a checkpoint of a run next to a champion; return the `Evaluation`."""
    from trainer.evaluation import evaluate

    checkpoint, champion = inputs.checkpoint, inputs.champion
    created = storage.read_manifest(checkpoint).created
    origin = (inputs.dataset, created, *evaluate.asked(config, champion).values())
    output = output_of(root, run_id, "evaluation", checkpoint, *origin)
    return evaluate.evaluate(config, inputs.dataset, checkpoint, output, scratch, champion)
