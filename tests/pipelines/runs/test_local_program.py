"""Tests `flotilla run` with a user's own program: its model is judged, or the run fails."""

import sys

import pytest
import yaml

from flotilla.trainer import storage
from tests.pipelines.called import call

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PROGRAM = """
import glob, os
import keras
import tensorflow as tf

wire = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.VarLenFeature(tf.int64)}


def parse(record):
    row = tf.io.parse_single_example(record, wire)
    image = tf.reshape(tf.io.decode_raw(row["image"], "uint8"), (-1, 8, 8, 1))
    return tf.cast(image, tf.float32), tf.sparse.to_dense(row["label"])


files = sorted(glob.glob(os.environ["FLOTILLA_DATASET_FILES"] + "/train/*.tfrecord"))
data = tf.data.TFRecordDataset(files).map(parse).unbatch().shuffle(2000, seed=1).batch(64)
keras.utils.set_random_seed(1)
layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
layers += [keras.layers.Dense(10, activation="softmax")]
model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
model.compile("adam", "sparse_categorical_crossentropy")
model.fit(data, epochs=20, verbose=2)
if os.environ["AS"] == "file":
    model.save(os.environ["FLOTILLA_MODEL"] + "/digits.keras")
else:
    model.export(os.environ["FLOTILLA_MODEL"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("program")
    (root / "train.py").write_text(PROGRAM, encoding="utf-8")
    return root


def run(folder, written_as, after_training):
    tree = {
        "name": "digits",
        "data": {"dataset": "digits", "shards": 2},
        "training": {"strategy": "single"},
        "program": {
            "command": [sys.executable, "train.py"],
            "working_dir": str(folder),
            "env": {"AS": written_as, "WORD": "hunter2"},
            "after_training": after_training,
        },
        "evaluation": {"baseline": "none"},
        "gate": {"min": {"accuracy": 0.8}, "champion": {"margin": 0.2}},
    }
    path = folder / "program.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return call("run", folder / "runs", str(path), cwd=folder)


def test_models_of_a_program_follow_each_other_as_champions(folder):
    for version, (written_as, forms) in enumerate(
        [("folder", ["saved_model"]), ("file", ["saved_model", "keras"])], start=1
    ):
        ended = run(folder, written_as, "evaluate")
        assert ended.code == 0, ended.err + ended.log
        assert ended.answer["headline"].startswith(f"digits v{version}: accuracy 0.")
        fields = storage.read_manifest(ended.answer["artifacts"]["model"]).fields
        assert fields["formats"] == forms
        measured = storage.read_json(ended.answer["artifacts"]["evaluation"], "metrics.json")
        assert measured["program"]["outputs"] == {"": "probabilities"}
        report = storage.local_path(ended.answer["artifacts"]["report"]).read_text("utf-8")
        assert "train.py" in report
        assert "hunter2" not in report
    assert not measured["champion"]["incomparable"], "the layouts are compared"


def test_a_run_ends_after_training(folder):
    ended = run(folder, "file", "stop")
    assert ended.code == 0, ended.err + ended.log
    assert (ended.answer["status"], ended.answer["headline"]) == ("trained", "digits: trained")
    assert {"checkpoint", "report"} <= ended.answer["artifacts"].keys()
    assert not {"evaluation", "model"} & ended.answer["artifacts"].keys()
    assert "program.after_training=stop" in ended.answer["message"]
