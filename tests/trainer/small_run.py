"""A small published dataset and a checkpoint of a model for it, made with the real modules."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.checkpoints import Checkpoints
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config, GateConfig
from flotilla.trainer.data.preparation.shards import write_shards
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.export import smoke_request
from flotilla.trainer.export.export import Exported, export
from flotilla.trainer.features.dataset_spec import BLOCK_ROWS, SCHEMA
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.accumulator import Accumulator
from flotilla.trainer.features.statistics.statistics import Statistics
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.promotion import gate
from flotilla.trainer.runtime.errors import UserError

TEST_EXAMPLES = 97
CLASSES = 10
GLOBAL_STEP = 7
FEATURES = {
    "image": FeatureSpec(shape=(8, 8, 1), dtype="uint8", stored="raw"),
    "label": FeatureSpec(shape=(), dtype="int64", stored="int"),
}


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """A finished training run, and its test examples as arrays."""

    root: Path
    config: Config
    dataset: str
    checkpoint: str
    model: keras.Model
    images: np.ndarray
    labels: np.ndarray

    @property
    def logits(self) -> np.ndarray:
        """Return the model's logits for all test examples, computed with NumPy."""
        kernel, bias = (variable.numpy() for variable in self.model.variables)
        flat = self.images.reshape(len(self.images), -1).astype(np.float64) / 255
        return flat @ kernel + bias


def small_run(root: Path) -> SmallRun:
    """Publish digits and a checkpoint of a softmax model that has the mean images as weights."""
    images, labels = digits()
    dataset = publish_dataset(root / "dataset", (images, labels))
    evaluation = {"batch_size": 10, "baseline": "none"}
    config = parse_config({"model": {"name": "softmax"}, "evaluation": evaluation})
    model = template_model(config, images, labels)
    checkpoint = publish_checkpoint(root / "checkpoints", model)
    return SmallRun(
        root=root,
        config=config,
        dataset=dataset,
        checkpoint=checkpoint,
        model=model,
        images=images[:TEST_EXAMPLES],
        labels=labels[:TEST_EXAMPLES],
    )


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's handwritten digits as uint8 images (n, 8, 8, 1), and their classes."""
    found = load_digits()
    images = np.round(found.images * 255 / 16).astype(np.uint8)[..., np.newaxis]
    return images, found.target.astype(np.int64)


def publish_dataset(  # noqa: PLR0913
    folder: Path,
    examples: tuple[np.ndarray, np.ndarray],
    *,
    test: int = TEST_EXAMPLES,
    claimed: int | None = None,
    label_names: list[str] | None = None,
    classes: int = CLASSES,
) -> str:
    """Publish a dataset; the first `test` images are the test split, the next 40 are for training.

    `claimed` is a wrong number of test examples for the manifest.
    """
    images, labels = examples
    source = folder.with_name(f"{folder.name}-source")
    source.mkdir(parents=True)
    parts = {"train": (slice(test, test + 40), 2), "test": (slice(0, test), 3)}
    splits, batches = {}, {}
    for split, (rows, count) in parts.items():
        batches[split] = {"image": images[rows], "label": labels[rows]}
        shards = write_shards(source, split, FEATURES, batches[split], count=count)
        splits[split] = {"examples": sum(shards), "shards": [*shards]}
    if claimed is not None:
        splits["test"]["shards"][0] += claimed - test
    write_statistics(source, batches)
    names = [str(i) for i in range(classes)] if label_names is None else label_names
    fields = {
        "dataset": "digits",
        "version": "1.0.0",
        "dataset_schema": SCHEMA,
        "block_rows": BLOCK_ROWS,
        "splits": splits,
        "features": {
            "image": FEATURES["image"].to_json(),
            "label": replace(FEATURES["label"], num_classes=classes, labels=names).to_json(),
        },
        "inputs": ["image"],
        "targets": ["label"],
        **dict.fromkeys(("weight", "group"), ""),
        "target_counts": {},
        "target_moments": {},
        "fingerprint": "0" * 8,
    }
    uri = storage.uri_of(folder)
    storage.publish(source, uri, kind="dataset", fields=fields)
    return uri


def write_statistics(
    folder: Path,
    batches: dict[str, dict[str, Any]],
    features: dict[str, FeatureSpec] = FEATURES,
    targets: tuple[str, ...] = ("label",),
) -> None:
    """Write the statistics of each split, as preparation does."""
    inputs = [name for name in features if name not in targets]
    known = {split: Accumulator(features, inputs, targets, vocabulary=10) for split in batches}
    for split, batch in batches.items():
        known[split].add(batch)
    results = Statistics(splits={split: each.result() for split, each in known.items()})
    sketches = {split: each.sketch() for split, each in known.items()}
    (folder / statistics.FILE).write_bytes(statistics.to_bytes(results))
    (folder / statistics.EXAMPLES).write_bytes(statistics.sketches_to_bytes(sketches))


def template_model(config: Config, images: np.ndarray, labels: np.ndarray) -> keras.Model:
    """Return a softmax model whose weights are the centered mean images of the classes."""
    spec = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(CLASSES,))
    model = registry.build(config.model, spec, 0)
    flat = images.reshape(len(images), -1) / 255
    means = np.stack([flat[labels == digit].mean(axis=0) for digit in range(CLASSES)])
    kernel, bias = model.variables
    kernel.assign(means.T.astype(np.float32))
    bias.assign((-0.5 * (means**2).sum(axis=1)).astype(np.float32))
    return model


def publish_checkpoint(
    folder: Path, model: keras.Model, step: int = GLOBAL_STEP, **fields: Any
) -> str:
    variables = {f"model/{variable.path}": variable.value for variable in model.variables}
    variables["global_step"] = tf.Variable(step, dtype=tf.int64)
    saved = Checkpoints(storage.uri_of(folder), keep=9, scratch=folder.with_name("saving"))
    return saved.save(variables, io_device=None, fields={"metrics": {}, **fields})


def decide(run: SmallRun, folder: Path, *, accuracy: float, champion: str = "") -> str:
    """Evaluate the run's checkpoint and check its accuracy; return the decision's URI."""
    config = run.config.model_copy(
        update={"gate": GateConfig(min={"accuracy": accuracy}, constant="reported")}
    )
    folder.mkdir(parents=True, exist_ok=True)
    evaluation, decision = (storage.uri_of(folder / name) for name in ("evaluation", "decision"))
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    evaluate(config, run.dataset, run.checkpoint, evaluation, scratch, champion)
    return gate.check(config, evaluation, decision).uri


class _Answering:
    """Answers the request of an export in this process, with the program of the new process."""

    returncode = 0

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def communicate(self, saved_model: str, timeout: float) -> tuple[str, str]:
        del timeout
        arguments, given = ["smoke_request.py", str(self._folder)], io.StringIO(saved_model)
        with (
            patch.object(sys, "argv", arguments),
            patch.object(sys, "stdin", given),
            redirect_stdout(io.StringIO()) as out,
        ):
            smoke_request.main()
        return out.getvalue(), ""


@contextmanager
def answering_inside() -> Iterator[None]:
    """Answer the requests of exports in this process.

    A new process would import TensorFlow, which takes seconds. Tests of that process are in
    `tests/trainer/export`.
    """

    @contextmanager
    def answering(folder: Path) -> Iterator[_Answering]:
        yield _Answering(folder)

    with patch("flotilla.trainer.export.export.fresh_process", answering):
        yield


def export_model(run: SmallRun, decision: str, output: str, scratch: Path) -> Exported:
    """Export without a new process."""
    with answering_inside():
        return export_as_in_production(run, decision, output, scratch)


def export_as_in_production(run: SmallRun, decision: str, output: str, scratch: Path) -> Exported:
    scratch.mkdir(exist_ok=True)
    return export(run.config, run.dataset, run.checkpoint, decision, output, scratch)


def refused_export(run: SmallRun, decision: str, folder: Path) -> str:
    """Return the error of an export that must be refused and publish nothing."""
    output = storage.uri_of(folder / "refused")
    with pytest.raises(UserError) as caught:
        export_model(run, decision, output, folder / "scratch")
    message = str(caught.value)
    assert "\n" not in message
    assert not (folder / "refused").exists()
    return message


def with_formats(run: SmallRun, *formats: str) -> SmallRun:
    forms = run.config.export.model_copy(update={"formats": formats})
    return replace(run, config=run.config.model_copy(update={"export": forms}))
