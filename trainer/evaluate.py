"""Measure a checkpoint on the whole test split.

The evaluation is published as `metrics.json` and `predictions.npz` (`label` [n], `logits` and
`probabilities` [n, classes], in the order of the dataset).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from sklearn import metrics as scores

from trainer import storage
from trainer.checkpoints import restore_model
from trainer.config import Config
from trainer.data.read import evaluation_batches, stage_shards
from trainer.data.spec import DatasetSpec
from trainer.errors import UserError
from trainer.models import registry
from trainer.models.spec import InputSpec
from trainer.refused_input import refused_input

KIND = "evaluation"
SPLIT = "test"

Floats = npt.NDArray[np.floating[Any]]
Labels = npt.NDArray[np.int64]
Measurer = Callable[[tf.data.Dataset], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Where an evaluation is published, and its figures."""

    uri: str
    metrics: dict[str, float]


def evaluate(
    config: Config, dataset: str, checkpoint: str, output: str, scratch: Path
) -> Evaluation:
    """Measure the model of `checkpoint` on the test split of `dataset` and publish it at `output`.

    The same checkpoint and dataset again is a no-op that returns the figures published before.

    Args:
        config: says how the model is built and how many examples make a batch.
        dataset: URI of a published dataset.
        checkpoint: URI of a published checkpoint.
        output: URI of the evaluation.
        scratch: local folder for what is fetched and made.

    Raises:
        UserError: there are no test examples, the model gives no finite numbers, or an input
            cannot be read.
    """
    spec, made_from = read_inputs(dataset, checkpoint)
    if made_before(output, KIND, made_from):
        written = json.loads(storage.read_file(output, "metrics.json"))
        return Evaluation(uri=output, metrics=written["metrics"])
    if not spec.examples(SPLIT):
        raise UserError(f"{dataset} has no {SPLIT} examples: nothing can be evaluated")
    model, step = restored(config, spec, checkpoint, scratch)
    files = stage_shards(dataset, scratch / SPLIT, SPLIT)
    batches = evaluation_batches(spec, files, batch_size=config.evaluation.batch_size)
    labels, logits = predict(model, batches)
    _require_sound(spec, labels, logits, dataset, checkpoint)
    summary = {"split": SPLIT, "examples": len(labels), **_summary(spec, labels, logits)}
    arrays = {"label": labels, "logits": logits, "probabilities": softmax(logits)}
    with tempfile.TemporaryDirectory(dir=scratch, prefix="evaluation-") as name:
        folder = Path(name)
        text = json.dumps(
            {**summary, "global_step": step}, indent=1, ensure_ascii=False, allow_nan=False
        )
        (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")
        np.savez(folder / "predictions.npz", allow_pickle=False, **arrays)
        fields = {"made_from": made_from, "metrics": summary["metrics"], "global_step": step}
        storage.publish(folder, output, kind=KIND, fields=fields)
    return Evaluation(uri=output, metrics=summary["metrics"])


def measurer(model: keras.Model) -> Measurer:
    """Return a function from finite batches to mean `loss` and `accuracy`, compiled once.

    It reads the weights as they are at each call.

    Raises:
        UserError: there are no examples; a loss that is not finite is returned as it is.
    """

    @tf.function
    def totals(batches: tf.data.Dataset) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        loss = tf.zeros((), tf.float64)
        correct = tf.zeros((), tf.int64)
        count = tf.zeros((), tf.int64)
        for inputs, given in batches:
            labels = tf.cast(given, tf.int64)
            logits = tf.cast(model(inputs, training=False), tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss += tf.reduce_sum(tf.cast(losses, tf.float64))
            hits = tf.equal(tf.argmax(logits, axis=1), labels)
            correct += tf.reduce_sum(tf.cast(hits, tf.int64))
            count += tf.size(labels, tf.int64)
        return loss, correct, count

    def measured(batches: tf.data.Dataset) -> dict[str, float]:
        loss, correct, count = (float(total) for total in totals(batches))
        if not count:
            raise UserError("there are no examples to measure the model on")
        return {"loss": loss / count, "accuracy": correct / count}

    return measured


def measure(model: keras.Model, batches: tf.data.Dataset) -> dict[str, float]:
    """Return mean `loss` and `accuracy` of finite batches; see `measurer`."""
    return measurer(model)(batches)


def predict(model: keras.Model, batches: tf.data.Dataset) -> tuple[Labels, Floats]:
    """Return labels [n] and logits [n, classes] of all examples of finite batches, in order."""

    @tf.function(reduce_retracing=True)
    def forward(inputs: Any) -> tf.Tensor:
        return tf.cast(model(inputs, training=False), tf.float32)

    labels: list[npt.NDArray[Any]] = []
    logits: list[npt.NDArray[Any]] = []
    for inputs, given in batches:
        labels.append(given.numpy())
        with refused_input():
            logits.append(forward(inputs).numpy())
    if not labels:
        raise UserError("there are no examples to predict")
    return np.concatenate(labels).astype(np.int64), np.concatenate(logits)


def softmax(logits: Floats) -> Floats:
    """Return the probabilities of logits [n, classes]."""
    return np.exp(_log_softmax(logits)).astype(np.float32)


def read_inputs(dataset: str, checkpoint: str) -> tuple[DatasetSpec, dict[str, str]]:
    """Return the dataset's spec, and what names these very inputs in a manifest."""
    data = storage.read_manifest(dataset)
    made_from = {
        "dataset": dataset,
        "fingerprint": str(data.fields["fingerprint"]),
        "checkpoint": checkpoint,
        # A run that begins again may publish another checkpoint under the same name.
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


def restored(
    config: Config, spec: DatasetSpec, checkpoint: str, scratch: Path
) -> tuple[keras.Model, int]:
    """Return the model with the weights of the checkpoint, and the checkpoint's global step."""
    inputs = InputSpec.of(spec.features, spec.inputs, spec.num_classes)
    model = registry.build(config.model, inputs, config.training.seed)
    manifest = restore_model(checkpoint, model, scratch)
    return model, int(manifest.fields["global_step"])


def _require_sound(
    spec: DatasetSpec, labels: Labels, logits: Floats, dataset: str, checkpoint: str
) -> None:
    expected = spec.examples(SPLIT)
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
    bad = int((~np.isfinite(logits).all(axis=1)).sum())
    if bad:
        raise UserError(
            f"the model of {checkpoint} gives no finite numbers for {bad} of {expected} {SPLIT} "
            "examples: training has diverged; train anew with a lower "
            "training.optimizer.learning_rate"
        )


def _summary(spec: DatasetSpec, labels: Labels, logits: Floats) -> dict[str, Any]:
    """Return `metrics`, `per_class`, `confusion_matrix` (row: true class) and `labels`.

    Macro averages are over the classes that occur, as label or as prediction; a class that does
    not occur has zeros in `per_class`.
    """
    predicted = logits.argmax(axis=1)
    classes = range(spec.num_classes)
    names = list(spec.labels) or [str(index) for index in classes]
    each = scores.precision_recall_fscore_support(
        labels, predicted, labels=list(classes), zero_division=0
    )
    macro = scores.precision_recall_fscore_support(
        labels, predicted, average="macro", zero_division=0
    )
    matrix = scores.confusion_matrix(labels, predicted, labels=list(classes))
    losses = -_log_softmax(logits)[np.arange(len(labels)), labels]
    return {
        "metrics": {
            "loss": float(losses.mean()),
            "accuracy": float((predicted == labels).mean()),
            "macro_precision": float(macro[0]),
            "macro_recall": float(macro[1]),
            "macro_f1": float(macro[2]),
        },
        "per_class": [
            {
                "label": name,
                "precision": float(precision),
                "recall": float(recall),
                "f1": float(f1),
                "support": int(support),
            }
            for name, precision, recall, f1, support in zip(names, *each, strict=True)
        ],
        "confusion_matrix": matrix.tolist(),
        "labels": names,
    }


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
