"""Frozen variables in the outer loop: untouched, saved, and thawed when a run is resumed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.counting import Run
from tests.trainer.plain import Plain, dense, problem_of
from trainer import storage
from trainer.errors import UserError
from trainer.models.registry import freeze

HIDDEN = ("dense/hidden/*",)
NORM = ("dense/norm/*",)


def frozen(globs):
    model = dense()
    freeze(model, globs)
    return model


def train(run, steps, globs=(), optimizer="adam", **named):
    """Train with these variables frozen; return the strategy."""
    strategy = Plain()
    make = problem_of(partial(frozen, globs), optimizer)
    optimizers = {"optimizer": {"name": optimizer}}
    run.train(strategy, steps=steps, make_problem=make, freeze=list(globs), **optimizers, **named)
    return strategy


def saved(run, step):
    uri = storage.join(run.uri, f"step-{step:08d}")
    reader = tf.train.load_checkpoint(str(storage.local_path(uri) / "variables"))
    return {
        key.removeprefix("variables/").partition("/")[0].replace(".S", "/"): reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key.startswith("variables/")
    }


def changed(before, after, part):
    return {
        path: bool((before[path] != after[path]).any())
        for path in before
        if path.startswith(f"model/dense/{part}/")
    }


def test_frozen_variables_are_in_the_checkpoint_and_have_no_slots(tmp_path):
    run = Run(tmp_path)
    train(run, 20, HIDDEN, keep=9)
    first, last = saved(run, 0), saved(run, 20)
    assert changed(first, last, "hidden") == {
        "model/dense/hidden/kernel": False,
        "model/dense/hidden/bias": False,
    }
    assert all(changed(first, last, "logits").values())
    slots = [path for path in last if path.startswith("optimizer/")]
    assert len(slots) == 2 * 4
    assert not any("hidden" in path for path in slots)
    assert run.fields(20)["freeze"] == list(HIDDEN)


@pytest.mark.slow
def test_another_list_thaws_with_new_slots_and_keeps_the_others(tmp_path, caplog):
    run = Run(tmp_path)
    train(run, 20, HIDDEN)
    before = saved(run, 20)
    resumed = train(run, 20, NORM)
    values = {path: variable.numpy() for path, variable in resumed.variables().items()}
    for path, value in values.items():
        if path in before:
            np.testing.assert_array_equal(value, before[path], err_msg=path)
    anew = [path for path in values if path not in before]
    assert len(anew) == 4
    assert all("hidden" in path and not values[path].any() for path in anew)
    assert "training.freeze has changed: 4 of 8 slots of the optimizer begin anew" in caplog.text
    train(run, 40, NORM)
    after = saved(run, 40)
    assert all(changed(before, after, "hidden").values())
    assert not any(changed(before, after, "norm").values())


@pytest.mark.slow
def test_slots_that_a_number_tells_apart_begin_anew(tmp_path):
    run = Run(tmp_path)
    train(run, 20, ("dense/hidden/kernel",), "adafactor")
    resumed = train(run, 20, (), "adafactor").variables()
    # Those of the one kernel and those of the other have the same names but for a number.
    assert not any(resumed[path].numpy().any() for path in resumed if "optimizer/kernel" in path)
    assert resumed["optimizer/adafactor/dense_logits_bias_velocity"].numpy().any()
    assert train(run, 30, (), "adafactor").global_step() == 30


def test_another_optimizer_is_refused_all_the_same(tmp_path):
    run = Run(tmp_path)
    train(run, 10, HIDDEN)
    with pytest.raises(UserError, match="does not fit model and optimizer"):
        train(run, 20, (), "lion")
