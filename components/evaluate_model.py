"""Measure a checkpoint, and the champion, on the test split."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp import dsl

from components import descriptor, ui
from components.image import component
from components.locations import output_of, run_at, scratch_folder
from components.records.record import StepOutput, tried
from trainer import storage
from trainer.code.delivery import configured
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
    from components.evaluate_model import run_step

    return run_step(
        config,
        root,
        run_id,
        dataset,
        checkpoint,
        evaluation_metrics,
        confusion_matrix,
        roc_curve,
        dataset_descriptor,
        checkpoint_descriptor,
    )


def run_step(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    metrics: Any,
    confusion: Any,
    roc: Any,
    dataset_descriptor: Any = None,
    checkpoint_descriptor: Any = None,
) -> str:
    """Evaluate; `metrics` is KFP Metrics, `confusion` and `roc` are ClassificationMetrics."""
    call = dict(locals())

    def work(record: StepOutput) -> str:
        with scratch_folder() as scratch:
            descriptor.check(dataset_descriptor, dataset)
            descriptor.check(checkpoint_descriptor, checkpoint)
            settings = configured(config)
            found = opponent(root, settings.name, checkpoint)
            champion = found.uri if found else ""
            inputs = Inputs(dataset=dataset, checkpoint=checkpoint, champion=champion)
            result = evaluated(settings, root, run_id, inputs, scratch)
            record.done(result.uri, result.metrics)
            descriptor.describe(metrics, result.uri, ui.scalars(result.metrics))
            measured = json.loads(storage.read_file(result.uri, "metrics.json"))
            matrix = measured.get("confusion_matrix", ())
            ui.log_confusion(confusion, measured.get("labels", ()), matrix)
            ui.log_roc(roc, measured.get("roc", ()))
            return result.uri

    return tried(
        "evaluate_model", run_at(root, run_id), work, inputs={"dataset": dataset}, call=call
    )


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
    compared_by = config.gate.champion.compared_by() if champion else ""
    origin = (inputs.dataset, created, champion, compared_by, *config.evaluation.slices)
    output = output_of(root, run_id, "evaluation", checkpoint, *origin)
    return evaluate.evaluate(config, inputs.dataset, checkpoint, output, scratch, champion)
