"""Tests the formats of an exported model: parity after loading, custom classes, names, inputs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.schema import ModelConfig
from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.export.formats import (
    FORMATS,
    Original,
    Subject,
    _environment,
    answer_in_process,
    convert_to_tflite,
    fresh_process,
    largest_difference,
    prove,
    reader,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import argument_names
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.tasks.classification import BinaryClassification
from flotilla.trainer.tasks.multi_output import MultiOutput, group_by_output
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.regression import Regression
from tests.trainer import small_run
from tests.trainer.objectives import of_classes
from tests.trainer.odd_names import ODD
from tests.trainer.tasks.measuring import target

# Keras's `save` converts TensorFlow tensors in a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.small_run(tmp_path_factory.mktemp("run"))


def test_names_of_features_fit_a_signature():
    for feature, name in (
        ("image", "image"),
        ("sepal length (cm)", "sepal_length__cm_"),
        ("image/encoded", "image_encoded"),
        ("1st", "input_1st"),
        ("Größe", "Gr__e"),
        ("_hidden", "input__hidden"),
    ):
        assert argument_names([feature]) == {feature: name}


def test_inputs_of_any_name_are_asked_in_every_form(tmp_path):
    # Neighbors in the list are similar, so some are skipped to save time in TensorFlow Lite.
    names = (*ODD[:12], *ODD[12::4])
    features = {name: FeatureSpec(shape=(), dtype="float32", stored="float") for name in names}
    spec = DatasetSpec(features=features, inputs=names, targets=("label",), shards={})
    inputs = InputSpec.of(features, names, (2,))
    model = registry.build(ModelConfig(name="tabular"), inputs, 0)
    subject = Subject(model=model, task=of_classes(2).task, spec=spec)
    batch = {name: np.arange(3, dtype=np.float32) + at for at, name in enumerate(names)}
    expected = subject.answers(batch)["probabilities"]
    for name in ("saved_model", "keras", "tflite"):
        path = tmp_path / (FORMATS[name].path or "saved")
        FORMATS[name].write(subject, path, None)
        for ask in FORMATS[name].read(subject, path):
            np.testing.assert_allclose(ask(batch)["probabilities"], expected, atol=1e-5)


def test_answers_of_outputs_of_any_name_are_of_their_own(tmp_path):
    features = {"x": FeatureSpec(shape=(), dtype="float32", stored="float")}
    names = (*ODD[:12], *ODD[12::4])
    parts = {name: Regression(target([0.5, 2.0], name)) for name in names}
    task = MultiOutput(parts, dict.fromkeys(names, 1.0))
    spec = DatasetSpec(features=features, inputs=("x",), targets=names, shards={})
    inputs = InputSpec.of(features, ["x"], task.output_shape, targets=names)
    model = registry.build(ModelConfig(name="tabular"), inputs, 0)
    subject = Subject(model=model, task=task, spec=spec)
    FORMATS["saved_model"].write(subject, tmp_path / "saved", None)
    outputs = task.outputs(model(np.ones(2, np.float32)))
    for ask in FORMATS["saved_model"].read(subject, tmp_path / "saved"):
        answers = ask({"x": np.ones(2, np.float32)})
        own = group_by_output(parts, answers)
        for name in names:
            np.testing.assert_allclose(own[name]["prediction"], outputs[name][:, 0], rtol=1e-5)


def original_of(model, objective, spec, inputs, labels):
    """Return a model with one batch of examples of its only input."""
    batch = (inputs, (*inputs.values(), labels, None))
    return Original(
        model=model, task=objective.task, objective=objective, spec=spec,
        batches=lambda: iter([batch]), calibration=inputs,
    )  # fmt: skip


@pytest.fixture
def subject(run):
    spec = DatasetSpec.from_manifest(storage.read_manifest(run.dataset))
    inputs = {"image": tf.constant(run.images)}
    return original_of(run.model, of_classes(10), spec, inputs, run.labels)


def test_a_rounded_form_that_loses_accuracy_does_not_leave(subject, tmp_path, monkeypatch):
    def turned(of, path):
        (ask,) = genuine.read(of, path)
        return (lambda inputs: {n: -v for n, v in ask(inputs).items()},)

    genuine = FORMATS["tflite_int8"]
    monkeypatch.setitem(FORMATS, "tflite_int8", dataclasses.replace(genuine, read=turned))
    with pytest.raises(UserError) as error:
        prove(subject, {"tflite_int8": "m.tflite"}, tmp_path)
    start = "nothing is exported: in the format tflite_int8, the model has "
    assert str(error.value).startswith(start)
    assert str(error.value).endswith("leave tflite_int8 out of export.formats")


def test_a_model_that_lite_cannot_hold_is_named(subject, tmp_path):
    class Impossible(keras.Model):
        def call(self, inputs):
            text = tf.strings.as_string(tf.cast(inputs, tf.int32))
            return tf.reshape(tf.strings.to_number(text), (-1, 64))[:, :10]

    unable = dataclasses.replace(subject, model=Impossible())
    with pytest.raises(ConfigError) as error:
        prove(unable, {"tflite": "m.tflite"}, tmp_path)
    assert str(error.value) == (
        "export.formats: the model cannot be saved as tflite and loaded again: TensorFlow Lite has "
        "no AsString, StringToNumber; leave tflite out"
    )


@pytest.mark.slow
@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU])
def test_a_recurrent_layer_takes_one_example_at_a_time(subject, tmp_path, layer):
    given = keras.Input((8, 8, 1), dtype="uint8")
    rows = keras.layers.Reshape((8, 8))(keras.layers.Rescaling(1 / 16)(given))
    model = keras.Model(given, keras.layers.Dense(10)(layer(4)(rows)))
    proof = prove(dataclasses.replace(subject, model=model), {"tflite": "m.tflite"}, tmp_path)
    assert proof["formats"]["tflite"]["max_difference"] <= 1e-4


@pytest.mark.slow
class TestSmoke:
    """Tests of the check that runs in a fresh process."""

    @pytest.fixture
    def folder(self, subject, tmp_path):
        FORMATS["saved_model"].write(subject, tmp_path / "served", None)
        return tmp_path

    def failed(self, subject, folder):
        with pytest.raises(UserError) as error, fresh_process(folder) as process:
            answer_in_process(subject, folder, "served", process)
        message = str(error.value)
        assert message.startswith("nothing is exported: ")
        assert "a new process" in message
        assert "\n" not in message
        return message

    def test_it_notices_other_weights(self, subject, folder):
        other = dataclasses.replace(subject, model=lambda x, training: -subject.model(x))  # noqa: ARG005
        assert "from the original" in self.failed(other, folder)

    def test_it_notices_a_truncated_file(self, subject, folder):
        path = folder / "served" / "saved_model.pb"
        path.write_bytes(path.read_bytes()[:1000])
        assert "cannot serve the model" in self.failed(subject, folder)


@pytest.mark.parametrize("defined", [True, False])
def test_the_loss_replaces_a_main_metric_that_is_not_defined(defined, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    labels = (x[:, 0] > 0).astype(int) if defined else np.zeros(64, int)
    given = keras.Input((4,), name="x")
    model = keras.Model(given, keras.layers.Dense(1)(given))
    objective = Objective(BinaryClassification(target([0, 1])))
    features = {"x": FeatureSpec(shape=(4,), dtype="float32", stored="raw")}
    spec = DatasetSpec(features=features, inputs=("x",), targets=("label",), shards={})
    original = original_of(model, objective, spec, {"x": tf.constant(x)}, labels)
    rounded = prove(original, {"tflite_int8": "m.tflite"}, tmp_path)["formats"]["tflite_int8"]
    assert rounded["metric"] == ("auc" if defined else "loss")
    assert rounded["value"] == pytest.approx(rounded["original"], rel=0.05)


def test_a_lookup_of_rows_can_be_asked_as_tflite(tmp_path):
    ids = keras.Input((None,), dtype="int64")
    model = keras.Model(ids, ShardedEmbedding(5, 2, shards=1, unknown="wrap")(ids))
    takes = [tf.TensorSpec((None, None), tf.int64, name="ids")]
    path = tmp_path / "m.tflite"
    path.write_bytes(convert_to_tflite(lambda given: {"rows": model(given)}, takes, None))
    given = np.array([[4, 0, 4], [1, 7, 2]])
    np.testing.assert_allclose(reader(path)({"ids": given})["rows"], model(given))


def test_it_ends_with_an_export_that_fails(tmp_path):
    started = []

    def failing():
        with fresh_process(tmp_path) as process:
            started.append(process)
            assert process.poll() is None
            raise UserError("nothing is exported")

    with pytest.raises(UserError):
        failing()
    (process,) = started
    assert process.returncode == -9
    assert not psutil.pid_exists(process.pid)


@pytest.mark.slow
def test_it_loads_no_keras():
    program = "import sys, tensorflow; print('keras' in sys.modules)"
    command = [sys.executable, "-I", "-c", program]
    assert subprocess.check_output(command, env=_environment(), text=True).split() == ["False"]


@pytest.mark.slow
def test_it_ends_when_nobody_is_left_to_ask_it(tmp_path):
    program = (
        "import pathlib, sys, time; from flotilla.trainer.export import formats\n"
        "with formats.fresh_process(pathlib.Path(sys.argv[1])) as process:\n"
        "    print(process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as parent:
        fresh = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    # Allow a long time, because the process first loads TensorFlow.
    _, alive = psutil.wait_procs([fresh], timeout=600)
    for each in alive:
        each.kill()
    assert not alive


@pytest.mark.parametrize(
    ("expected", "found", "size"),
    [
        ([0.5, 0.25], [0.5, 0.25001], 1e-5),
        ([2e4, 1e4, 0.3], [2e4, 1e4, 0.301], 1e-3 / 12910),
        ([1e6, 2.0], [1e6, 2.0 + 1e-5], 1e-5 / 707107),
        ([1.0, np.nan], [1.0, np.nan], np.nan),
        ([1.0, 2.0], [np.nan, 2.0], np.nan),
    ],
)
def test_an_answer_near_zero_is_as_exact_as_the_others_are(expected, found, size):
    answers = {"output": np.array(expected)}
    difference = largest_difference(answers, {"output": np.array(found)})
    assert difference == pytest.approx(size, rel=1e-3, nan_ok=True)
