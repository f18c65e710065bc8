"""Tests that a task's metrics can be summed over parts of the examples."""

import gc
import tracemalloc
from contextlib import closing
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.evaluation import predictions, slices
from flotilla.trainer.evaluation.predictions import (
    MOST_WORST,
    OTHER,
    Column,
    Worst,
    Writer,
    measure_predictions,
    predict,
)
from flotilla.trainer.evaluation.slices import slice_metrics
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.tasks import areas, base
from flotilla.trainer.tasks.base import Part, SplitError, Target
from flotilla.trainer.tasks.classification import (
    BinaryClassification,
    Classification,
    MultilabelClassification,
)
from flotilla.trainer.tasks.metrics import losses
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.ranking import Ranking
from flotilla.trainer.tasks.regression import Regression
from flotilla.trainer.tasks.sequences import SequenceLabelling
from tests.trainer.tasks.measuring import InParts, target

COUNT, CLASSES = 40, 3
RANDOM = np.random.default_rng(5)
LABELS = RANDOM.integers(CLASSES, size=COUNT)
LOGITS = RANDOM.normal(size=(COUNT, CLASSES)).astype("float32")
WEIGHTS = RANDOM.uniform(size=COUNT).astype("float32")


def classifier() -> Objective:
    return Objective(Classification(target(LABELS, num_classes=CLASSES)))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_parts_are_measured_as_one_whole(weights):
    found = measure_predictions(classifier(), InParts(LABELS, LOGITS, weights))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(LABELS, LOGITS, weights)
    assert found["metrics"]["loss"] == pytest.approx(float(loss), rel=1e-5)
    hits = np.average(LOGITS.argmax(axis=1) == LABELS, weights=weights)
    assert found["metrics"]["accuracy"] == pytest.approx(hits, rel=1e-6)


def test_details_of_the_task_come_with_its_metrics():
    objective = classifier()
    examples = InParts(LABELS, LOGITS)
    found, details = measure_predictions(objective, examples), objective.task.details(examples)
    assert found["metrics"].keys() == found["intervals"].keys() == objective.directions.keys()
    assert details.items() <= found.items()


class Own(Classification):
    """A user's task that defines its own accuracy, and adds a metric and a table in `details`."""

    def metrics(self):
        return [keras.metrics.MeanMetricWrapper(lambda true, _: true * 0 + 0.25, name="accuracy")]

    def details(self, examples):
        tables = {"tables": [{"title": "t", "columns": [], "rows": []}]}
        return {**super().details(examples), "metrics": {"mine": 2.0}, **tables}


def test_what_a_task_of_the_users_measures_goes_before_what_is_built_in():
    task = Own(target(LABELS.astype("float32").astype(int), num_classes=CLASSES))
    found = measure_predictions(Objective(task), InParts(LABELS.astype("float32"), LOGITS))
    assert (found["metrics"]["accuracy"], found["metrics"]["mine"]) == (0.25, 2.0)
    assert found["metrics"]["macro_f1"] > 0
    assert len(found["tables"]) == 1


def test_a_metric_of_the_configuration_is_measured_with_those_of_the_task():
    labels = RANDOM.normal(size=COUNT).astype("float32")
    objective = Objective(Regression(target(labels)), metrics=["log_cosh_error"])
    found = measure_predictions(objective, InParts(labels, labels[:, np.newaxis]))["metrics"]
    assert found["log_cosh_error"] == pytest.approx(0, abs=1e-6)
    assert set(found) == {*Regression.directions, "log_cosh_error"}


def test_no_text_is_left_out_of_what_the_task_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "MOST_TEXTS", 2)
    users, labels = np.array([f"u{n}".encode() for n in range(8)], object), np.arange(8) % 2
    named = {"user": users, "city": users}
    batches = tf.data.Dataset.from_tensor_slices(((np.ones((8, 1), "float32"), labels), named))
    given = keras.Input((1,))
    model = keras.Model(given, keras.layers.Dense(1)(given))
    objective = Objective(Ranking(target(labels), group="user"))
    folders = tmp_path / "predictions", tmp_path / "columns"
    with closing(Writer(*folders, 8, objective.task)) as writer:
        found = predict(objective, model, SPEC, batches.batch(3), writer)
    (part,) = found.own.parts()
    assert part.columns["user"].tolist() == users.tolist()
    assert part.columns["city"].tolist() == [b"u0", b"u1", *[predictions.OTHER] * 6]
    (queries, *_) = measure_predictions(objective, found.own)["tables"]
    assert queries["rows"][0] == ["all", 8]


SPEC = DatasetSpec(
    features={
        "x": FeatureSpec(shape=(), dtype="float32", stored="float"),
        "w": FeatureSpec(shape=(), dtype="float32", stored="float"),
    },
    inputs=("x",),
    targets=("label",),
    weight="w",
    shards={},
)
THREE = Classification(target([0, 1, 2], num_classes=3))
NUMBER = Regression(target([0.0, 2.0]))
BOTH = MultiOutput({"kind": THREE, "size": NUMBER}, {"kind": 1.0, "size": 1.0})


def model_of(*shape):
    """Return a model whose outputs all equal its input."""
    given = keras.Input(())
    ones = keras.layers.Reshape((1,) * len(shape))(given)
    return keras.Model(given, keras.layers.Lambda(lambda x: x * tf.ones(shape))(ones))


def predicted(task, model, tmp_path, labels, **given):
    count = len(tf.nest.flatten(labels)[0])
    inputs, weights = (
        np.asarray(given.get(name, [1] * count), np.float32) for name in ("x", "weights")
    )
    batches = tf.data.Dataset.from_tensor_slices(((inputs, labels, weights), {})).batch(2)
    with closing(Writer(tmp_path / "predictions", tmp_path / "columns", count, task)) as writer:
        return predict(Objective(task), model, SPEC, batches, writer)


def refusal(task, model, tmp_path, labels, **given):
    with pytest.raises(SplitError) as caught:
        predicted(task, model, tmp_path, labels, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("task", "labels", "wanted"),
    [
        (THREE, [0, 1, 3], "the label 3, which is not between 0 and 2"),
        (BinaryClassification(target([0, 1])), [0, 1, 2], "the label 2, which is neither 0 nor 1"),
        (
            MultilabelClassification(target([[0, 1], [1, 0]])),
            [[0, 1], [1, 1], [-1, 0]],
            "the label -1, which is neither 0 nor 1",
        ),
        (NUMBER, [0.5, 1.0, np.nan], "the label nan, which is not a finite number"),
        (
            SequenceLabelling(target([[0, 1], [1, -1]], num_classes=2)),
            [[0, 1], [-1, -1], [0, 2]],
            "the label 2, which is not between 0 and 1",
        ),
    ],
)
def test_a_label_that_the_task_does_not_know_is_refused(task, labels, wanted, tmp_path):
    message = refusal(task, model_of(*task.output_shape), tmp_path, np.array(labels))
    assert message == f"{wanted}; correct the dataset builder"


def both():
    given = keras.Input(())
    kind, size = (model_of(n)(given) for n in (3, 1))
    return keras.Model(given, {"kind": kind, "size": size})


def test_of_several_outputs_the_one_with_the_label_is_named(tmp_path):
    labels = {"kind": np.array([0, 1]), "size": np.array([0.0, np.inf])}
    assert refusal(BOTH, both(), tmp_path, labels) == (
        "the label inf, which is not a finite number; correct the dataset builder (output 'size')"
    )


def test_an_example_of_which_one_output_is_no_number_is_counted(tmp_path):
    labels = {"kind": np.array([0, 1, 2]), "size": np.zeros(3)}
    found = predicted(BOTH, both(), tmp_path, labels, x=[1, np.nan, 2])
    assert found.unsound == (1, 0)


def test_examples_that_all_weigh_nothing_are_refused(tmp_path):
    text = refusal(THREE, model_of(3), tmp_path, np.array([0, 1, 2]), weights=[0, 0, 0])
    assert text == "only examples of weight 0: 'w' is 0 for all of them"
    found = predicted(THREE, model_of(3), tmp_path, np.array([0, 1, 2]), weights=[0, 0, 1])
    assert found.own.count == 3


def test_files_are_closed_where_an_example_is_refused(tmp_path):
    refusal(THREE, model_of(3), tmp_path, np.array([0, 1, 0, 3]))
    written = {*tmp_path.rglob("*.npy")}
    assert written
    assert not written & {link.resolve() for link in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize(
    ("task", "labels", "expected"),
    [
        (
            BinaryClassification(target([0, 1])),
            np.zeros(3, int),
            {"auc": None, "average_precision": None, "accuracy": 0},
        ),
        (
            SequenceLabelling(target([[0, 1], [1, -1]], num_classes=2)),
            np.full((3, 2), -1),
            {"accuracy": None, "macro_f1": None, "loss": 0},
        ),
    ],
    ids=["areas of one class alone", "sequences that are all padding"],
)
def test_a_metric_may_not_be_defined(tmp_path, task, labels, expected):
    found = predicted(task, model_of(*task.output_shape), tmp_path, labels)
    metrics = measure_predictions(Objective(task), found.own)["metrics"]
    assert expected.items() <= metrics.items()


def spec_of(**features):
    specs = {
        name: FeatureSpec(shape=shape, dtype=dtype, stored="raw")
        for name, (shape, dtype) in features.items()
    }
    return DatasetSpec(features=specs, inputs=tuple(specs), targets=("l",), shards={})


def looked(tmp_path, spec, inputs, logits, size=7):
    target = Target(name="l", shape=(), dtype="int64", num_classes=3, labels=tuple("abc"))
    worst, labels = Worst(spec, Classification(target)), np.zeros(len(logits), int)
    for start in range(0, len(logits), size):
        batch = slice(start, start + size)
        part = Part(labels[batch], logits[batch], None, {})
        worst.look({n: v[batch] for n, v in inputs.items()}, part)
    return worst.write(tmp_path)


@pytest.fixture
def logits():
    return np.random.default_rng(1).normal(size=(100, 3)).astype(np.float32)


def test_the_worst_of_all_batches_worst_first(tmp_path, logits):
    images = np.arange(100, dtype=np.uint8).reshape(100, 1, 1, 1).repeat(4, 1).repeat(5, 2)
    rows = looked(tmp_path, spec_of(image=((4, 5, 1), "uint8")), {"image": images}, logits)
    each = losses(np.zeros(100, int), logits)
    expected = np.argsort(-each)[:MOST_WORST]
    assert [row["index"] for row in rows] == expected.tolist()
    for row in rows:
        assert row["loss"] == pytest.approx(each[row["index"]])
        assert row["probability"] == pytest.approx(np.exp(-row["loss"]), rel=1e-5)
        assert (row["label"], row["predicted"]) == ("a", "abc"[logits[row["index"]].argmax()])
        picture = tf.io.decode_png((tmp_path / row["picture"]).read_bytes()).numpy()
        np.testing.assert_array_equal(picture, images[row["index"]])


def test_an_image_of_floats_is_stretched(tmp_path):
    images = tf.constant([[[[-1.0], [0.0]], [[3.0], [np.nan]]], np.zeros((2, 2, 1))])
    logits = np.zeros((2, 3), np.float32)
    rows = looked(tmp_path, spec_of(image=((2, 2, 1), "float32")), {"image": images}, logits)
    pictures = [
        tf.io.decode_png((tmp_path / row["picture"]).read_bytes()).numpy().ravel() for row in rows
    ]
    assert [picture.tolist() for picture in pictures] == [[0, 64, 255, 64], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("shape", "dtype", "pictured"),
    [
        ((8, 8), "uint8", True), ((8, 8, 3), "uint8", True), ((8, 8, 4), "float32", True),
        ((8, 8, 2), "uint8", False), ((8, 8), "float32", False), ((1, 8, 1), "uint8", False),
        ((64,), "float32", False), ((), "int64", False),
    ],
)  # fmt: skip
def test_what_is_a_picture(tmp_path, shape, dtype, pictured):
    values = {"x": np.zeros((2, *shape), dtype)}
    rows = looked(tmp_path, spec_of(x=(shape, dtype)), values, np.zeros((2, 3), np.float32))
    assert [("picture" in row, "inputs" in row) for row in rows] == [(pictured, not pictured)] * 2


def test_what_is_no_picture_is_described_in_words(tmp_path):
    spec = spec_of(user=((), "int64"), name=((), "string"), row=((20,), "float32"))
    inputs = {"user": [7], "name": ["<b>ö"], "row": [[0.5] * 19 + [np.nan]]}
    tensors = {name: tf.constant(each) for name, each in inputs.items()}
    [row] = looked(tmp_path, spec, tensors, np.zeros((1, 3), np.float32))
    halves = "0.5 " * 12 + "..."
    assert row["inputs"] == f"user 7, name <b>ö, row {halves}"
    assert row["columns"] == {"user": 7, "name": "<b>ö", "row": halves}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((3000, 2000, 3), "uint8", (256, 171, 3)),
        ((2, 2000, 1), "float32", (1, 256, 1)),
    ],
)
def test_a_huge_image_becomes_a_small_picture(tmp_path, shape, dtype, size):
    values = np.zeros((1, *shape), dtype)
    values[:, :, shape[1] // 2 :] = 200
    logits = np.zeros((1, 3), np.float32)
    [row] = looked(tmp_path, spec_of(x=(shape, dtype)), {"x": values}, logits)
    picture = tf.io.decode_png((tmp_path / row["picture"]).read_bytes()).numpy()
    assert picture.shape == size
    left, right = picture[:, : size[1] // 2 - 1], picture[:, size[1] // 2 + 1 :]
    assert (left == 0).all()
    assert (right == (200 if dtype == "uint8" else 255)).all()


FEW, MANY, AT_ONCE, KINDS = 10_000, 100_000, 2_500, 3


def batch(generator, classes):
    labels = generator.integers(0, KINDS, AT_ONCE)
    outputs = generator.normal(size=(AT_ONCE, KINDS if classes else 1)).astype(np.float32)
    weights = np.ones(AT_ONCE, np.float32)
    given = labels if classes else labels.astype(np.float32)
    return Part(given, outputs, weights, {"column": generator.integers(0, 50, AT_ONCE)})


def peak(task, count, folder):
    """Return the peak bytes of allocated arrays while examples are written and measured."""
    generator, objective = np.random.default_rng(0), Objective(task)
    gc.collect()
    tracemalloc.start()
    try:
        with closing(Writer(folder / "predictions", folder / "columns", count, task)) as writer:
            for _ in range(count // AT_ONCE):
                writer.add_batch(batch(generator, bool(task.labels)))
            stored = writer.get("output")
        found = measure_predictions(objective, stored)
        parts = slice_metrics(objective, stored, {"column": ()})["column"]
        assert sum(row["examples"] for row in parts) == count == stored.count
        assert found["metrics"]["loss"] > 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [Classification(target([0, 1, 2], num_classes=KINDS)), Regression(target([0.0, 2.0]))]
)
def test_many_times_the_examples_take_no_more_memory(task, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "MOST_ROWS", AT_ONCE)
    monkeypatch.setattr(base.sample_examples, "__defaults__", (AT_ONCE,))
    # Lower the limits up to which results are computed from all examples at once.
    monkeypatch.setattr(slices, "_MOST_ROWS", AT_ONCE)
    monkeypatch.setattr(areas, "_LEAST", AT_ONCE // 8)
    monkeypatch.setattr(areas, "_FEW", AT_ONCE // 8)
    # Trigger imports and traces once, so that they do not count as memory for examples.
    peak(task, AT_ONCE, tmp_path / "first")
    few, many = (peak(task, count, tmp_path / f"{count}") for count in (FEW, MANY))
    # An example of the regression has 12 bytes (prediction, label and weight). At most half of them
    # may stay in memory.
    assert many < few + 6 * (MANY - FEW)


def written(path, batches):
    column = Column(path, sum(map(len, batches)))
    for batch in batches:
        column.add(batch)
    column.end()
    return column


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), np.int64), ((3,), np.float32), ((2, 5), np.bool_)]
)
def test_values_come_back_in_order(tmp_path, shape, dtype):
    values = np.random.default_rng(0).integers(0, 2, (17, *shape)).astype(dtype)
    column = written(tmp_path / "folder" / "label.npy", [values[:5], values[5:6], values[6:]])
    np.testing.assert_array_equal(column.read(0, 17), values)
    np.testing.assert_array_equal(column.read(4, 9), values[4:9])
    np.testing.assert_array_equal(np.load(column.path, allow_pickle=False), values)


def test_texts_come_back(tmp_path, monkeypatch):
    values = np.array([b"a", b"", b"b", b"a", "ö".encode()], dtype=object)
    column = written(tmp_path / "text.npy", [values[:3], values[3:]])
    assert column.read(0, 5).tolist() == values.tolist()
    assert column.read(3, 4).tolist() == [b"a"]
    # Of endless texts, the first are kept.
    monkeypatch.setattr(predictions, "MOST_TEXTS", 2)
    column = written(tmp_path / "text.npy", [values])
    assert column.read(0, 5).tolist() == [b"a", b"", OTHER, b"a", OTHER]


def test_a_part_of_wide_values_is_short(tmp_path):
    narrow = written(tmp_path / "narrow.npy", [np.zeros((4, 1), np.float32)])
    wide = written(tmp_path / "wide.npy", [np.zeros((4, 1 << 20), np.float32)])
    assert narrow.rows_at_once == predictions.MOST_ROWS
    assert wide.rows_at_once == 4
