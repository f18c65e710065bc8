"""A profile of real steps, as TensorFlow writes it."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from trainer.tensorboard.profiler import Profiler


@pytest.mark.slow
def test_the_trace_has_the_operations_of_the_steps(tmp_path):
    profiler = Profiler((2, 3), tmp_path, [])
    weight = tf.Variable(tf.ones([64, 64]))
    for step in range(4):
        profiler.at(step)
        weight.assign(tf.linalg.matmul(weight, weight) / 64)
    [path] = (tmp_path / "train/plugins/profile").glob("*/*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    names = {each.name for plane in space.planes for each in plane.event_metadata.values()}
    assert any("MatMul" in name for name in names)
