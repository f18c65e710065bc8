"""Tests the evaluation of a checkpoint: metrics, one pass over every example, and errors."""

import dataclasses
import json
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data.preparation.shards import write_shards
from flotilla.trainer.evaluation import evaluate as evaluation
from flotilla.trainer.features.dataset_spec import BLOCK_ROWS, SCHEMA, DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks import registry as tasks
from flotilla.trainer.tasks.metrics import losses
from tests.trainer import small_run
from tests.trainer.objectives import NO_ROLES, of_classes
from tests.trainer.small_run import CLASSES, publish_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def evaluated(run):
    """Return the evaluation of the run, its `metrics.json` and its predictions."""
    uri = storage.uri_of(run.root / "evaluation")
    result = _evaluate(run, uri, run.root / "scratch")
    folder = storage.local_path(uri)
    text = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    labels, logits = (np.load(folder / f"predictions/{name}.npy") for name in ("label", "output"))
    return result, text, {"label": labels, "logits": logits}


def _evaluate(run, output, scratch, **replaced):
    run = dataclasses.replace(run, **replaced)
    scratch.mkdir(exist_ok=True)
    return evaluation.evaluate(run.config, run.dataset, run.checkpoint, output, scratch)


def _refusal(run, tmp_path, **replaced):
    output = storage.uri_of(tmp_path / "refused")
    with pytest.raises(UserError) as caught:
        _evaluate(run, output, tmp_path / "scratch", **replaced)
    message = str(caught.value)
    assert "\n" not in message
    assert not storage.is_published(output)
    return message


def test_every_test_example_is_predicted_once_and_in_order(run, evaluated):
    _, text, arrays = evaluated
    assert text["examples"] == small_run.TEST_EXAMPLES == 97
    np.testing.assert_array_equal(arrays["label"], run.labels)
    np.testing.assert_allclose(arrays["logits"], run.logits, rtol=1e-4, atol=1e-5)


def test_metrics_are_what_arithmetic_says(run, evaluated):
    result, text, _ = evaluated
    logits = run.logits
    exponentials = np.exp(logits)
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(run.labels))
    assert result.metrics["loss"] == pytest.approx(-np.log(probabilities[rows, run.labels]).mean())
    hits = logits.argmax(axis=1) == run.labels
    assert 0.5 < hits.mean() < 1, "the example has to hold hits and misses"
    assert result.metrics["accuracy"] == pytest.approx(hits.mean())
    assert text["metrics"] == result.metrics
    assert {type(value) for value in result.metrics.values()} == {float}
    assert text["labels"] == list("0123456789")


def test_the_label_is_always_sliced_by(evaluated):
    _, text, _ = evaluated
    assert list(text["slices"]) == ["label"]
    rows = {row["value"]: row for row in text["slices"]["label"]}
    assert sum(row["examples"] for row in rows.values()) == small_run.TEST_EXAMPLES
    for each in text["per_class"]:
        part = rows[each["label"]]
        assert part["examples"] == each["support"]
        # Accuracy on the examples of a single class is the recall of that class.
        assert part["metrics"]["accuracy"] == pytest.approx(each["recall"])


def test_a_slice_by_no_feature_is_refused_by_name(run, tmp_path):
    config = parse_config({"model": {"name": "softmax"}, "evaluation": {"slices": ["labl"]}})
    message = _refusal(run, tmp_path, config=config)
    assert message.startswith(
        "evaluation.slices: 'labl' is not a feature of the dataset; did you mean"
    )


def test_the_worst_examples_are_there_as_pictures(run, evaluated):
    result, text, arrays = evaluated
    first = text["worst"][0]
    each = losses(arrays["label"], arrays["logits"])
    assert first["index"] == each.argmax()
    picture = tf.io.decode_png(storage.read_file(result.uri, first["picture"])).numpy()
    np.testing.assert_array_equal(picture, run.images[first["index"]])


def test_the_evaluation_says_what_was_evaluated(run, evaluated):
    result, text, _ = evaluated
    manifest = storage.verify(result.uri)
    curves = json.loads(storage.read_file(result.uri, "curves.json"))
    assert [curve["label"] for curve in curves] == text["labels"]
    assert manifest.kind == "evaluation"
    paths = [entry.path for entry in manifest.files]
    pictures = [f"worst/{place:02d}.png" for place in range(1, 26)]
    assert paths == [
        "curves.json", "metrics.json", "predictions/label.npy", "predictions/output.npy", *pictures
    ]  # fmt: skip
    assert manifest.fields["metrics"] == result.metrics
    assert manifest.fields["made_from"]["checkpoint"] == run.checkpoint
    assert manifest.fields["made_from"]["dataset"] == run.dataset
    assert (text["split"], text["global_step"]) == ("test", small_run.GLOBAL_STEP)
    assert manifest.fields["global_step"] == small_run.GLOBAL_STEP


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 96, 97, 1000])
def test_the_batch_size_changes_nothing(run, evaluated, tmp_path, batch_size):
    config = run.config.model_copy(
        update={"evaluation": run.config.evaluation.model_copy(update={"batch_size": batch_size})}
    )
    uri = storage.uri_of(tmp_path / "evaluation")
    result = _evaluate(run, uri, tmp_path / "scratch", config=config)
    assert result.metrics == pytest.approx(evaluated[0].metrics, rel=1e-5)


def test_a_second_time_is_a_no_op(run, evaluated, tmp_path):
    first = evaluated[0]
    before = storage.read_manifest(first.uri)
    again = _evaluate(run, first.uri, tmp_path / "scratch")
    assert again == first
    assert storage.read_manifest(first.uri) == before


def test_another_checkpoint_does_not_replace_an_evaluation(run, evaluated, tmp_path):
    other = small_run.publish_checkpoint(tmp_path / "checkpoints", run.model, step=8)
    with pytest.raises(storage.Conflict):
        _evaluate(run, evaluated[0].uri, tmp_path / "scratch", checkpoint=other)
    assert storage.verify(evaluated[0].uri).fields["global_step"] == small_run.GLOBAL_STEP


def test_a_gate_may_ask_for_what_is_measured_and_for_nothing_else(run, evaluated):
    result, *_ = evaluated
    objective = tasks.make_objective(
        run.config, DatasetSpec.from_manifest(storage.read_manifest(run.dataset))
    )
    assert set(result.metrics) == set(objective.directions)


def test_a_model_that_overflows_for_some_examples_is_refused(run, tmp_path):
    model = small_run.template_model(run.config, *small_run.digits())
    kernel = model.variables[0].numpy()
    shares = (run.images.reshape(len(run.images), -1) > 0).mean(axis=0)
    # Each weight is finite, as a checkpoint requires, but the sum overflows for some images.
    kernel[(shares > 0) & (shares < 0.4)] = 3e38
    model.variables[0].assign(kernel)
    checkpoint = small_run.publish_checkpoint(tmp_path / "checkpoints", model)
    message = _refusal(run, tmp_path, checkpoint=checkpoint)
    before, _, after = message.partition(" of 97 test examples, ")
    assert re.fullmatch(r"the model of \S+ returns non-finite numbers for [1-9]\d?", before)
    assert after == (
        "so training has probably diverged; train again with a lower "
        "training.optimizer.learning_rate"
    )


def test_large_finite_logits_have_a_finite_loss(run, tmp_path):
    model = small_run.template_model(run.config, *small_run.digits())
    model.variables[1].assign(np.linspace(-1e30, 1e30, 10, dtype=np.float32))
    checkpoint = small_run.publish_checkpoint(tmp_path / "checkpoints", model)
    output = storage.uri_of(tmp_path / "evaluation")
    result = _evaluate(run, output, tmp_path / "scratch", checkpoint=checkpoint)
    assert np.isfinite(result.metrics["loss"])
    assert result.metrics["loss"] > 1e29


def test_a_dataset_without_test_examples_is_refused(run, tmp_path):
    dataset = small_run.publish_dataset(tmp_path / "dataset", small_run.digits(), test=0)
    message = _refusal(run, tmp_path, dataset=dataset)
    assert message == f"{dataset} has no test examples to evaluate the model on"


def test_examples_that_are_missing_are_noticed(run, tmp_path):
    dataset = small_run.publish_dataset(tmp_path / "dataset", small_run.digits(), claimed=98)
    message = _refusal(run, tmp_path, dataset=dataset)
    assert message.startswith(f"{dataset} returned 97 test examples, but its manifest says 98;")


def test_labels_outside_of_the_classes_are_refused(run, tmp_path):
    images, labels = small_run.digits()
    labels[5] = -1
    dataset = small_run.publish_dataset(tmp_path / "dataset", (images, labels))
    message = _refusal(run, tmp_path, dataset=dataset)
    assert message.startswith(
        f"the test split of {dataset} has the label -1, which is not between 0 and 9; correct "
    )


def test_a_missing_checkpoint_or_dataset_is_refused(run, tmp_path):
    absent = storage.uri_of(tmp_path / "absent")
    assert absent in _refusal(run, tmp_path, checkpoint=absent)
    assert absent in _refusal(run, tmp_path, dataset=absent)


def _batches(run):
    return tf.data.Dataset.from_tensor_slices((run.images, run.labels)).batch(10)


def measure(model, batches):
    objective = of_classes(small_run.CLASSES)
    objective.attach(model)
    return objective.means(objective.totals(model, batches).numpy())


def test_measure_agrees_with_the_evaluation(run, evaluated):
    whole, *_ = evaluated
    measured = measure(run.model, _batches(run))
    expected = {name: whole.metrics[name] for name in ("loss", "accuracy", "macro_f1")}
    assert measured == pytest.approx(expected, rel=1e-5)
    assert {type(value) for value in measured.values()} == {float}
    dropout = keras.Sequential([keras.layers.Dropout(0.9), run.model])
    assert measure(dropout, _batches(run)) == pytest.approx(measured), "dropout is switched off"
    for dtype in ("uint8", "int32"):
        batches = tf.data.Dataset.from_tensor_slices((run.images, run.labels.astype(dtype)))
        assert measure(run.model, batches.batch(50)) == pytest.approx(measured, rel=1e-5)
    with pytest.raises(UserError, match="no examples"):
        measure(run.model, _batches(run).take(0))


def test_a_measurer_reads_the_weights_as_they_are(run):
    model = small_run.template_model(run.config, *small_run.digits())
    objective = of_classes(small_run.CLASSES)
    objective.attach(model)
    losses = []
    for bias in (None, 0.0, np.nan):
        if bias is not None:
            model.set_weights([np.zeros((64, 10)), np.full(10, bias)])
        losses.append(objective.means(objective.totals(model, _batches(run)).numpy())["loss"])
    assert losses[1] == pytest.approx(np.log(10)) != losses[0]
    assert np.isnan(losses[2]), "a loss that is not finite is given as it is"


SHAPE = (64, 64, 1)
# Even the smaller number fills the buffers of the reader.
FEW, MANY = 140_000, 260_000
FEATURES = {
    "image": FeatureSpec(shape=SHAPE, dtype="uint8", stored="raw"),
    "label": FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=CLASSES),
}
# Allowed growth of the resident memory after the first few thousand examples, in bytes.
SLACK = 120 << 20
# Read VmHWM, because `ru_maxrss` starts at the memory of the parent process.
PEAK = """
import re, sys
from pathlib import Path
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.evaluation.evaluate import evaluate
dataset, checkpoint, output, scratch = sys.argv[1:]
evaluation = {"batch_size": 200, "baseline": "none"}
config = parse_config({"model": {"name": "softmax"}, "evaluation": evaluation})
evaluate(config, dataset, checkpoint, output, Path(scratch))
status = Path("/proc/self/status").read_text()
print(int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024)
"""


def published(folder, examples):
    source = folder / f"source-{examples}"
    source.mkdir()
    generator = np.random.default_rng(0)
    batch = {
        "image": generator.integers(0, 256, (examples, *SHAPE), np.uint8),
        "label": generator.integers(0, CLASSES, examples),
    }
    shards = write_shards(source, "test", FEATURES, batch, count=4)
    uri = storage.uri_of(folder / f"dataset-{examples}")
    fields = {
        "dataset_schema": SCHEMA, "block_rows": BLOCK_ROWS, "fingerprint": "0",
        "inputs": ["image"], "targets": ["label"],
        **NO_ROLES,
        "features": {name: feature.to_json() for name, feature in FEATURES.items()},
        "splits": {"test": {"examples": examples, "shards": shards}},
    }  # fmt: skip
    storage.publish(source, uri, kind="dataset", fields=fields)
    return uri


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_memory_for_many_examples_is_that_for_few_and_the_predictions(tmp_path):
    config = parse_config({"model": {"name": "softmax"}})
    spec = InputSpec(shape=SHAPE, dtype="uint8", output_shape=(CLASSES,))
    checkpoint = publish_checkpoint(tmp_path / "ckpt", registry.build(config.model, spec, 0))
    peaks = []
    for examples in (FEW, MANY):
        dataset = published(tmp_path, examples)
        scratch = tmp_path / f"scratch-{examples}"
        scratch.mkdir()
        output = storage.uri_of(tmp_path / f"evaluation-{examples}")
        command = [sys.executable, "-c", PEAK, dataset, checkpoint, output, str(scratch)]
        ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        peaks.append(int(ended.stdout))
    more = MANY - FEW
    predictions = more * (2 * CLASSES * tf.float32.size + tf.int64.size)
    # Allow for the copies of the predictions that scikit-learn makes.
    allowed = 4 * predictions + SLACK
    assert allowed * 2 < more * np.prod(SHAPE), "the examples themselves would be noticed"
    assert peaks[1] - peaks[0] < allowed
