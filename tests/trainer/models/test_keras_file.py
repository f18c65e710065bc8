"""Tests that the `.keras` file of every built-in model needs only Keras."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.schema import ModelConfig
from flotilla.trainer.embeddings.embedding_table import EmbeddingTable, shrink
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.models import keras_file, registry
from flotilla.trainer.models.preprocessing import Vocabulary, Words
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.report.heading import programs
from tests.trainer.models.test_tabular import EXAMPLES, spec_of

ID = FeatureSpec(shape=(), dtype="int64", stored="int")
TEXT = FeatureSpec(shape=(), dtype="string", stored="bytes")
IMAGE = FeatureSpec(shape=(8, 8, 1), dtype="uint8", stored="raw")
TOKENS = FeatureSpec(shape=(None,), dtype="int64", stored="sequence")
PAIRS = {"user": np.array([3, 2**40, -7]), "item": np.array(["b", "none", "a"], object)}
STEPS = {
    "steps": np.array([[[1, 2], [0, 3], [0, 0]], [[4, 0], [0, 0], [5, 6]]], np.float32),
    "ticks": np.array([[1, 0, 2, 0], [2**60, 0, 0, 0]]),
}
IMAGES = {"image": np.arange(192, dtype=np.uint8).reshape(3, 8, 8, 1)}
GROWING = {"user": {"capacity": 8}, "item": {"capacity": 8, "min_count": 1}}


def of(features, inputs, output=(3,)):
    return InputSpec.of(features, list(inputs), output)


MODELS = {
    "softmax": (of({"image": IMAGE}, IMAGES), IMAGES, {}),
    "mlp": (of({"image": IMAGE}, IMAGES), IMAGES, {"dropout": 0.5}),
    "cnn": (of({"image": IMAGE}, IMAGES), IMAGES, {}),
    "cnn of augmented images": (of({"image": IMAGE}, IMAGES), IMAGES, {"augment": True}),
    "gru": (
        of({"words": TOKENS}, ["words"]), {"words": np.array([[1, 2, 0], [3, 0, 0]])},
        {"vocabulary": 5, "bidirectional": True},
    ),
    "tabular": (spec_of(*EXAMPLES), EXAMPLES, {}),
    "tabular of sequences": (spec_of(*STEPS), STEPS, {}),
    "tabular with lengths": (
        spec_of("steps", "steps_length"), {**STEPS, "steps_length": np.array([1, 3])}, {},
    ),
    "two_tower": (
        of({"user": ID, "item": ID}, PAIRS, (1,)),
        {"user": np.array([0, 4, 2]), "item": np.array([6, 0, 1])},
        {"rows": {"user": 5, "item": 7}, "hidden_units": [4]},
    ),
    "two_tower of tables": (
        of({"user": ID, "item": TEXT}, PAIRS, (2,)), PAIRS, {"tables": GROWING},
    ),
    "two_tower_ranker": (
        of({"user": ID, "item": TEXT}, PAIRS, (33,)), PAIRS, {"tables": GROWING},
    ),
}  # fmt: skip
LINKS = {"two_tower": "sigmoid", "two_tower_ranker": "first", "cnn": [2.0, 3.0], "mlp": ""}
ANSWERS = {
    "softmax": tf.nn.softmax,
    "sigmoid": tf.sigmoid,
    "first": lambda outputs: tf.sigmoid(outputs[:, :1]),
    "": tf.identity,
}
PROGRAM = """
    import glob, sys

    # No code of ours, wherever the interpreter would find it.
    sys.modules |= dict.fromkeys(["flotilla", "trainer", "components", "pipelines"])
    import runpy, numpy as np

    for name in sorted(glob.glob("*.py")):
        found = runpy.run_path(name)["answers"]
        expected = np.load(name.replace(".py", ".npy"))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=name)

    # Nothing but the reader says where the classes of an earlier version are.
    del sys.modules["flotilla"]
    from flotilla.trainer.models import keras_file
    for name in ("tabular", "two_tower_ranker"):
        keras_file.read(f"{sys.argv[1]}/{name}.keras")
"""


def built(name):
    spec, inputs, args = MODELS[name]
    model = registry.build(ModelConfig(name=name.split()[0], args=args), spec, 1)
    inputs = {each: tf.constant(inputs[each]) for each in spec.names}
    given = inputs if len(inputs) > 1 else inputs[spec.names[0]]
    if any(isinstance(each, EmbeddingTable) for each in model.layers):
        some = {"user": tf.constant([3, -7, 8]), "item": tf.constant(["a", "b", "c"])}
        model(some, training=True)
        random = np.random.default_rng(0)
        for variable in model.trainable_variables:
            variable.assign(random.normal(size=variable.shape))
        shrink(model)
    return model, given, inputs


@pytest.mark.slow
def test_a_plain_environment_reads_every_model(tmp_path):
    for name, (spec, values, _) in MODELS.items():
        model, given, inputs = built(name)
        folder = tmp_path / name
        folder.mkdir()
        keras_file.plain_model(model).save(folder / "model.keras")
        assert keras_file.list_modules(folder / "model.keras") == [], name
        types = spec.dtype if len(inputs) > 1 else {spec.names[0]: spec.dtype}
        link = LINKS.get(name, "softmax")
        fields = {
            "formats": ["keras"],
            "links": {"": link},
            "inputs": [{"feature": each, "name": each, "dtype": types[each]} for each in inputs],
        }
        rows = zip(*(values[each].tolist() for each in inputs), strict=True)
        instances = [dict(zip(inputs, row, strict=True)) for row in rows]
        (folder / "MANIFEST.json").write_text(json.dumps(fields))
        (folder / "request.json").write_text(json.dumps({"instances": instances}))
        (tmp_path / f"{name}.py").write_text(programs(str(folder), fields)["Keras"])
        outputs = model(given, training=False)
        answers = (lambda x: x * 3 + 2) if isinstance(link, list) else ANSWERS[link]
        np.save(tmp_path / f"{name}.npy", answers(outputs))
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(EARLIER_FILES)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "name", ["tabular", "tabular of sequences", "two_tower of tables", "cnn of augmented images"]
)
def test_a_file_answers_as_the_model_and_names_no_class_of_ours(tmp_path, name):
    model, given, _ = built(name)
    path = tmp_path / "model.keras"
    keras_file.plain_model(model).save(path)
    assert keras_file.list_modules(path) == []
    np.testing.assert_allclose(keras_file.read(path)(given), model(given), rtol=1e-6, atol=1e-6)


EARLIER_FILES = Path(__file__).parent / "earlier"
EARLIER = {
    "tabular": (
        {
            "age": tf.constant([25.0, np.nan]),
            "rooms": tf.constant([1, 2], tf.int64),
            "city": tf.constant(["Rome", "Paris"]),
            "review": tf.constant(["Good film!", ""]),
            "ticks": tf.constant([[1, 2, 0], [4, 0, 0]], tf.int64),
        },
        [[-0.9619140625, 1.6552734375], [-0.75, 0.25]],
    ),
    "two_tower_ranker": (
        {"user": tf.constant([3, 9], tf.int64), "item": tf.constant([5, 1], tf.int64)},
        [[-0.25, -0.75, 1.0, 0.0, 0.25], [-0.07421875, -0.9375, 1.0, -0.1875, 0.125]],
    ),
}


@pytest.mark.parametrize("name", EARLIER)
def test_a_file_of_an_earlier_version_is_read(name):
    path = EARLIER_FILES / f"{name}.keras"
    assert keras_file.list_modules(path)[0].startswith("trainer.models.")
    given, expected = EARLIER[name]
    np.testing.assert_allclose(keras_file.read(path)(given), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("values", [(), ("a", "b", "a "), ("[UNK]", "", "é\nx")])
def test_a_vocabulary_of_any_values_is_plain(values):
    texts = tf.constant(["a", "b", "[UNK]", "", "é\nx", "none"])
    given = keras.Input((), dtype="string")
    for layer in (Vocabulary(values), Words([each for each in values if each.isalpha()], 2)):
        model = keras.Model(given, layer.plain(given))
        np.testing.assert_array_equal(model(texts), layer(texts))


def test_a_layer_that_is_called_twice_keeps_its_class(tmp_path):
    given = [keras.Input((), dtype="string", name=name) for name in "ab"]
    layer = Vocabulary(["x"])
    model = keras.Model(given, keras.layers.Add()([layer(each) for each in given]))
    path = tmp_path / "model.keras"
    keras_file.plain_model(model).save(path)
    assert keras_file.list_modules(path)
    texts = [tf.constant(["x", "y"]), tf.constant(["x", "x"])]
    np.testing.assert_array_equal(keras_file.read(path)(texts), model(texts))
