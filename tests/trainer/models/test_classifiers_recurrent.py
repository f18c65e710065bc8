"""The recurrent model: one output for a sequence or for each place, whatever the padding."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.config.schema import ModelConfig
from trainer.errors import ConfigError
from trainer.models import registry
from trainer.models.spec import InputSpec

PLACES = 5


def build(output_shape, shape=(PLACES,), dtype="int64", **args):
    spec = InputSpec(shape=shape, dtype=dtype, output_shape=output_shape)
    return registry.build(ModelConfig(name="gru", args={"vocabulary": 4, **args}), spec, seed=0)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("output_shape", [(3,), (PLACES, 3), {"a": (2,), "b": (1,)}])
def test_its_outputs_have_the_shape_that_is_wanted(output_shape, bidirectional):
    model = build(output_shape, bidirectional=bidirectional)
    if isinstance(output_shape, dict):
        found = {name: each.shape[1:] for name, each in model.output.items()}
    else:
        found = model.output.shape[1:]
    assert found == output_shape


def test_padding_does_not_change_what_is_said_of_a_sequence():
    model = build((3,))
    tokens = np.array([[1, 2, 3, 0, 0]])
    other = build((3,), shape=(3,))
    np.testing.assert_allclose(model(tokens), other(tokens[:, :3]), rtol=1e-6)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"dtype": "float32"}, "takes one sequence of whole numbers, not float32"),
        ({"shape": (8, 8)}, "takes one sequence of whole numbers, not int64 of shape"),
        ({"vocabulary": 0}, "vocabulary: 0 is not allowed"),
    ],
)
def test_what_is_no_sequence_is_refused(args, words):
    with pytest.raises(ConfigError, match=words):
        build((3,), **args)
