"""Measure a checkpoint on the whole test split.

The evaluation is published as `metrics.json`, `curves.json` (ROC and precision over recall of each
class), `predictions.npz` (`label` [n], `logits` and `probabilities` [n, classes], in the order of
the dataset; `champion_logits` where there is a champion that can answer) and `worst/*.png`,
pictures of the examples with the highest losses.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer import storage
from trainer.checkpoints.checkpoints import restore_model
from trainer.config.schema import Config
from trainer.data.read import labelled_columns, stage_shards
from trainer.data.spec import DatasetSpec, slice_features
from trainer.errors import UserError
from trainer.evaluation import metrics
from trainer.evaluation.champion import champion_of, compared
from trainer.evaluation.metrics import Metrics, intervals
from trainer.evaluation.predictions import Predictions, predict
from trainer.evaluation.signature import class_names
from trainer.evaluation.slices import sliced
from trainer.models import registry
from trainer.models.spec import InputSpec

KIND = "evaluation"
SPLIT = "test"

Measurer = Callable[[tf.data.Dataset], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Where an evaluation is published, and its metrics, as far as they are defined."""

    uri: str
    metrics: dict[str, float]


def evaluate(  # noqa: PLR0913, PLR0917
    config: Config, dataset: str, checkpoint: str, output: str, scratch: Path, champion: str = ""
) -> Evaluation:
    """Measure the model of `checkpoint` on the test split of `dataset` and publish it at `output`.

    The champion answers the same examples, batch by batch. The same checkpoint and dataset again is
    a no-op that returns the metrics published before.

    Args:
        config: says how the model is built and how many examples make a batch.
        dataset: URI of a published dataset.
        checkpoint: URI of a published checkpoint.
        output: URI of the evaluation.
        scratch: local folder for what is fetched and made.
        champion: URI of the published model to compare with; empty where there is none yet.

    Raises:
        UserError: there are no test examples, the model gives no finite numbers, or an input
            cannot be read.
    """
    spec, inputs_from = read_inputs(dataset, checkpoint)
    slices = ",".join(config.evaluation.slices)
    made_from = {**inputs_from, "slices": slices, "champion": champion}
    if made_before(output, KIND, made_from):
        written = json.loads(storage.read_file(output, "metrics.json"))
        return Evaluation(uri=output, metrics=_defined(written["metrics"]))
    if not spec.examples(SPLIT):
        raise UserError(f"{dataset} has no {SPLIT} examples: nothing can be evaluated")
    features = slice_features(spec.features, spec.label, config.evaluation.slices)
    model, step = restored(config, spec, checkpoint, scratch)
    files = stage_shards(dataset, scratch / SPLIT, SPLIT)
    size = config.evaluation.batch_size
    batches = labelled_columns(spec, files, batch_size=size, columns=features)
    opponent = champion_of(champion, spec, scratch) if champion else None
    answer = opponent.answer if opponent else None
    found = predict(model, spec, batches, answer)
    _require_sound(spec, found, dataset, checkpoint)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="evaluation-") as name:
        folder = Path(name)
        summary = {**summarized(spec, found), "global_step": step}
        if opponent:
            summary["champion"] = compared(opponent, found)
        summary["worst"] = found.worst.write(folder, class_names(spec))
        _write(folder, summary, found, class_names(spec))
        fields = {"made_from": made_from, "metrics": summary["metrics"], "global_step": step}
        storage.publish(folder, output, kind=KIND, fields=fields)
    return Evaluation(uri=output, metrics=_defined(summary["metrics"]))


def _defined(metrics: Metrics) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


def measurer(model: keras.Model) -> Measurer:
    """Return a function from finite batches to mean `loss` and `accuracy`, compiled once.

    It reads the weights as they are at each call.

    Raises:
        UserError: there are no examples; a loss that is not finite is returned as it is.
    """
    graph = tf.function(partial(totals, model))
    return lambda batches: means(graph(batches))


def totals(model: keras.Model, batches: tf.data.Dataset) -> list[tf.Tensor]:
    """Return sums over finite batches: of the loss, of right answers, of examples."""
    loss = tf.zeros((), tf.float64)
    correct = tf.zeros((), tf.int64)
    count = tf.zeros((), tf.int64)
    # Not over the dataset itself: its functions may not reach variables on other machines.
    for inputs, given in iter(batches):
        labels = tf.cast(given, tf.int64)
        logits = tf.cast(model(inputs, training=False), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss += tf.reduce_sum(tf.cast(losses, tf.float64))
        hits = tf.equal(tf.argmax(logits, axis=1), labels)
        correct += tf.reduce_sum(tf.cast(hits, tf.int64))
        count += tf.size(labels, tf.int64)
    return [loss, correct, count]


def means(sums: Sequence[Any]) -> dict[str, float]:
    """Return `loss` and `accuracy` from `totals`, or from totals of parts that were added up.

    Raises:
        UserError: there are no examples.
    """
    loss, correct, count = (float(total) for total in sums)
    if not count:
        raise UserError("there are no examples to measure the model on")
    return {"loss": loss / count, "accuracy": correct / count}


def read_inputs(dataset: str, checkpoint: str) -> tuple[DatasetSpec, dict[str, str]]:
    """Return the dataset's spec, and what names these very inputs in a manifest."""
    data = storage.read_manifest(dataset)
    made_from = {
        "dataset": dataset,
        "fingerprint": str(data.fields["fingerprint"]),
        "checkpoint": checkpoint,
        # A resumed run may publish another checkpoint under the same name.
        "checkpoint_created": storage.read_manifest(checkpoint).created,
    }
    return DatasetSpec.from_manifest(data), made_from


def made_before(output: str, kind: str, made_from: dict[str, str]) -> bool:
    """Say whether `output` was made from the same inputs: a step that is tried again."""
    try:
        there = storage.read_manifest(output)
    except storage.NotPublished:
        return False
    return there.kind == kind and there.fields.get("made_from") == made_from


def build_model(config: Config, spec: DatasetSpec) -> keras.Model:
    """Return the configured model for a dataset, with new weights."""
    inputs = InputSpec.of(spec.features, spec.inputs, spec.num_classes)
    return registry.build(config.model, inputs, config.training.seed)


def restored(
    config: Config, spec: DatasetSpec, checkpoint: str, scratch: Path
) -> tuple[keras.Model, int]:
    """Return the model with the weights of the checkpoint, and the checkpoint's global step."""
    model = build_model(config, spec)
    manifest = restore_model(checkpoint, model, scratch)
    return model, int(manifest.fields["global_step"])


def _require_sound(spec: DatasetSpec, found: Predictions, dataset: str, checkpoint: str) -> None:
    expected, labels = spec.examples(SPLIT), found.labels
    if len(labels) != expected:
        raise UserError(
            f"{dataset} gave {len(labels)} {SPLIT} examples and its manifest says {expected}; "
            "delete it and prepare it again"
        )
    if labels.min() < 0 or labels.max() >= spec.num_classes:
        wrong = labels.max() if labels.min() >= 0 else labels.min()
        raise UserError(
            f"{dataset} has the label {wrong} in its {SPLIT} split, outside of 0 to "
            f"{spec.num_classes - 1}; correct the dataset's builder"
        )
    bad = int((~np.isfinite(found.logits).all(axis=1)).sum())
    if bad:
        raise UserError(
            f"the model of {checkpoint} gives no finite numbers for {bad} of {expected} {SPLIT} "
            "examples: training has diverged; train again with a lower "
            "training.optimizer.learning_rate"
        )


def summarized(spec: DatasetSpec, found: Predictions) -> dict[str, Any]:
    """Return what `metrics.json` says of the predictions.

    A row of `confusion_matrix` is a true class; `per_class` has zeros for one that does not occur.
    """
    labels, logits, names = found.labels, found.logits, class_names(spec)
    each = metrics.per_class(labels, logits, names)
    calibration = metrics.calibration(labels, logits)
    return {
        "split": SPLIT,
        "examples": len(labels),
        "metrics": {
            **metrics.headline(labels, logits),
            "roc_auc": metrics.mean_area(each, "roc_auc"),
            "pr_auc": metrics.mean_area(each, "pr_auc"),
            "calibration_error": calibration["error"],
        },
        "intervals": intervals(labels, logits),
        "per_class": each,
        "confusion_matrix": metrics.confusion(labels, logits),
        "roc": metrics.roc(labels, logits),
        "labels": names,
        "calibration": calibration["bins"],
        "slices": {
            feature: sliced(values, labels, logits, tuple(names) if feature == spec.label else ())
            for feature, values in found.columns.items()
        },
    }


def _write(folder: Path, summary: dict[str, Any], found: Predictions, names: list[str]) -> None:
    _write_json(folder / "metrics.json", summary)
    _write_json(folder / "curves.json", metrics.curves(found.labels, found.logits, names))
    arrays = {
        "label": found.labels,
        "logits": found.logits,
        "probabilities": metrics.softmax(found.logits),
    }
    if found.champion is not None:
        arrays["champion_logits"] = found.champion
    np.savez(folder / "predictions.npz", allow_pickle=False, **arrays)


def _write_json(path: Path, tree: object) -> None:
    text = json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
