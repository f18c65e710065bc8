"""Checkpoints restore what was saved, and only readable ones are used."""

import math
import resource
from contextlib import contextmanager

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.checkpoints import (
    Checkpoints,
    advise_outputs,
    advise_pieces,
    restore,
    restore_model,
)
from flotilla.trainer.checkpoints.index import list_checkpoints, newest_checkpoint
from flotilla.trainer.config.model import OptimizerConfig
from flotilla.trainer.config.schema import ModelConfig, TrainingConfig
from flotilla.trainer.events import CheckpointPassedOver, CheckpointPublished
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.manifest import MANIFEST
from flotilla.trainer.strategies.strategy import checkpoint_variables

DATA = "variables.data-00000-of-00001"


def variables(step, weight=None, size=3):
    filled = float(step) if weight is None else weight
    return {
        "model/dense/kernel": tf.Variable(tf.fill([size], filled)),
        "optimizer/adam/dense_kernel_momentum": tf.Variable(2.0 * step),
        "model/seed": tf.Variable([step, 7], dtype=tf.int64),
        "global_step": tf.Variable(step, dtype=tf.int64),
    }


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "check points"


def of(folder, keep=3):
    scratch = folder.with_name("scratch")
    return Checkpoints(storage.uri_of(folder), keep=keep, scratch=scratch)


def save(saved, step, weight=None, **fields):
    return saved.save(variables(step, weight), io_device=None, fields=fields)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def restored(found, size=3):
    empty = variables(0, size=size)
    restore(found, empty, io_device=None)
    return {path: variable.numpy().tolist() for path, variable in empty.items()}


@contextmanager
def refusal():
    with pytest.raises(UserError) as caught:
        yield caught
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_saved_comes_back(folder):
    uri = save(of(folder), 1500, strategy="counting", metrics={"loss": 0.5})
    assert uri == storage.join(storage.uri_of(folder), "step-00001500")
    manifest = storage.verify(uri)
    assert manifest.kind == "checkpoint"
    assert dict(manifest.fields) == {
        "global_step": 1500,
        "fingerprint": "",
        "strategy": "counting",
        "metrics": {"loss": 0.5},
        "variables": {
            path: {"dtype": each.dtype.name, "shape": each.shape.as_list(), "part": 0}
            for path, each in variables(0).items()
        },
    }
    assert [entry.path for entry in manifest.files] == [DATA, "variables.index"]
    assert names(folder) == ["step-00001500"]
    assert names(folder.with_name("scratch")) == []
    found = of(folder).newest()
    assert (found.uri, found.global_step) == (uri, 1500)
    assert restored(found) == {
        "model/dense/kernel": [1500.0] * 3,
        "optimizer/adam/dense_kernel_momentum": 3000.0,
        "model/seed": [1500, 7],
        "global_step": 1500,
    }


def test_one_of_the_first_version_is_read(folder, tmp_path):
    """The first version wrote TensorFlow's own format, and a manifest with only the global step."""
    written = tmp_path / "written"
    tf.train.Checkpoint(variables=variables(1500)).write(str(written / "variables"))
    uri = storage.join(storage.uri_of(folder), "step-00001500")
    storage.publish(written, uri, kind="checkpoint", fields={"global_step": 1500})
    assert restored(of(folder).newest())["model/dense/kernel"] == [1500.0] * 3


def test_the_device_is_the_one_that_is_named(folder):
    of(folder).save(variables(10), io_device="/cpu:0", fields={})
    found = of(folder).newest()
    empty = variables(0)
    restore(found, empty, io_device="/cpu:0")
    assert int(empty["global_step"]) == 10


def test_a_run_that_has_not_begun_has_none(folder):
    assert of(folder).newest() is None
    assert list_checkpoints(storage.uri_of(folder)) == []
    with refusal() as caught:
        newest_checkpoint(storage.uri_of(folder))
    assert str(caught.value) == f"no checkpoint is published below {storage.uri_of(folder)}"


def test_the_newest_are_kept(folder):
    saved = of(folder, keep=2)
    steps = [10, 20, 99_999_999, 100_000_000]
    for step in steps:
        save(saved, step)
    # They are in the order of steps and not of names.
    assert names(folder) == ["step-100000000", "step-99999999"]
    listed = list_checkpoints(storage.uri_of(folder))
    assert [step for _, step in listed] == steps[2:]
    assert newest_checkpoint(storage.uri_of(folder)) == listed[-1]
    assert of(folder).newest().global_step == steps[-1]


def test_other_things_below_the_uri_are_left_alone(folder):
    (folder / "logs").mkdir(parents=True)
    (folder / "history.jsonl").write_text("{}\n")
    source = folder.with_name("source")
    source.mkdir()
    storage.publish(source, storage.uri_of(folder / "other"), kind="evaluation")
    save(of(folder, keep=1), 10)
    assert names(folder) == ["history.jsonl", "logs", "other", "step-00000010"]
    assert newest_checkpoint(storage.uri_of(folder))[1] == 10


def test_the_same_step_is_saved_once(folder):
    saved = of(folder)
    uri = save(saved, 10)
    created = storage.read_manifest(uri).created
    assert save(saved, 10, weight=5.0) == uri
    resumed = of(folder)
    assert resumed.newest().uri == uri
    assert save(resumed, 10, weight=5.0) == uri
    assert storage.read_manifest(uri).created == created
    assert names(folder) == ["step-00000010"]


DAMAGES = {
    "a bit": lambda path: flip_a_bit(path / DATA),
    "the manifest's text": lambda path: (path / MANIFEST).write_text("{"),
    "the manifest": lambda path: (path / MANIFEST).unlink(),
    "its schema": lambda path: (path / MANIFEST).write_text('{"schema": 99}'),
}


def test_it_is_said_which_one_was_passed_over_and_why(folder, tmp_path, monkeypatch, caplog):
    file = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(file))
    saved = of(folder)
    uris = [save(saved, step) for step in (10, 20, 30)]
    for uri in uris[1:]:
        flip_a_bit(storage.local_path(uri) / DATA)
    of(folder).newest()
    passed = [each for each in events.read(file) if isinstance(each, CheckpointPassedOver)]
    assert [each.uri for each in passed] == [uris[2], uris[1]]
    assert all(f"{DATA} has crc32c" in each.reason for each in passed)
    assert f"skipped {uris[2]}: " in caplog.text
    made = [each for each in events.read(file) if isinstance(each, CheckpointPublished)]
    assert [(each.uri, each.global_step) for each in made] == [
        *zip(uris, (10, 20, 30), strict=True)
    ]


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_one_is_passed_over_and_replaced_when_its_step_comes_again(folder, what):
    saved = of(folder)
    for step in (10, 20):
        save(saved, step)
    DAMAGES[what](folder / "step-00000020")
    resumed = of(folder)
    found = resumed.newest()
    assert found.global_step == 10
    assert restored(found)["model/dense/kernel"] == [10.0] * 3
    uri = save(resumed, 20, weight=5.0)
    storage.verify(uri)
    found = of(folder).newest()
    assert found.global_step == 20
    assert restored(found)["model/dense/kernel"] == [5.0] * 3


def test_damaged_ones_ahead_push_out_nothing_that_can_be_read(folder):
    keep = 2
    saved = of(folder, keep=9)
    for step in (10, 20, 30):
        save(saved, step)
    for step in (20, 30):
        flip_a_bit(folder / f"step-{step:08d}" / DATA)
    resumed = of(folder, keep)
    assert resumed.newest().global_step == 10
    save(resumed, 15)
    assert of(folder).newest().global_step == 15
    save(resumed, 35)
    assert of(folder).newest().global_step == 35
    assert len(names(folder)) == keep


def test_all_damaged_is_a_new_beginning(folder):
    save(of(folder, keep=1), 10)
    flip_a_bit(folder / "step-00000010" / DATA)
    fresh = of(folder, keep=1)
    assert fresh.newest() is None
    save(fresh, 0)
    assert of(folder).newest().global_step == 0


def test_an_error_of_this_machine_is_no_reason_to_begin_anew(folder):
    save(of(folder), 10)
    folder.with_name("scratch").rmdir()
    folder.with_name("scratch").write_text("in the way")
    with refusal() as caught:
        of(folder).newest()
    assert "there is a file where a folder is expected" in str(caught.value)
    assert names(folder) == ["step-00000010"]


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_saved(folder, weight):
    saved = of(folder)
    uri = save(saved, 10)
    with refusal() as caught:
        save(saved, 20, weight=weight)
    assert str(caught.value) == (
        "training diverged: model/dense/kernel is not finite at global step 20; lower "
        f"training.optimizer.learning_rate or clip the gradient (the last finite checkpoint is "
        f"{uri})"
    )
    assert names(folder) == ["step-00000010"]
    with refusal() as caught:
        save(of(folder.with_name("new")), 0, weight=weight)
    assert str(caught.value).endswith("(no checkpoint was written)")


def test_a_checkpoint_of_another_model_does_not_fit(folder):
    save(of(folder), 10)
    found = of(folder).newest()
    with refusal() as caught:
        restored(found, size=4)
    assert str(caught.value).startswith(
        f"the checkpoint {found.uri} does not match the model and optimizer of the configuration ("
    )
    assert "(model/dense/kernel is float32 [3] in the checkpoint, not float32 [4])" in str(
        caught.value
    )
    with refusal() as caught:
        restore(found, {"model/other": tf.Variable(0.0)}, io_device=None)
    assert "(it has no model/other)" in str(caught.value)
    with refusal() as caught:
        restore(found, {"global_step": tf.Variable(0.0)}, io_device=None)
    assert "(global_step is int64 [] in the checkpoint, not float32 [])" in str(caught.value)


def test_a_file_over_the_limit_of_its_size_is_said_in_one_line(folder):
    saved = of(folder)
    save(saved, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with refusal() as caught:
            saved.save(variables(20, size=500_000), io_device=None, fields={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in str(caught.value)
    assert names(folder) == ["step-00000010"]
    assert names(folder.with_name("scratch")) == []


def test_a_file_in_the_way_is_said_in_one_line(folder):
    folder.with_name("scratch").write_text("in the way")
    with refusal() as caught:
        save(of(folder), 10)
    assert str(caught.value).startswith("cannot save file://")
    folder.with_name("scratch").unlink()
    folder.write_text("in the way")
    with refusal():
        save(of(folder), 10)


def test_no_attempt_resumes_with_other_data(tmp_path):
    uri = storage.uri_of(tmp_path / "checkpoints")

    def checkpoints(fingerprint):
        scratch = tmp_path / "scratch"
        return Checkpoints(uri, keep=3, scratch=scratch, fingerprint=fingerprint)

    variables = {"global_step": tf.Variable(10, dtype=tf.int64)}
    checkpoints("aa").save(variables, io_device=None, fields={})
    assert checkpoints("aa").newest().global_step == 10
    with refusal() as caught:
        checkpoints("bb").newest()
    assert "step-00000010 was trained on different data" in str(caught.value)

    def refuse(each):
        raise UserError(f"trained at step {each.fields['global_step']}")

    # A run can refuse a checkpoint itself.
    found = checkpoints("aa")
    found.require_fit = refuse
    with pytest.raises(UserError, match="trained at step 10"):
        found.newest()


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [([16, 2], [16, 1], True), ([2], [1], True), ([16, 3], [16, 1], False), (None, [1], False),
     ([2], [], False)],
)  # fmt: skip
def test_a_model_of_two_classes_with_two_outputs_is_known(there, here, says):
    assert ("task.name: classification" in advise_outputs(there, here)) == says


def test_a_table_of_before_names_its_arguments():
    here = {"model/flotilla_pieces/kernel": 1, "model/logits/kernel": 1}
    assert "pieces: 0" in advise_pieces({"model/logits/kernel": 1}, here)
    assert not advise_pieces(here, here)


SPEC = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(10,))


def model_of(name="mlp", seed=0, **args):
    return registry.build(ModelConfig(name=name, args=args), SPEC, seed)


def with_state(spec):
    return keras.Sequential(
        [
            keras.Input(spec.shape),
            keras.layers.Flatten(name="flatten"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, name="dropout"),
            keras.layers.Dense(spec.num_classes, name="logits"),
        ],
        name="with_state",
    )


@pytest.fixture
def published(tmp_path):
    def publish(model, optimizer="adam"):
        settings = OptimizerConfig(name=optimizer)
        updates = build_optimizer(TrainingConfig(optimizer=settings))
        updates.build(model.trainable_variables)
        saved = Checkpoints(storage.uri_of(tmp_path / "run"), keep=3, scratch=tmp_path / "saving")
        return saved.save(checkpoint_variables(model, updates), io_device=None, fields={})

    return publish


def weights(model):
    return {variable.path: variable.numpy() for variable in model.variables}


@pytest.mark.parametrize(("name", "optimizer"), [("softmax", "muon"), ("cnn", "sgd")])
def test_a_model_gets_its_weights_back(published, tmp_path, name, optimizer):
    trained = model_of(name, seed=1)
    uri = published(trained, optimizer)
    model = model_of(name, seed=2)
    manifest = restore_model(uri, model, tmp_path / "scratch")
    assert manifest.fields["global_step"] == 0
    expected = weights(trained)
    assert weights(model).keys() == expected.keys()
    for path, value in weights(model).items():
        np.testing.assert_array_equal(value, expected[path])


def test_state_comes_back_as_well_as_weights(published, tmp_path):
    registry.reset_uids()
    trained = with_state(SPEC)
    for number, variable in enumerate(trained.variables):
        variable.assign(tf.cast(tf.fill(variable.shape, number + 1), variable.dtype))
    uri = published(trained)
    registry.reset_uids()
    model = with_state(SPEC)
    restore_model(uri, model, tmp_path / "scratch")
    (storage.local_path(uri) / "variables.index").write_bytes(b"")
    with pytest.raises(UserError, match=r"is damaged: variables\.index has 0 bytes"):
        restore_model(uri, model, tmp_path / "another")
    found = weights(model)
    assert any("moving_variance" in path for path in found)
    assert any("seed" in path for path in found)
    for path, value in weights(trained).items():
        np.testing.assert_array_equal(found[path], value)


def test_it_may_be_read_again_into_the_same_folder(published, tmp_path):
    first = published(model_of(seed=1))
    (tmp_path / "run").rename(tmp_path / "first")
    first = first.replace("/run/", "/first/")
    second = published(model_of(seed=2))
    model = model_of(seed=3)
    for uri, seed in ((first, 1), (second, 2), (first, 1)):
        restore_model(uri, model, tmp_path / "scratch")
        np.testing.assert_array_equal(model.get_weights()[0], model_of(seed=seed).get_weights()[0])


def test_what_is_no_checkpoint_of_the_model_is_refused(published, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    uri = storage.uri_of(tmp_path / "data")
    storage.publish(source, uri, kind="dataset")
    absent, other = storage.uri_of(tmp_path / "absent"), published(model_of(hidden_units=[50]))
    for each, said in (
        (uri, f"{uri} is a dataset, not a checkpoint"),
        (absent, "is not published"),
        (other, f"the checkpoint {other} does not match the model and optimizer of the conf"),
    ):
        with pytest.raises(UserError, match=said):
            restore_model(each, model_of(), tmp_path / "scratch")


@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.5, 0.0)])
def test_seeds_may_be_there_or_not(published, tmp_path, shares):
    trained, model = (model_of(seed=n, dropout=each) for n, each in enumerate(shares))
    restore_model(published(trained), model, tmp_path / "scratch")
    for left, right in zip(model.trainable_variables, trained.trainable_variables, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())
