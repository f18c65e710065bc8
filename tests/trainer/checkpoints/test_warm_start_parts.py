"""A part of the weights: which variables are taken, which are left and why, and what is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.trainer.small_run import publish_checkpoint
from trainer import events, storage
from trainer.checkpoints import warm_start
from trainer.errors import ConfigError, UserError
from trainer.events import WarmStart


def net(classes=2, units=4, head="out", name="net", sequential=False):
    inputs = keras.Input((3,))
    layers = [
        keras.layers.Dense(units, name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(classes, name=head),
    ]
    if sequential:
        return keras.Sequential([inputs, *layers], name=name)
    outputs = inputs
    for layer in layers:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs, name=name)


def named(model):
    return {f"model/{variable.path}": variable.value for variable in model.variables}


def trained(**how):
    """A model no variable of which is as it was made."""
    model = net(**how)
    for number, variable in enumerate(model.variables):
        variable.assign(np.full(variable.shape, number + 2, variable.dtype))
    return model


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begin a model with weights; return the variables that got them, and the event."""
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))

    def begun(model, value):
        before = {variable.path: variable.numpy() for variable in model.variables}
        warm_start.check(value, list(before))
        source = warm_start.fetched(value, tmp_path / "scratch")
        fields = warm_start.load(source, named(model), io_device=None)
        *_, event = events.read(tmp_path / "events.jsonl")
        assert isinstance(event, WarmStart)
        assert fields == {"warmed_from": event.uri, "warm_start": event.what}
        taken = {v.path for v in model.variables if (v.numpy() != before[v.path]).any()}
        assert len(taken) == event.taken
        return taken, event

    return begun


@pytest.fixture
def checkpoint(tmp_path):
    return publish_checkpoint(tmp_path / "checkpoints", trained())


BODY = {"hidden/kernel", "hidden/bias", "norm/gamma", "norm/beta", "norm/moving_mean"}
BODY |= {"norm/moving_variance"}
HEAD = {"out/kernel", "out/bias"}


def test_another_head_is_left_by_excluding_it(begin, checkpoint):
    taken, event = begin(net(classes=5), {"from": checkpoint, "exclude": ["out/*"]})
    assert taken == BODY
    assert event.left == {"excluded": 2}
    assert event.what == "6 variables taken, 2 excluded (out/kernel, out/bias)"


def test_a_part_of_the_layers_is_included(begin, checkpoint):
    given = {"from": checkpoint, "include": ["hidden/*", "norm/*"], "exclude": ["*/moving_*"]}
    taken, event = begin(net(classes=5), given)
    assert taken == BODY - {"norm/moving_mean", "norm/moving_variance"}
    assert event.left == {"not included": 2, "excluded": 2}


def test_what_is_not_there_keeps_its_first_value(begin, checkpoint):
    taken, event = begin(net(head="other"), {"from": checkpoint, "include": ["*"]})
    assert taken == BODY
    assert event.what == (
        "6 variables taken, 2 absent there (other/kernel, other/bias), "
        "2 not in this model (out/bias, out/kernel)"
    )


def test_another_shape_names_the_glob_that_leaves_it(begin, checkpoint):
    with pytest.raises(UserError) as caught:
        begin(net(classes=5), {"from": checkpoint, "include": ["*"]})
    assert str(caught.value) == (
        f"training.warm_start: out/kernel is [4, 2] in {checkpoint} and [4, 5] in this model: add "
        "'out/kernel' to training.warm_start.exclude, or name weights that fit"
    )


@pytest.mark.parametrize(
    ("globs", "said"),
    [
        (
            {"include": ["hiden/*"]},
            "include: 'hiden/*' fits no variable of the model; did you mean",
        ),
        (
            {"exclude": ["outt/kernel"]},
            "exclude: 'outt/kernel' fits no variable of the model; did ",
        ),
    ],
)
def test_a_glob_that_fits_nothing_is_refused_with_the_nearest(globs, said):
    with pytest.raises(ConfigError) as caught:
        warm_start.check({"from": "gs://b/c", **globs}, [v.path for v in net().variables])
    assert str(caught.value).startswith(f"training.warm_start.{said}")
    assert str(caught.value).endswith("'?")


def test_a_glob_that_takes_nothing_is_refused(begin, checkpoint):
    with pytest.raises(UserError) as caught:
        begin(net(head="outs"), {"from": checkpoint, "include": ["hidden/*", "outs/*"]})
    assert str(caught.value) == (
        f"training.warm_start: {checkpoint} has nothing to take of what 'outs/*' fits in this "
        "model; did you mean 'out/kernel'?"
    )


class TestOfKeras:
    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "pretrained.keras"
        trained().save(path)
        return path

    def test_all_of_it_is_taken_by_a_text(self, begin, file):
        taken, event = begin(net(), str(file))
        assert taken == BODY | HEAD
        assert event.uri == storage.uri_of(file)

    def test_a_part_is_taken(self, begin, file):
        taken, _ = begin(net(classes=5), {"from": str(file), "exclude": ["out/*"]})
        assert taken == BODY

    def test_names_of_models_around_a_layer_do_not_matter(self, begin, file):
        # Keras puts the name of a new Sequential into the paths, and leaves it out where it loads.
        taken, _ = begin(net(sequential=True), str(file))
        assert taken == {f"net/{path}" for path in BODY | HEAD}

    def test_where_there_is_a_doubt_nothing_is_guessed(self, begin, file):
        parts = [net(sequential=True, name=name) for name in ("one", "two")]
        inputs = keras.Input((3,))
        model = keras.Model(inputs, keras.layers.Concatenate()([part(inputs) for part in parts]))
        with pytest.raises(UserError, match=r"nothing to take of what '\*' fits in this model"):
            begin(model, {"from": str(file), "include": ["*"]})

    def test_an_exported_model_is_read_by_its_file(self, begin, tmp_path):
        source = tmp_path / "exported"
        source.mkdir()
        trained().save(source / "model.keras")
        uri = storage.uri_of(tmp_path / "model")
        storage.publish(source, uri, kind="model")
        assert begin(net(), uri)[0] == BODY | HEAD

    def test_an_exported_model_without_the_file_is_refused(self, begin, tmp_path):
        source = tmp_path / "exported"
        source.mkdir()
        uri = storage.uri_of(tmp_path / "model")
        storage.publish(source, uri, kind="model")
        with pytest.raises(
            UserError, match=r"is a model without model\.keras: export it with keras"
        ):
            begin(net(), uri)

    def test_another_model_is_refused(self, begin, file):
        with pytest.raises(UserError) as caught:
            begin(net(classes=5), str(file))
        uri = storage.uri_of(file)
        assert str(caught.value).startswith(
            f"training.warm_start: {uri} is the weights of another model: out/kernel is [4, 2] "
        )

    @pytest.mark.parametrize("text", ["no model", ""])
    def test_a_file_that_is_no_model_is_one_line(self, begin, tmp_path, text):
        file = tmp_path / "other.keras"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            begin(net(), str(file))
        line = str(caught.value)
        assert line.startswith(f"training.warm_start: Keras cannot read {storage.uri_of(file)}: ")
        assert "\n" not in line

    def test_a_class_that_is_not_registered_is_one_line(self, begin, tmp_path):
        class Twice(keras.layers.Layer):
            def call(self, inputs):
                return 2 * inputs

        inputs = keras.Input((3,))
        file = tmp_path / "own.keras"
        keras.Model(inputs, keras.layers.Dense(2)(Twice()(inputs))).save(file)
        with pytest.raises(UserError, match=r"register_keras_serializable\) by the module of mod"):
            begin(net(), str(file))

    def test_one_that_is_not_there(self, begin, tmp_path):
        with pytest.raises(UserError, match=r"training.warm_start: there is nothing at file:///"):
            begin(net(), str(tmp_path / "absent.keras"))
