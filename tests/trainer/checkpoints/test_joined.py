"""A checkpoint of what is left: only what the lost servers held is older."""

from __future__ import annotations

import resource
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf

from tests.stores.fixtures import bucket_name
from tests.trainer.checkpoints.by_parts import (
    ON_FIRST,
    number,
    opened,
    saved,
    two_servers,
    variables,
)
from trainer import storage
from trainer.checkpoints import joined
from trainer.checkpoints.checkpoints import restore
from trainer.checkpoints.contents import RECOVERED, contents, older_of
from trainer.checkpoints.remote import checkpoints_of
from trainer.checkpoints.snapshots import Copied
from trainer.errors import ClusterLostError, UserError

__all__ = ["two_servers"]

ON_SECOND = {"model/dense/kernel", "optimizer/m"}


@pytest.fixture
def by_name(two_servers, monkeypatch):
    """Return servers that are told apart by the names of their variables."""
    made = joined._like

    def like(variable, server, io_device):
        stand_in = made(variable, server, io_device)
        return tf.Variable(stand_in, trainable=False, name=f"on-{server or 0}")

    monkeypatch.setattr(joined, "server_of", number)
    monkeypatch.setattr(joined, "server_device", lambda _: "/CPU:0")
    monkeypatch.setattr(joined, "_like", like)
    return two_servers


@pytest.fixture(params=[False, True], ids=["chief", "parts"])
def writers(request, by_name):
    """Return the servers where they write what they hold, None where the chief does."""
    return by_name if request.param else None


def save(made, held, lost, *, read_step=25, copies=None):
    return joined.save(
        made,
        held,
        lost,
        io_device=None,
        fields={"strategy": "async"},
        read_step=read_step,
        copies=copies,
    )


def copied(step, value, server=1, *, on=0, age=0.75):
    """Return the copy of a server's variables, as a snapshot has it on another task."""
    own = {
        path: tf.Variable(each.read_value(), trainable=False, name=f"on-{on}")
        for path, each in variables(step, value).items()
        if number(each) == server
    }
    return Copied(global_step=step, age=age, variables=own)


def values(made):
    """Return what the newest checkpoint has, and the fields of its manifest."""
    found, fresh = made.newest(), variables(0, 0.0)
    restore(found, fresh, io_device=None, servers=made.servers)
    return {path: each.numpy() for path, each in fresh.items()}, found.fields


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_lost_server_held_goes_back_and_nothing_else(tmp_path, writers, lost):
    made = saved(tmp_path, writers, variables(10, 1.0))
    done = save(made, variables(30, 3.0), {lost})
    # The counter was on the first server: what was read last counts.
    reached = 30 if lost else 25
    assert (done.global_step, done.back_to) == (reached, 10)
    went_back = ON_SECOND if lost else {ON_FIRST, "global_step"}
    found, fields = values(opened(tmp_path, writers))
    assert found.pop("global_step") == reached
    for path, value in found.items():
        np.testing.assert_array_equal(
            value, np.full(value.shape, 1.0 if path in went_back else 3.0)
        )
    # The counter does not go back.
    older = {"global_step": 10, "variables": sorted(went_back - {"global_step"})}
    assert fields[RECOVERED] == {f"ps-{lost}": older}
    assert contents(made.uri).global_step == reached
    storage.verify(done.uri)


@pytest.mark.parametrize("lost", [0, 1])
def test_what_was_copied_goes_back_to_the_snapshot(tmp_path, writers, lost):
    made = saved(tmp_path, writers, variables(10, 1.0))
    copies = {lost: copied(20, 2.0, lost, on=1 - lost)}
    done = save(made, variables(30, 3.0), {lost}, copies=copies)
    reached = 30 if lost else 25
    assert (done.global_step, done.back_to, done.age) == (reached, 20, 0.75)
    went_back = ON_SECOND if lost else {ON_FIRST}
    found, fields = values(opened(tmp_path, writers))
    assert found.pop("global_step") == reached
    for path, value in found.items():
        np.testing.assert_array_equal(
            value, np.full(value.shape, 2.0 if path in went_back else 3.0)
        )
    older = {"global_step": 20, "variables": sorted(went_back), "age": 0.75}
    assert fields[RECOVERED] == {f"ps-{lost}": older}
    assert older_of(fields)[f"ps-{lost}"].age == 0.75


def test_a_checkpoint_that_is_as_new_as_the_snapshot_is_taken(tmp_path, writers):
    made = saved(tmp_path, writers, variables(20, 1.0))
    done = save(made, variables(30, 3.0), {1}, copies={1: copied(20, 2.0)})
    assert (done.back_to, done.age) == (20, 0.0)
    found, fields = values(opened(tmp_path, writers))
    assert found["optimizer/m"][0, 0] == 1.0
    assert "age" not in fields[RECOVERED]["ps-1"]


def test_of_two_servers_only_the_one_with_a_copy_goes_back_to_it(tmp_path, writers):
    # Of three servers one is left.
    held = {**variables(10, 3.0), "model/bias": tf.Variable(3.0, name="on-2")}
    made = saved(tmp_path, writers, held)
    for path, each in held.items():
        if path != "global_step":
            each.assign(tf.fill(each.shape, 5.0))
    copies = {1: copied(20, 2.0, on=2)}
    done = save(made, held, {0, 1}, read_step=30, copies=copies)
    # What is said is of the oldest values.
    assert (done.global_step, done.back_to, done.age) == (30, 10, 0.0)
    fields = storage.verify(done.uri).fields
    steps = {server: each["global_step"] for server, each in fields[RECOVERED].items()}
    assert steps == {"ps-0": 10, "ps-1": 20}
    fresh = {
        path: tf.Variable(tf.zeros_like(each), name=each.name[:4]) for path, each in held.items()
    }
    again = opened(tmp_path, writers)
    restore(again.newest(), fresh, io_device=None, servers=again.servers)
    found = {path: float(tf.reshape(each, [-1])[0]) for path, each in fresh.items()}
    assert found.pop("global_step") == 30
    assert found == {ON_FIRST: 3.0, "model/bias": 5.0, **dict.fromkeys(ON_SECOND, 2.0)}


def test_where_all_are_lost_and_were_copied_training_goes_back_to_the_snapshot(tmp_path, writers):
    made = saved(tmp_path, writers, variables(10, 1.0))
    copies = {server: copied(20, 2.0, server) for server in (0, 1)}
    if writers:
        # On the chief, as no server is left to write.
        made.by_parts(writers, 1 << 40)
    done = save(made, variables(30, 3.0), {0, 1}, copies=copies)
    assert (done.global_step, done.back_to, done.age) == (20, 20, 0.75)
    found, _ = values(opened(tmp_path, None))
    assert found.pop("global_step") == 20
    assert {float(each[0, 0]) for each in found.values()} == {2.0}


def test_where_all_are_lost_and_one_was_not_copied_nothing_is_saved(tmp_path, writers):
    made = saved(tmp_path, writers, variables(10, 1.0))
    with pytest.raises(joined.NothingSavedError, match="no server is left"):
        save(made, variables(30, 3.0), {0, 1}, copies={1: copied(20, 2.0)})
    assert storage.names(made.uri) == ["step-00000010"]


@pytest.mark.parametrize(("lost", "back_to"), [({1}, 10), ({0}, 25), ({0, 1}, 10)])
def test_what_is_lost_again_is_of_the_step_it_went_back_to_before(tmp_path, writers, lost, back_to):
    # Of three servers one is left.
    held = {**variables(25, 3.0), "model/bias": tf.Variable(3.0, name="on-2")}
    made = saved(tmp_path, writers, {**held, "global_step": tf.Variable(10, name="on-0")})
    save(made, held, {1})
    held["global_step"].assign(40)
    done = save(made, held, lost, read_step=40)
    assert done.back_to == back_to
    older = storage.verify(done.uri).fields[RECOVERED]
    expected = {
        "ps-0": {"global_step": 25, "variables": [ON_FIRST]},
        "ps-1": {"global_step": 10, "variables": sorted(ON_SECOND)},
    }
    assert older == {f"ps-{each}": expected[f"ps-{each}"] for each in lost}


@pytest.mark.usefixtures("by_name")
def test_an_upload_that_ends_meanwhile_hides_no_checkpoint(gcs, tmp_path, monkeypatch):
    bucket, free = bucket_name(), threading.Event()
    gcs.create_bucket(bucket)
    made = checkpoints_of(f"gs://{bucket}/run/checkpoints", keep=2, scratch=tmp_path, alone=True)
    listed, flush = made._candidates, made.uploads.flush

    def flushed():
        free.set()
        flush()

    def candidates():
        found = listed()
        flushed()
        return found

    monkeypatch.setattr(made.uploads, "flush", flushed)
    with made.flushed():
        made.save(variables(10), io_device=None, fields={})
    upload = made._upload
    monkeypatch.setattr(made, "_upload", lambda name: free.wait(60) and upload(name))
    free.clear()
    made.save(variables(20), io_device=None, fields={})
    monkeypatch.setattr(made, "_candidates", candidates)
    done = save(made, variables(30), {1})
    assert (done.global_step, done.back_to) == (30, 20)
    made.flush()


def test_without_an_earlier_checkpoint_nothing_is_saved(tmp_path, writers):
    with pytest.raises(joined.NothingSavedError, match="no checkpoint"):
        save(opened(tmp_path, writers), variables(30), {1})
    assert not (tmp_path / "checkpoints").exists()


def test_without_a_step_since_nothing_is_saved(tmp_path, writers):
    made = saved(tmp_path, writers, variables(10))
    with pytest.raises(joined.NothingSavedError, match="no step"):
        save(made, variables(30), {0}, read_step=10)
    assert storage.names(made.uri) == ["step-00000010"]


def test_a_checkpoint_of_other_shapes_does_not_fit(tmp_path, writers):
    made = saved(tmp_path, writers, variables(10, **{"optimizer/m": [5, 2]}))
    with pytest.raises(UserError, match="does not fit"):
        save(made, variables(30), {1})
    assert storage.names(made.uri) == ["step-00000010"]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, writers):
    made = saved(tmp_path, writers, variables(10, 1.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot (write|fetch)"):
            save(made, variables(30, 3.0), {1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found, fields = values(opened(tmp_path, writers))
    assert (found["global_step"], found[ON_FIRST][0, 0]) == (10, 1.0)
    assert RECOVERED not in fields


def test_values_that_are_not_finite_are_not_saved(tmp_path, writers):
    made = saved(tmp_path, writers, variables(10, 1.0))
    with pytest.raises(UserError, match="not finite"):
        save(made, variables(30, float("nan")), {1})
    assert storage.names(made.uri) == ["step-00000010"]


def test_a_save_that_the_lost_server_failed_is_given_up(tmp_path, by_name):
    made = saved(tmp_path, by_name, variables(10, 1.0))
    made.parts._failure = ClusterLostError("ps-1 is gone")
    # It is not the step that it seems to have saved.
    made.last = made.uri_of(variables(30))
    done = save(made, variables(30, 3.0), {1})
    assert storage.names(made.uri) == ["step-00000010", "step-00000030"]
    assert storage.verify(done.uri).fields[RECOVERED]["ps-1"]["global_step"] == 10


def test_what_was_copied_is_saved_at_the_step_of_a_save_that_is_not_published(tmp_path, writers):
    made = saved(tmp_path, writers, variables(10, 1.0))
    made.last = made.uri_of(variables(30))
    done = save(made, variables(30, 3.0), {1}, copies={1: copied(20, 2.0)})
    assert storage.names(made.uri) == ["step-00000010", "step-00000030"]
    assert storage.verify(done.uri).fields[RECOVERED]["ps-1"]["global_step"] == 20


class Held:
    """A variable whose server answers, does not have it, or is silent."""

    shape = tf.TensorShape([1])

    def __init__(self, read):
        self.read_value = read


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr(joined, "operating_on", lambda _: nullcontext())
    return lambda *reads: {server: {"w": Held(read)} for server, read in enumerate(reads)}


def test_who_does_not_have_the_values_is_lost(held):
    def gone():
        raise tf.errors.NotFoundError(None, None, "restarted")

    assert joined.lost_of(held(lambda: tf.constant(1.0), gone), 60) == {1}


def test_who_is_silent_is_lost(held):
    again = threading.Event()
    assert joined.lost_of(held(lambda: again.wait() and tf.constant(1.0)), 0) == {0}
    again.set()


def test_variables_are_grouped_by_their_server(monkeypatch):
    monkeypatch.setattr(joined, "server_of", lambda each: each)
    assert joined.held_by({"a": 0, "b": 1, "c": 0, "d": None}) == {0: {"a": 0, "c": 0}, 1: {"b": 1}}
