"""Compares the cost of an evaluation with that of a minimal program for the same metrics."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn import metrics as scores
from sklearn.calibration import calibration_curve

from benchmarks.comparisons import Comparison, alternating
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.checkpoints import Checkpoints
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data.preparation.shards import write_shards
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.features.dataset_spec import BLOCK_ROWS, SCHEMA
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec

EXAMPLES, CLASSES, SHAPE = 20_000, 10, (28, 28, 1)
ROUNDS = 5
RESAMPLES = 1000
# Share of labels that are copied from the predictions. The other labels are random. With random
# labels alone, the metrics would be cheaper to compute.
KNOWN = 0.5
FEATURES = {
    "image": FeatureSpec(shape=SHAPE, dtype="uint8", stored="raw"),
    "label": FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=10),
}
CONFIG = parse_config(
    {
        "model": {"name": "mlp", "args": {"hidden_units": [100]}},
        "evaluation": {"baseline": "none"},
    }
)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and its examples, both published and in memory."""

    dataset: str
    checkpoint: str
    model: keras.Model
    images: Any
    labels: Any


def evaluation() -> Comparison:
    """Compare evaluating a published checkpoint with predicting and scoring arrays in memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subject = subject_of(folder)
        count = iter(range(1000))

        def ours() -> float:
            home = folder / f"{next(count)}"
            (home / "scratch").mkdir(parents=True)
            output = storage.uri_of(home / "evaluation")
            began = time.perf_counter()
            evaluate(CONFIG, subject.dataset, subject.checkpoint, output, home / "scratch")
            return EXAMPLES / (time.perf_counter() - began)

        def bare() -> float:
            began = time.perf_counter()
            metrics_of(subject)
            return EXAMPLES / (time.perf_counter() - began)

        # Warm up: the first run of each traces graphs and loads modules.
        ours(), bare()
        pairs = alternating(ROUNDS, ours, bare)
    return Comparison(
        name="evaluation: examples/s, compared with Keras's predict and scikit-learn in memory",
        rounds=tuple(own / other for own, other in pairs),
        at_least=0.25,
        more={"examples_per_second": [[round(each) for each in pair] for pair in pairs]},
    )


def metrics_of(subject: Subject) -> dict[str, Any]:
    """Compute the metrics with a minimal program that has the examples in memory."""
    labels = subject.labels
    logits = subject.model.predict(subject.images, batch_size=1000, verbose=0)
    probabilities = keras.ops.convert_to_numpy(keras.ops.softmax(logits))
    predicted = logits.argmax(axis=1)
    right = predicted == labels
    drawn = np.random.default_rng(0).integers(0, len(labels), (RESAMPLES, len(labels)))
    return {
        "loss": scores.log_loss(labels, probabilities, labels=range(CLASSES)),
        "accuracy": scores.accuracy_score(labels, predicted),
        "interval": np.percentile(right[drawn].mean(axis=1), [2.5, 97.5]),
        "top_3": scores.top_k_accuracy_score(labels, logits, k=3, labels=range(CLASSES)),
        "per_class": scores.classification_report(
            labels, predicted, output_dict=True, zero_division=0
        ),
        "confusion": scores.confusion_matrix(labels, predicted),
        "calibration": calibration_curve(right, probabilities.max(axis=1).clip(0, 1), n_bins=15),
        "areas": [
            (
                scores.roc_auc_score(labels == each, probabilities[:, each]),
                scores.average_precision_score(labels == each, probabilities[:, each]),
            )
            for each in range(CLASSES)
        ],
    }


def subject_of(folder: Path) -> Subject:
    """Create examples and a model, and publish them below a folder."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (EXAMPLES, *SHAPE)).astype(np.uint8)
    spec = InputSpec(shape=SHAPE, dtype="uint8", output_shape=(CLASSES,))
    model = registry.build(CONFIG.model, spec, 0)
    guesses = model.predict(images, batch_size=1000, verbose=0).argmax(axis=1)
    chance = generator.integers(0, CLASSES, EXAMPLES)
    labels = np.where(generator.random(EXAMPLES) < KNOWN, guesses, chance).astype(np.int64)
    variables = {f"model/{variable.path}": variable.value for variable in model.variables}
    variables["global_step"] = tf.Variable(0, dtype=tf.int64)
    saved = Checkpoints(storage.uri_of(folder / "checkpoints"), keep=1, scratch=folder / "saving")
    return Subject(
        dataset=_published(folder, images, labels),
        checkpoint=saved.save(variables, io_device=None, fields={"metrics": {}}),
        model=model,
        images=images,
        labels=labels,
    )


def _published(folder: Path, images: Any, labels: Any) -> str:
    source = folder / "source"
    source.mkdir()
    shards = write_shards(source, "test", FEATURES, {"image": images, "label": labels}, count=8)
    uri = storage.uri_of(folder / "dataset")
    fields = {
        "dataset_schema": SCHEMA, "block_rows": BLOCK_ROWS, "fingerprint": "0",
        "inputs": ["image"], "targets": ["label"],
        "weight": "", "group": "", "target_counts": {}, "target_moments": {},
        "features": {name: feature.to_json() for name, feature in FEATURES.items()},
        "splits": {"test": {"examples": EXAMPLES, "shards": shards}},
    }  # fmt: skip
    storage.publish(source, uri, kind="dataset", fields=fields)
    return uri
