"""A new run starts with the weights of another one, and reports weights that do not fit."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints import warm_start
from flotilla.trainer.checkpoints.checkpoints import Checkpoints
from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.events import AttemptBegin, WarmStart
from flotilla.trainer.models import keras_file
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.strategies.strategy import checkpoint_variables
from tests.stores.fixtures import bucket_name
from tests.trainer.counting import Counting, Run
from tests.trainer.small_run import publish_checkpoint


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return Run(tmp_path)


@pytest.fixture
def before(tmp_path, monkeypatch):
    """An earlier run that has reached global step 30 and a weight of 15."""
    earlier = Run(tmp_path / "earlier")
    with monkeypatch.context() as apart:
        apart.setenv(events.VARIABLE, str(tmp_path / "earlier.jsonl"))
        earlier.train(steps=30, keep=100)
    assert earlier.weight(30) == 15.0
    return earlier


def checkpoint_of(run, step=30):
    return storage.join(run.uri, f"step-{step:08d}")


def refused(run, uri):
    strategy = Counting()
    with pytest.raises(UserError) as caught:
        run.train(strategy, steps=20, warm_start=uri)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("training.warm_start: ")
    # The error was found before training, so nothing was saved.
    assert run.steps() == []
    assert run.events(AttemptBegin) == []
    return line


def test_it_takes_the_weights_begins_at_global_step_0_and_says_so(run, before):
    uri = checkpoint_of(before)
    assert run.train(steps=20, keep=100, warm_start=uri) == 20
    assert run.steps() == [0, 10, 20]
    assert [run.weight(step) for step in run.steps()] == [15.0, 20.0, 25.0]
    (attempt,) = run.events(AttemptBegin)
    assert (attempt.global_step, attempt.resumed) == (0, False)
    (event,) = run.events(WarmStart)
    assert event == WarmStart(uri=uri, taken=1, what="1 variable loaded")
    assert {run.fields(step)["warmed_from"] for step in run.steps()} == {uri}
    assert run.fields(20)["warm_start"] == "1 variable loaded"


def test_a_resumed_run_ignores_it_and_keeps_its_origin(run, before):
    uri = checkpoint_of(before)
    run.train(steps=20, keep=100, warm_start=uri)
    # The source may be deleted once a checkpoint of this run exists.
    shutil.rmtree(before.folder)
    run.train(steps=40, keep=100, warm_start=uri)
    assert run.weight(40) == 15.0 + 20.0
    assert run.fields(40)["warmed_from"] == uri
    assert len(run.events(WarmStart)) == 1


def test_a_run_that_began_without_one_takes_none_later(run, before):
    run.train(steps=20, keep=100)
    run.train(steps=40, keep=100, warm_start=checkpoint_of(before))
    assert run.weight(40) == 20.0
    assert (run.fields(40)["warmed_from"], run.fields(40)["warm_start"]) == ("", "")
    assert run.events(WarmStart) == []


def test_one_that_is_not_there(run, before):
    uri = checkpoint_of(before, 31)
    assert refused(run, uri) == (
        f"training.warm_start: {uri} is not published (no MANIFEST.json there): check the URI, or "
        "create it again"
    )


def test_one_that_is_damaged(run, before):
    before.damage(30)
    line = refused(run, checkpoint_of(before))
    assert "step-00000030 is damaged: variables.data-00000-of-00001 has crc32c" in line


def test_something_else_than_a_checkpoint(run, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    uri = storage.uri_of(tmp_path / "dataset")
    storage.publish(source, uri, kind="dataset")
    line = refused(run, uri)
    assert line == f"training.warm_start: {uri} is a dataset, not a checkpoint"


def test_the_word_champion_is_for_the_pipeline(run):
    with pytest.raises(ConfigError, match="'champion' works only in a pipeline"):
        run.train(steps=20, warm_start="champion")


def published(folder, variables):
    kept = Checkpoints(storage.uri_of(folder / "other"), keep=9, scratch=folder / "saving")
    counter = tf.Variable(7, dtype=tf.int64)
    return kept.save({**variables, "global_step": counter}, io_device=None, fields={})


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"model/a": tf.Variable(1.0)}, "it has no weight of shape []"),
        (
            {"model/weight": tf.Variable([1.0, 2.0])},
            "its weight has shape [2], not [] as in this model",
        ),
        (
            {"model/weight": tf.Variable(1.0), "model/v1.0/bias": tf.Variable([0.0])},
            "it has v1.0/bias of shape [1], which this model lacks",
        ),
    ],
)
def test_one_of_another_model_names_the_first_variable_that_differs(run, tmp_path, variables, said):
    uri = published(tmp_path, variables)
    assert refused(run, uri) == (
        f"training.warm_start: {uri} is the checkpoint of another model: {said}; give weights of "
        "the same model, select variables with {from, include, exclude}, or leave the key "
        "empty"
    )


def test_a_seed_that_this_model_lacks_is_left(run, tmp_path):
    seed = tf.Variable([3, 4], dtype=tf.int64)
    found = {"model/weight": tf.Variable(5.0), "model/seed_generator/seed_generator_state": seed}
    assert run.train(steps=20, warm_start=published(tmp_path, found)) == 20


def test_the_first_of_many_that_differ_is_the_first_of_the_model(tmp_path):
    model = net_parts(units=4)
    uri = publish_checkpoint(tmp_path / "checkpoints", net_parts(units=5))
    found = warm_start.fetch_weights(uri, tmp_path / "scratch")
    with pytest.raises(UserError, match=r"hidden/kernel has shape \[3, 5\], not \[3, 4\]"):
        warm_start.load(found, named(model), io_device=None)


def test_all_state_of_the_model_is_taken_and_none_of_the_optimizer(tmp_path):
    earlier, optimizer = trained()
    uri = published(tmp_path, checkpoint_variables(earlier, optimizer))
    fresh = net_parts()
    begun = keras.optimizers.Adam()
    begun.build(fresh.trainable_variables)
    untouched = [variable.numpy().tolist() for variable in begun.variables]
    found = warm_start.fetch_weights(uri, tmp_path / "scratch")
    warm_start.load(found, checkpoint_variables(fresh, begun), io_device=None)
    for mine, theirs in zip(fresh.variables, earlier.variables, strict=True):
        assert mine.numpy().tolist() == theirs.numpy().tolist()
    assert [variable.numpy().tolist() for variable in begun.variables] == untouched
    assert int(begun.iterations) == 0


def trained():
    """Return a model in which every variable has changed, and its optimizer."""
    model = net_parts()
    optimizer = keras.optimizers.Adam(0.1)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.random.normal((8, 3)), training=True) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [each.value for each in weights]), weights)
    assert int(optimizer.iterations) == 3
    return model, optimizer


def net_parts(classes=2, units=4, head="out", name="net", sequential=False):
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


def trained_parts(**how):
    model = net_parts(**how)
    for number, variable in enumerate(model.variables):
        variable.assign(np.full(variable.shape, number + 2, variable.dtype))
    return model


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Return a function that warm-starts a model and returns its loaded variables and the event."""
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))

    def begun(model, value):
        before = {variable.path: variable.numpy() for variable in model.variables}
        warm_start.check(value, list(before))
        source = warm_start.fetch_weights(value, tmp_path / "scratch")
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
    return publish_checkpoint(tmp_path / "checkpoints", trained_parts())


BODY = {"hidden/kernel", "hidden/bias", "norm/gamma", "norm/beta", "norm/moving_mean"}
BODY |= {"norm/moving_variance"}
HEAD = {"out/kernel", "out/bias"}


def test_another_head_is_left_by_excluding_it(begin, checkpoint):
    taken, event = begin(net_parts(classes=5), {"from": checkpoint, "exclude": ["out/*"]})
    assert taken == BODY
    assert event.left == {"excluded": 2}
    assert event.what == "6 variables loaded, 2 excluded (out/kernel, out/bias)"


def test_a_part_of_the_layers_is_included(begin, checkpoint):
    given = {"from": checkpoint, "include": ["hidden/*", "norm/*"], "exclude": ["*/moving_*"]}
    taken, event = begin(net_parts(classes=5), given)
    assert taken == BODY - {"norm/moving_mean", "norm/moving_variance"}
    assert event.left == {"not included": 2, "excluded": 2}


def test_what_is_not_there_keeps_its_first_value(begin, checkpoint):
    taken, event = begin(net_parts(head="other"), {"from": checkpoint, "include": ["*"]})
    assert taken == BODY
    assert event.what == (
        "6 variables loaded, 2 absent in the source (other/kernel, other/bias), "
        "2 not in this model (out/bias, out/kernel)"
    )


def test_another_shape_names_the_glob_that_leaves_it(begin, checkpoint):
    with pytest.raises(UserError) as caught:
        begin(net_parts(classes=5), {"from": checkpoint, "include": ["*"]})
    assert str(caught.value) == (
        f"training.warm_start: out/kernel has shape [4, 2] in {checkpoint} and [4, 5] in this "
        "model: add 'out/kernel' to training.warm_start.exclude, or give weights that match"
    )


@pytest.mark.parametrize(
    ("globs", "said"),
    [
        (
            {"include": ["hiden/*"]},
            "include: 'hiden/*' matches no variable of the model; did you mean",
        ),
        (
            {"exclude": ["outt/kernel"]},
            "exclude: 'outt/kernel' matches no variable of the model; did ",
        ),
    ],
)
def test_a_glob_that_fits_nothing_is_refused_with_the_nearest(globs, said):
    with pytest.raises(ConfigError) as caught:
        warm_start.check({"from": "gs://b/c", **globs}, [v.path for v in net_parts().variables])
    assert str(caught.value).startswith(f"training.warm_start.{said}")
    assert str(caught.value).endswith("'?")


def test_a_glob_that_takes_nothing_is_refused(begin, checkpoint):
    with pytest.raises(UserError) as caught:
        begin(net_parts(head="outs"), {"from": checkpoint, "include": ["hidden/*", "outs/*"]})
    assert str(caught.value) == (
        f"training.warm_start: {checkpoint} has none of the variables that 'outs/*' matches "
        "in this model; did you mean 'out/kernel'?"
    )


class TestOfKeras:
    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "pretrained.keras"
        trained_parts().save(path)
        return path

    def test_all_of_it_is_taken_by_a_text(self, begin, file):
        taken, event = begin(net_parts(), str(file))
        assert taken == BODY | HEAD
        assert event.uri == storage.uri_of(file)

    def test_the_uri_of_a_file_may_have_options(self, begin, file, s3):
        bucket = bucket_name()
        s3.create_bucket(bucket)
        uri = f"s3://{bucket}/pretrained.keras?region=us-east-1"
        storage.write_bytes(uri, file.read_bytes())
        assert begin(net_parts(), uri)[0] == BODY | HEAD

    def test_names_of_models_around_a_layer_do_not_matter(self, begin, file):
        # Keras includes the name of a new Sequential in the paths of its variables, but omits the
        # name of a loaded one.
        taken, _ = begin(net_parts(sequential=True), str(file))
        assert taken == {f"net/{path}" for path in BODY | HEAD}

    def test_where_there_is_a_doubt_nothing_is_guessed(self, begin, file):
        parts = [net_parts(sequential=True, name=name) for name in ("one", "two")]
        inputs = keras.Input((3,))
        model = keras.Model(inputs, keras.layers.Concatenate()([part(inputs) for part in parts]))
        with pytest.raises(
            UserError, match=r"none of the variables that '\*' matches in this model"
        ):
            begin(model, {"from": str(file), "include": ["*"]})

    def test_an_exported_model_is_read_by_its_file(self, begin, tmp_path):
        source = tmp_path / "exported"
        source.mkdir()
        trained_parts().save(source / "model.keras")
        uri = storage.uri_of(tmp_path / "model")
        storage.publish(source, uri, kind="model")
        assert begin(net_parts(), uri)[0] == BODY | HEAD

    def test_the_table_of_an_exported_file_is_taken_in_shards(self, begin, tmp_path):
        def model():
            ids = keras.Input((), dtype="int64")
            return keras.Model(ids, ShardedEmbedding(5, 2, shards=2, name="city")(ids))

        there, here = model(), model()
        keras_file.plain_model(there).save(tmp_path / "model.keras")
        taken, _ = begin(here, str(tmp_path / "model.keras"))
        assert taken == {"city/shard_0", "city/shard_1"}
        np.testing.assert_array_equal(here(np.arange(5)), there(np.arange(5)))

    def test_an_exported_model_without_the_file_is_refused(self, begin, tmp_path):
        source = tmp_path / "exported"
        source.mkdir()
        uri = storage.uri_of(tmp_path / "model")
        storage.publish(source, uri, kind="model")
        with pytest.raises(
            UserError, match=r"is a model without model\.keras: export it with keras"
        ):
            begin(net_parts(), uri)

    def test_another_model_is_refused(self, begin, file):
        with pytest.raises(UserError) as caught:
            begin(net_parts(classes=5), str(file))
        uri = storage.uri_of(file)
        assert str(caught.value).startswith(
            f"training.warm_start: {uri} is the weights file of another model: its out/kernel "
        )

    @pytest.mark.parametrize("text", ["no model", ""])
    def test_a_file_that_is_no_model_is_one_line(self, begin, tmp_path, text):
        file = tmp_path / "other.keras"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            begin(net_parts(), str(file))
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
        with pytest.raises(UserError, match="register_keras_serializable in the module of mod"):
            begin(net_parts(), str(file))

    def test_one_that_is_not_there(self, begin, tmp_path):
        with pytest.raises(UserError, match=r"training.warm_start: there is nothing at file:///"):
            begin(net_parts(), str(tmp_path / "absent.keras"))
