"""Tests that a program's model is evaluated and exported, or rejected in one line."""

import dataclasses
import json
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.evaluation.program_model import (
    Argument,
    convert,
    find_model,
    match_arguments,
    match_outputs,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks.base import Target
from flotilla.trainer.tasks.classification import (
    BinaryClassification,
    Classification,
    MultilabelClassification,
)
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.regression import Regression
from tests.trainer import small_run
from tests.trainer.evaluation import programs
from tests.trainer.evaluation.two_classes import TwoClasses, source

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
PIXELS = {"x": tf.TensorSpec((None, 64))}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.small_run(tmp_path_factory.mktemp("run"))


def keras_file(run):
    return lambda folder: programs.keras_softmax(run).save(folder / "digits.keras")


def keras_export(run):
    return lambda folder: programs.keras_softmax(run).export(folder, verbose=False)


MADE = {
    "logits": (lambda run: programs.saved_softmax(run, activate=False), "saved_model", "logits"),
    "a .keras file": (keras_file, "keras", "probabilities"),
    "a model exported by Keras": (keras_export, "saved_model", "probabilities"),
    "TensorFlow 1 on servers": (programs.saved_by_tensorflow_1, "saved_model", "probabilities"),
}


def judge(run, name, folder):
    """Evaluate a model and pass it to the gate; return the run and the decision."""
    make, layout, taken = MADE[name]
    own = programs.trained_by(run, make(run), folder)
    decision = small_run.decide(own, own.root, accuracy=0.8)
    measured = storage.read_json(storage.uri_of(own.root / "evaluation"), "metrics.json")
    assert measured["program"] == {"layout": layout, "outputs": {"": taken}}
    assert measured["global_step"] == small_run.GLOBAL_STEP
    [note] = storage.read_json(decision, "decision.json")["notes"]
    assert f"were interpreted as {taken}; set program.outputs if" in note
    found = np.load(own.root / "evaluation" / "predictions" / "output.npy")
    probabilities = tf.nn.softmax(run.logits).numpy()
    np.testing.assert_allclose(tf.nn.softmax(found), probabilities, rtol=1e-3, atol=1e-5)
    return own, decision


@pytest.mark.parametrize("name", sorted(MADE.keys() - {"a .keras file", "TensorFlow 1 on servers"}))
def test_it_is_evaluated_as_a_model_of_ours(run, tmp_path, name):
    judge(run, name, tmp_path)


# The exports of the other models have the same form as one of these two.
@pytest.mark.parametrize(
    ("name", "forms"),
    [("a .keras file", ["saved_model", "keras"]), ("TensorFlow 1 on servers", ["saved_model"])],
)
def test_it_is_exported_and_its_card_names_the_program(run, tmp_path, name, forms):
    own, decision = judge(run, name, tmp_path)
    section = {"command": ("python", "train.py"), "env": {"WORD": "hunter2"}}
    program = own.config.program.model_copy(update=section)
    own = dataclasses.replace(own, config=own.config.model_copy(update={"program": program}))
    output = storage.uri_of(own.root / "model")
    exported = small_run.export_model(own, decision, output, own.root / "scratch")
    assert list(exported.parity["formats"]) == forms
    fields = storage.read_manifest(output).fields
    assert fields["formats"] == forms
    assert fields["program"]["outputs"] == {"": "probabilities"}
    serve = tf.saved_model.load(own.root / "model" / fields["saved_model"]).signatures
    answers = serve["serving_default"](image=tf.constant(run.images))
    probabilities = tf.nn.softmax(run.logits).numpy()
    np.testing.assert_allclose(answers["probabilities"], probabilities, rtol=1e-3, atol=1e-5)
    card = (own.root / "model" / "model_card.md").read_text(encoding="utf-8")
    assert "A program's own model for classification of 10 classes" in card
    assert "By the user's program `program python train.py`, 7 global steps." in card
    assert "gives probabilities." in card
    assert "adam" not in card
    files = (path for path in (own.root / "model").rglob("*") if path.is_file())
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def refusal(run, tmp_path, write):
    own = programs.trained_by(run, write, tmp_path)
    (own.root / "scratch").mkdir()
    output = storage.uri_of(own.root / "evaluation")
    with pytest.raises(UserError) as caught:
        evaluate(own.config, own.dataset, own.checkpoint, output, own.root / "scratch")
    message = str(caught.value)
    assert "\n" not in message
    assert own.checkpoint in message
    assert not storage.is_published(output)
    return message.replace(own.checkpoint, "CHECKPOINT")


def classes(count):
    return lambda x: {"y": tf.nn.softmax(x[:, :count])}


def touch(*names):
    def write(folder):
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"no model")

    return write


def foreign_class(folder):
    class Double(keras.layers.Layer):
        def call(self, inputs):
            return inputs * 2

    keras.Sequential([keras.Input((64,)), Double(), keras.layers.Dense(10)]).save(
        folder / "own.keras"
    )


def older(folder):
    with zipfile.ZipFile(folder / "old.keras", "w") as file:
        file.writestr("metadata.json", json.dumps({"keras_version": "2.15.0"}))
        file.writestr("config.json", "{}")


def two_signatures(folder):
    module = tf.Module()
    call = tf.function(lambda x: x, input_signature=[tf.TensorSpec((None, 64))])
    tf.saved_model.save(module, folder, {"one": call, "two": call})


REFUSED = {
    "wrong classes": (
        programs.save(classes(3), PIXELS),
        "the output 'y' is float32 [any, 3], but classification of 'label' (one int64 of 10 "
        "classes) needs [any, 10]: the label has 10 classes, but the model returns 3",
    ),
    "numbers of classes": (
        programs.save(lambda x: {"y": tf.argmax(x, axis=1)}, PIXELS),
        "the output 'y' is int64 [any], but classification",
    ),
    "several outputs": (
        programs.save(lambda x: {"a": x[:, :10], "b": x[:, :10]}, PIXELS),
        "the model returns 'a' (float32 [any, 10]), 'b' (float32 [any, 10]), but classification "
        "uses only one output; name that output 'probabilities' in the signature",
    ),
    "another shape": (
        programs.save(classes(10), {"x": tf.TensorSpec((None, 28, 28))}),
        "the argument 'x' (float32 [any, 28, 28]) does not accept the feature 'image' "
        "(uint8 [any, 8, 8, 1]); declare it with that shape",
    ),
    "another type": (
        programs.save(lambda x: {"y": x}, {"x": tf.TensorSpec((None,), "string")}),
        "the argument 'x' (string [any]) does not accept the feature 'image'",
    ),
    "one example": (
        programs.save(classes(10), {"x": tf.TensorSpec((1, 64))}),
        "the argument 'x' (float32 [1, 64]) accepts exactly 1 examples; export the model with None",
    ),
    "unknown argument": (
        programs.save(
            lambda image, rate: {"y": image[:, :10] * rate},
            {"image": tf.TensorSpec((None, 64)), "rate": tf.TensorSpec((None, 1))},
        ),
        "the argument 'rate' (float32 [any, 1]) is not an input of the dataset (its inputs: image)",
    ),
    "one row": (
        programs.save(lambda x: {"y": tf.reduce_mean(x, axis=0, keepdims=True)[:, :10]}, PIXELS),
        "the output 'y' has shape [1, 10] for 97 examples; return one row for each example",
    ),
    "nothing": (touch(), "has no model; let the program write a SavedModel or a .keras file"),
    "two files": (touch("a.keras", "b.keras"), "contains a.keras, b.keras; write one SavedModel"),
    "damaged graph": (touch("saved_model.pb"), "saved_model.pb is not a SavedModel"),
    "damaged file": (touch("a.keras"), "a.keras is not a complete .keras file (File is not a zip"),
    "class of the program": (foreign_class, "cannot read own.keras of Keras 3."),
    "two signatures": (two_signatures, "has no signature 'serving_default' (it has 'one', 'two')"),
    "Keras 2": (older, "cannot read old.keras of Keras 2.15.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_one_line(run, tmp_path, name):
    write, message = REFUSED[name]
    assert message in refusal(run, tmp_path, write)


def test_a_checkpoint_without_a_model_says_where_the_program_has_to_write_one(run, tmp_path):
    program = {"checkpoint": "checkpoint", "model": "", "layout": "keras"}
    uri = programs.publish(tmp_path / "checkpoint", touch("a.keras"), program=program)
    with pytest.raises(UserError, match="has no model; let the program write a SavedModel or"):
        evaluate(run.config, run.dataset, uri, storage.uri_of(tmp_path / "e"), tmp_path)


def test_the_outputs_that_the_configuration_names_are_taken(run, tmp_path):
    """`program.outputs` decides, even if the logits look like probabilities."""
    section = run.config.program.model_copy(update={"outputs": "logits"})
    config = run.config.model_copy(update={"program": section})
    uri = programs.publish(tmp_path / "checkpoint", programs.saved_softmax(run))
    evaluation = storage.uri_of(tmp_path / "evaluation")
    evaluate(config, run.dataset, uri, evaluation, tmp_path)
    assert storage.read_json(evaluation, "metrics.json")["program"]["outputs"] == {"": "logits"}


def test_two_classes_are_those_of_the_records(tmp_path):
    # The rarer class, "leaves", is the positive class, but class 0 in the records.
    customers = TwoClasses.of(tmp_path, source(tmp_path / "files", names=("stays", "leaves")))
    spec, _, _ = customers.built()
    assert spec.swapped == {"status"}, "the program and the task count the classes differently"

    # The program uses the class numbers of the records, where 1 is "stays".
    def staying(calls):
        return {"score": 1 - tf.sigmoid(tf.cast(calls, tf.float32) * 1.5 - 2)}

    write = programs.save(staying, {"calls": tf.TensorSpec((None,))})
    uri = programs.publish(tmp_path / "checkpoint", write)
    evaluation = storage.uri_of(tmp_path / "evaluation")
    evaluate(customers.config, customers.dataset, uri, evaluation, tmp_path)
    measured = storage.read_json(evaluation, "metrics.json")
    assert measured["metrics"]["auc"] > 0.75
    assert measured["positive"] == "leaves"


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["saved_model.pb", "variables/variables.index"], ("saved_model", "")),
        (["1/saved_model.pb", "12/saved_model.pb", "9/saved_model.pb"], ("saved_model", "12")),
        (["export/saved_model.pb", "notes.txt"], ("saved_model", "export")),
        (["best.keras", "notes.txt"], ("keras", "best.keras")),
        # A SavedModel is preferred, because its signature describes the inputs.
        (["saved_model.pb", "best.keras"], ("saved_model", "")),
    ],
)
def test_the_model_of_a_folder(paths, found):
    assert find_model(paths) == found


@pytest.mark.parametrize(
    "paths",
    [[], ["a.keras", "b.keras"], ["one/saved_model.pb", "two/saved_model.pb"], ["model.h5"]],
)
def test_what_is_no_model_or_several_is_refused(paths):
    with pytest.raises(UserError, match=r"write one SavedModel or one \.keras file"):
        find_model(paths)


def feature(dtype, *shape):
    return FeatureSpec(shape=shape, dtype=dtype, stored="raw")


def spec_of(**features):
    return DatasetSpec(features=features, inputs=tuple(features), targets=(), shards={})


def argument(dtype, *sizes):
    return Argument(name="x", shape=(None, *sizes), dtype=dtype)


@pytest.mark.parametrize(
    ("given", "wanted", "shape"),
    [
        (feature("uint8", 8, 8, 1), argument("float32", 8, 8, 1), (2, 8, 8, 1)),
        (feature("uint8", 8, 8), argument("uint8", 8, 8, 1), (2, 8, 8, 1)),
        (feature("uint8", 8, 8, 1), argument("float32", 64), (2, 64)),
        (feature("float64", 3), argument("float32", None), (2, 3)),
        (feature("int64"), argument("float32", 1), (2, 1)),
        (feature("float32", 1), argument("float32"), (2,)),
        (feature("int64"), argument("int32"), (2,)),
        (feature("bool"), argument("float32"), (2,)),
    ],
)
def test_what_is_safe_is_converted(given, wanted, shape):
    spec = spec_of(column=given)
    assert match_arguments(spec, {"x": wanted}) == {"x": "column"}
    values = np.ones((2, *given.shape), given.dtype)
    converted = np.asarray(convert(values, given, wanted))
    assert (converted.shape, converted.dtype.name) == (shape, wanted.dtype)
    np.testing.assert_array_equal(converted, np.ones(shape))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (feature("float32", 3), argument("int32", 3)),
        (feature("string"), argument("float32")),
        (feature("int64"), argument("string")),
        (feature("float32", 3), argument("float32", 4)),
        (feature("float32", None, 3), argument("float32", 12)),
    ],
)
def test_what_is_not_safe_is_refused_by_both_names(given, wanted):
    with pytest.raises(UserError, match=r"argument 'x' .* does not accept the feature 'column'"):
        match_arguments(spec_of(column=given), {"x": wanted})


def test_arguments_have_the_names_of_features_or_of_a_signature():
    spec = spec_of(**{"user age": feature("float32"), "clicks": feature("float32")})
    takes = {name: argument("float32") for name in ("clicks", "user_age")}
    assert match_arguments(spec, takes) == {"clicks": "clicks", "user_age": "user age"}
    # A model need not use every feature.
    assert match_arguments(spec, {"clicks": argument("float32")}) == {"clicks": "clicks"}
    with pytest.raises(UserError, match=r"'x' .* is not an input of the dataset; did you mean 'cl"):
        match_arguments(spec, {"click": argument("float32")})


CLASSES = Target(name="kind", shape=(), dtype="int64", num_classes=3)
TWO = Target(name="left", shape=(), dtype="int64", num_classes=2)
PRICE = Target(
    name="price", shape=(), dtype="float32", moments={"mean": 10.0, "std": 4.0, "min": 0, "max": 20}
)
SHARES = np.float32([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]])


def taken(task, answers, said="auto", swapped=frozenset()):
    found = match_outputs(task, answers, said, swapped)
    return {
        name: (each.taken, np.asarray(each.convert(answers[each.name])))
        for name, each in found.items()
    }


def test_rows_that_sum_to_1_are_probabilities_and_others_are_logits():
    kind, logits = taken(Classification(CLASSES), {"y": SHARES})[""]
    assert kind == "probabilities"
    np.testing.assert_allclose(np.exp(logits), SHARES, rtol=1e-6)
    kind, logits = taken(Classification(CLASSES), {"y": SHARES * 2})[""]
    assert kind == "logits"
    np.testing.assert_array_equal(logits, SHARES * 2)
    assert taken(Classification(CLASSES), {"y": SHARES}, "logits")[""][0] == "logits"


def test_certainty_stays_finite():
    sure = np.float32([[1, 0, 0], [0, 1, 0]])
    assert np.isfinite(taken(Classification(CLASSES), {"y": sure})[""][1]).all()
    assert np.isfinite(taken(BinaryClassification(TWO), {"y": np.float32([0, 1])})[""][1]).all()


SURE = np.float32([0.25, 0.75])
BOTH = np.stack([1 - SURE, SURE], axis=1)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"y": SURE}, "probabilities"),
        ({"y": SURE[:, np.newaxis]}, "probabilities"),
        ({"y": BOTH}, "probabilities"),
        ({"y": np.log(BOTH) + 3}, "logits"),
        ({"logit": np.log(SURE / (1 - SURE)), "probability": 0 * SURE}, "logits"),
    ],
)
def test_two_classes_in_every_form(answers, expected):
    kind, logits = taken(BinaryClassification(TWO), answers)[""]
    assert kind == expected
    np.testing.assert_allclose(logits, [[-np.log(3)], [np.log(3)]], rtol=1e-6)
    # If the positive class is class 0 in the records, the program's probability is for the other
    # class.
    _, other = taken(BinaryClassification(TWO), answers, swapped=frozenset(["left"]))[""]
    np.testing.assert_array_equal(other, -logits)


def test_the_named_answer_of_the_task_is_taken_among_several():
    values = {"classes": np.int64([1, 0]), "probabilities": SHARES, "logits": np.log(SHARES)}
    assert taken(Classification(CLASSES), values)[""][0] == "logits"
    assert taken(Classification(CLASSES), values, "probabilities")[""][0] == "probabilities"


def test_numbers_are_in_units_of_the_label():
    prices = np.float32([6, 14])
    assert taken(Regression(PRICE), {"y": prices})[""][0] == "numbers"
    np.testing.assert_array_equal(taken(Regression(PRICE), {"y": prices})[""][1], [[6], [14]])
    scaled = taken(Regression(PRICE, standardize=True), {"y": prices})[""][1]
    np.testing.assert_array_equal(scaled, [[-1], [1]])


def test_several_targets_by_their_names():
    task = MultiOutput({"kind": Classification(CLASSES), "price": Regression(PRICE)}, {})
    values = {"kind_probabilities": SHARES, "price": np.float32([6, 14])}
    found = taken(task, values)
    kinds = {name: kind for name, (kind, _) in found.items()}
    assert kinds == {"kind": "probabilities", "price": "numbers"}
    with pytest.raises(UserError, match="no output for 'price'; name each output of the signature"):
        taken(task, {"kind": SHARES, "cost": np.float32([6, 14])})


def test_several_labels_at_once():
    labels = Target(name="tags", shape=(3,), dtype="int64", num_classes=0)
    kind, _ = taken(MultilabelClassification(labels), {"y": SHARES * 1.2})[""]
    assert kind == "probabilities", "they need not sum to 1"
