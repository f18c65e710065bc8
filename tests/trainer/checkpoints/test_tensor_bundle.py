"""TensorFlow's own reader can read every bundle of a writer."""

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.checkpoints import tensor_bundle
from flotilla.trainer.checkpoints.tensor_bundle import GRAPH, BundleWriter
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.checkpoints.by_parts import room_for


@pytest.fixture
def variables():
    """Return variables of several types, including one of which only some rows were updated."""
    made = {
        "model/kernel": tf.Variable([[1.0, 2.0]]),
        "model/table": tf.Variable(tf.zeros([600, 2])),
        "model/half": tf.Variable(tf.ones([3], tf.bfloat16)),
        "optimizer/a.b/c": tf.Variable([True, False]),
        "global_step": tf.Variable(7, dtype=tf.int64),
    }
    made["model/table"].scatter_update(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([599])))
    return made


@pytest.fixture
def writer(tmp_path):
    return BundleWriter(tmp_path / "scratch")


def written(writer, variables, prefix):
    writer.write(writer.read(variables, None), prefix, None)


def read(variables, prefix):
    """Return the values that TensorFlow's own checkpoint reader returns."""
    found = {
        path: tf.Variable(tf.zeros(each.shape, each.dtype)) for path, each in variables.items()
    }
    status = tf.train.Checkpoint(variables=found).read(str(prefix))
    status.assert_consumed()
    return {path: each.numpy().tolist() for path, each in found.items()}


def test_tensorflow_reads_each_of_them(writer, variables, tmp_path):
    for number in range(3):
        variables["model/kernel"].assign_add([[1.0, 1.0]])
        written(writer, variables, tmp_path / f"{number}")
    wanted = {path: each.numpy().tolist() for path, each in variables.items()}
    assert read(variables, tmp_path / "2") == wanted
    assert read(variables, tmp_path / "0") == {**wanted, "model/kernel": [[2.0, 3.0]]}
    names = {each.name for each in tmp_path.iterdir() if each.is_file()}
    assert names == {f"{n}.{end}" for n in range(3) for end in ("index", "data-00000-of-00001")}


def test_it_is_what_tensorflow_writes(writer, variables, tmp_path):
    written(writer, variables, tmp_path / "ours")
    tensor_bundle.write(variables, tmp_path / "theirs", None)
    ours, theirs = (tf.train.load_checkpoint(str(tmp_path / name)) for name in ("ours", "theirs"))
    assert ours.get_variable_to_shape_map() == theirs.get_variable_to_shape_map()
    assert ours.get_variable_to_dtype_map() == theirs.get_variable_to_dtype_map()
    # Leave out the object graphs, which list the variables in different orders.
    for key in ours.get_variable_to_shape_map().keys() - {GRAPH}:
        assert np.array_equal(ours.get_tensor(key), theirs.get_tensor(key))


def test_it_is_traced_once_before_the_first(writer, variables, tmp_path, monkeypatch):
    traced = []
    value, write = tensor_bundle._value, tensor_bundle._write
    monkeypatch.setattr(tensor_bundle, "_value", lambda each: traced.append(each) or value(each))
    monkeypatch.setattr(
        tensor_bundle, "_write", lambda *given, **named: traced.append(0) or write(*given, **named)
    )
    writer.prepare(variables, None)
    made = len(traced)
    assert made >= len(variables)
    for number in range(2):
        written(writer, variables, tmp_path / f"{number}")
    assert len(traced) == made


def test_other_variables_of_the_same_paths_are_others(writer, variables, tmp_path):
    written(writer, variables, tmp_path / "one")
    others = {path: tf.Variable(each) for path, each in variables.items()}
    others["global_step"].assign(8)
    written(writer, others, tmp_path / "two")
    assert [read(others, tmp_path / name)["global_step"] for name in ("one", "two")] == [7, 8]
    fewer = {path: others[path] for path in ("global_step", "model/kernel")}
    written(writer, fewer, tmp_path / "three")
    assert read(fewer, tmp_path / "three") == {"global_step": 8, "model/kernel": [[1.0, 2.0]]}


def test_what_is_not_finite_is_named(writer, variables):
    assert writer.read(variables, None).not_finite == []
    variables["model/half"].assign([1.0, np.inf, 1.0])
    variables["model/table"].scatter_update(
        tf.IndexedSlices(tf.constant([[1.0, np.nan]]), tf.constant([5]))
    )
    assert sorted(writer.read(variables, None).not_finite) == ["model/half", "model/table"]


def test_a_full_disk_is_one_line(writer, variables, tmp_path):
    values = writer.read(variables, None)
    writer.prepare(variables, None)
    words = rf"^cannot write a checkpoint to {tmp_path}: File too large; free some space there"
    with room_for(0), pytest.raises(UserError, match=words):
        writer.write(values, tmp_path / "bundle", None)
    writer.write(values, tmp_path / "bundle", None)
    assert read(variables, tmp_path / "bundle")["global_step"] == 7
