"""Checkpoints that hold the rows that changed since a whole one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.checkpoints import by_parts
from tests.trainer.checkpoints.by_parts import ON_FIRST, two_servers, variables
from trainer import storage
from trainer.checkpoints import bases, part_saver, servers
from trainer.checkpoints.checkpoints import fetch, restore
from trainer.checkpoints.contents import contents
from trainer.checkpoints.index import index_of
from trainer.errors import UserError
from trainer.models.embedding_table import EmbeddingTable

__all__ = ["two_servers"]
LAST = 100


def opened(folder, two, keep=2):
    made = by_parts.opened(folder, None)
    made._keep = keep
    made.by_parts(two, 0, share=0.5, last_step=LAST)
    return made


def save(made, held, step):
    held["global_step"].assign(step)
    with made.flushed():
        made.save(held, io_device=None, fields={})


def move(held, rows, value):
    held[ON_FIRST].scatter_update(tf.IndexedSlices(tf.fill([len(rows), 4], value), rows))


def values(held):
    return {path: each.numpy().copy() for path, each in held.items()}


@pytest.fixture
def run(tmp_path, two_servers):
    """A base at 10, and differences of it at 20 and 30."""
    held, made = variables(10), opened(tmp_path, two_servers)
    save(made, held, 10)
    move(held, [3, 999], 2.0)
    save(made, held, 20)
    move(held, [3, 5], 3.0)
    held["optimizer/m"].assign_add(tf.ones([4, 2]))
    save(made, held, 30)
    return made, held


def test_it_holds_what_changed_since_the_base(run):
    made, _ = run
    found = contents(made.uri)
    assert found.base == storage.join(made.uri, "step-00000010")
    assert {path: each.changed for path, each in found.variables.items()} == {
        ON_FIRST: 3,
        "global_step": None,
        "model/dense/kernel": None,
        "optimizer/m": None,
    }
    assert found.variables[ON_FIRST].bytes == 16_000
    assert found.bytes < contents(found.base).bytes / 3


@pytest.mark.parametrize("where", ["on the servers", "by the chief", "in one process"])
def test_it_is_restored_exactly(run, tmp_path, two_servers, where):
    made, held = run
    again = opened(tmp_path, two_servers)
    found = fetch(made.last, tmp_path / "one") if where == "in one process" else again.newest()
    two_servers._are_ready = where == "on the servers"
    fresh = variables(0, 0.0)
    restore(found, fresh, io_device=None, servers=two_servers)
    for path, value in values(held).items():
        np.testing.assert_array_equal(fresh[path], value)


def test_without_a_base_the_next_one_is_whole_and_a_new_base(run):
    made, held = run
    made.parts.without_base()
    for step, base in ((40, ""), (50, storage.join(made.uri, "step-00000040"))):
        move(held, [step], 5.0)
        save(made, held, step)
        assert contents(made.uri).base == base


def test_a_base_stays_as_long_as_a_difference_names_it(run):
    made, held = run
    assert storage.names(made.uri) == [f"step-000000{step}" for step in (10, 20, 30)]
    move(held, list(range(600)), 4.0)
    save(made, held, 40)
    assert contents(made.uri).base == ""
    save(made, held, LAST)
    assert contents(made.uri).base == ""
    assert storage.names(made.uri) == ["step-00000040", "step-00000100"]


def test_a_damaged_base_is_not_the_end_of_all_that_is_kept(run, tmp_path, two_servers):
    made, held = run
    move(held, list(range(600)), 4.0)
    save(made, held, 40)
    for step in (50, 60):
        move(held, [step], 5.0)
        save(made, held, step)
    assert storage.name_of(contents(made.uri).base) == "step-00000040"
    part = tmp_path / "checkpoints/step-00000040/variables.data-00001-of-00002"
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    assert opened(tmp_path, two_servers).newest().global_step == 30


def test_a_base_that_is_gone_is_one_line(run, tmp_path, two_servers, caplog):
    made, _ = run
    storage.delete(storage.join(made.uri, "step-00000010"))
    with pytest.raises(UserError, match=r"step-00000030 holds only what changed .*00010, which is"):
        fetch(made.last, tmp_path / "one")
    assert opened(tmp_path, two_servers).newest() is None
    assert "take another checkpoint" in caplog.text


def test_another_attempt_begins_with_a_base(run, tmp_path, two_servers):
    _, held = run
    again = opened(tmp_path, two_servers)
    restore(again.newest(), held, io_device=None, servers=two_servers)
    save(again, held, 40)
    assert contents(again.uri).base == ""


def assert_same(held, there):
    for path, value in values(held).items():
        # Bits: zeros have a sign.
        assert there[path].numpy().tobytes() == value.tobytes(), path


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_servers_goes_on_from_it(run, tmp_path, two_servers, monkeypatch, count):
    made, held = run
    order = sorted(held)
    fresh = variables(0, 0.0)
    places = {id(fresh[path]): order.index(path) % count for path in order}
    for module in (part_saver, servers):
        monkeypatch.setattr(module, "server_of", lambda each: places.get(id(each), 0))
    again = opened(tmp_path, two_servers)
    found = again.newest()
    assert (found.uri, found.apart) == (made.last, True)
    restore(found, fresh, io_device=None, servers=two_servers)
    assert_same(held, fresh)
    for step in (40, 50):
        move(fresh, [step], 7.0)
        save(again, fresh, step)
    last = contents(again.uri)
    assert (len(last.parts), storage.name_of(last.base)) == (count, "step-00000040")
    restore(opened(tmp_path, two_servers).newest(), held, io_device=None, servers=two_servers)
    assert_same(fresh, held)


@pytest.mark.parametrize(
    ("damaged", "resumed"),
    [
        ("step-00000060/variables.data-00000-of-00002", 40),
        ("step-00000060/variables.index", 40),
        # Of the base, without which the difference is not whole.
        ("step-00000040/variables.data-00001-of-00002", 30),
    ],
)
def test_one_that_is_torn_is_passed_over(run, tmp_path, two_servers, damaged, resumed):
    made, held = run
    made._keep = 9
    move(held, list(range(600)), 4.0)
    save(made, held, 40)
    move(held, [1], 5.0)
    save(made, held, 60)
    assert storage.name_of(contents(made.uri).base) == "step-00000040"
    path = tmp_path / "checkpoints" / damaged
    path.write_bytes(path.read_bytes()[:-40])
    found = opened(tmp_path, two_servers).newest()
    assert found.global_step == resumed
    fresh = variables(0, 0.0)
    restore(found, fresh, io_device=None, servers=two_servers)
    expected = {40: 4.0, 30: 3.0}[resumed]
    np.testing.assert_array_equal(fresh[ON_FIRST][3], np.full(4, expected))


def test_what_ends_between_its_parts_and_its_manifest_is_nothing(
    run, tmp_path, two_servers, monkeypatch
):
    made, held = run

    def killed(*_, **__):
        raise UserError("killed")

    move(held, [7], 6.0)
    monkeypatch.setattr(storage, "commit", killed)
    with pytest.raises(UserError, match="killed"):
        save(made, held, 40)
    assert opened(tmp_path, two_servers).newest().global_step == 30


def test_a_save_whose_base_was_deleted_is_whole(run, tmp_path, two_servers, caplog):
    made, held = run
    storage.delete(storage.join(made.uri, "step-00000010"))
    save(made, held, 40)
    assert "step-00000040 will be whole: its base" in caplog.text
    assert contents(made.uri).base == ""
    fresh = variables(0, 0.0)
    restore(opened(tmp_path, two_servers).newest(), fresh, io_device=None, servers=two_servers)
    assert_same(held, fresh)


def test_a_store_that_does_not_answer_is_no_deleted_base(run, monkeypatch):
    made, held = run

    def down(*_, is_there=bases.is_there):
        monkeypatch.setattr(bases, "is_there", is_there)
        raise storage.Unavailable("the store does not answer")

    monkeypatch.setattr(bases, "is_there", down)
    save(made, held, 40)
    assert storage.name_of(contents(made.uri).base) == "step-00000010"


def deletes_base(made, monkeypatch):
    """Delete the base as soon as a difference of it is about to be published."""

    def delete():
        storage.delete(storage.join(made.uri, "step-00000010"))

    monkeypatch.setattr(made, "before_publication", delete)


def test_the_last_one_is_not_given_up_in_silence(run, monkeypatch):
    made, held = run
    deletes_base(made, monkeypatch)
    with pytest.raises(UserError, match=r"step-00000040 is not published: its base .*00010 was de"):
        save(made, held, 40)
    assert storage.names(made.uri) == ["step-00000020", "step-00000030"]


def test_a_base_that_is_deleted_meanwhile_is_noticed(
    run, tmp_path, two_servers, caplog, monkeypatch
):
    made, held = run
    deletes_base(made, monkeypatch)
    held["global_step"].assign(40)
    with made.flushed():
        made.save(held, io_device=None, fields={})
        made.parts.settle()
        made.uploads.flush()
        # Training goes on: what is saved next is whole.
        held["global_step"].assign(50)
        made.save(held, io_device=None, fields={})
    assert "step-00000040 is not published: its base" in caplog.text
    assert storage.names(made.uri) == ["step-00000030", "step-00000050"]
    assert contents(made.uri).base == ""
    move(held, [1], 8.0)
    save(made, held, 60)
    assert storage.name_of(contents(made.uri).base) == "step-00000050"
    fresh = variables(0, 0.0)
    restore(opened(tmp_path, two_servers).newest(), fresh, io_device=None, servers=two_servers)
    assert_same(held, fresh)


def test_another_checkpoint_in_place_of_the_base_is_not_it(run, tmp_path, two_servers, caplog):
    made, held = run
    base = storage.join(made.uri, "step-00000010")
    folder = storage.local_path(base)
    storage.delete(base)
    other = by_parts.opened(tmp_path, None)
    held["global_step"].assign(10)
    other.save(held, io_device=None, fields={})
    assert folder.is_dir()
    assert opened(tmp_path, two_servers).newest().global_step == 10
    assert "was replaced by another one" in caplog.text


@pytest.mark.parametrize(
    "base",
    [
        {"uri": "x", "created": "y"},
        {"uri": "", "created": "y"},
        {"uri": "file:///x/..", "created": "y"},
        {"uri": "file:///x"},
        [],
        None,
    ],
)
def test_a_manifest_whose_base_is_damaged_is_passed_over(run, tmp_path, two_servers, base):
    made, _ = run
    path = storage.local_path(made.last) / "MANIFEST.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), bases.FIELD: base}))
    assert [each.global_step for each in index_of(made.uri)] == [10, 20, 30]
    assert opened(tmp_path, two_servers).newest().global_step == 20


def test_a_base_is_found_where_the_endpoint_of_a_store_is_in_its_uri():
    root = "minio://bucket/run/checkpoints/step-{}?endpoint=http://host:9000/"
    fields = {bases.FIELD: {"uri": root.format(10), "created": "y"}}
    assert bases.uri_of(root.format(20), fields) == root.format(10)


def test_zeros_with_a_sign_are_changes_and_what_is_not_finite_is_none(run, tmp_path, two_servers):
    made, held = run
    move(held, [3, 5, 999], 0.0)
    save(made, held, 40)
    move(held, [3], -0.0)
    save(made, held, 50)
    assert contents(made.uri).variables[ON_FIRST].changed == 3
    fresh = variables(0, 0.0)
    restore(opened(tmp_path, two_servers).newest(), fresh, io_device=None, servers=two_servers)
    assert_same(held, fresh)
    move(held, [3], float("nan"))
    with pytest.raises(UserError, match=r"model/table is not finite at global step 60.*00050\)"):
        save(made, held, 60)
    assert storage.names(made.uri)[-1] == "step-00000050"


@pytest.mark.usefixtures("run")
def test_another_shape_is_one_line(tmp_path, two_servers):
    for shape in ([999, 4], [1000, 5]):
        for apart in (True, False):
            two_servers._are_ready = apart
            other = variables(0, 0.0, **{ON_FIRST: shape})
            with pytest.raises(UserError, match="does not fit model and optimizer") as e:
                restore(
                    opened(tmp_path, two_servers).newest(),
                    other,
                    io_device=None,
                    servers=two_servers,
                )
            assert "\n" not in str(e.value)


def grown(held_ids):
    """Return a table with as many rows as a difference takes, and its variables by path."""
    table = EmbeddingTable(1200, 4, shards=2, min_count=2, min_age=0, initializer="uniform")
    table.build((None,))
    look_up(table, held_ids)
    look_up(table, held_ids)
    held = {f"model/{each.path}": each.value for each in table.variables}
    step = tf.Variable(10, dtype=tf.int64, name="on-0")
    return table, {**held, "global_step": step}


def look_up(table, ids, training=True):
    return table(tf.constant(ids, tf.int64), training=training).numpy()


@pytest.mark.slow
def test_a_table_that_grows_and_evicts(tmp_path, two_servers, monkeypatch):
    for module in (part_saver, servers):
        monkeypatch.setattr(module, "server_of", lambda each: int("shard_1" in each.name))
    table, held = grown(range(700))
    made = opened(tmp_path, two_servers)
    made.parts.share = 0.95
    save(made, held, 10)
    # Room for some of these; the others take the rows of ids that were not used for longest.
    for _ in range(2):
        look_up(table, range(690, 1250))
    assert table.metrics()["evicted"]
    save(made, held, 20)
    found = contents(made.uri)
    assert storage.name_of(found.base) == "step-00000010"
    rows = {path: each.changed for path, each in found.variables.items() if "_rows" in path}
    assert all(0 < each < 601 for each in rows.values())
    fresh, there = grown([])
    renamed = dict(zip(held, there.values(), strict=True))
    restore(opened(tmp_path, two_servers).newest(), renamed, io_device=None, servers=two_servers)
    fresh.restored()
    assert_same(held, renamed)
    assert fresh.metrics() == table.metrics()
    # Those that were evicted are unknown, and both go on in the same way.
    every = range(1300)
    np.testing.assert_array_equal(look_up(fresh, every, False), look_up(table, every, False))
    assert not look_up(fresh, every, False).any(axis=-1).all()
    for each in (table, fresh):
        look_up(each, range(640, 900))
    assert fresh.metrics() == table.metrics()


@pytest.mark.parametrize("where", ["on the servers", "by the chief"])
def test_a_table_begins_with_an_empty_sieve_where_there_is_none(
    tmp_path, two_servers, monkeypatch, where
):
    for module in (part_saver, servers):
        monkeypatch.setattr(module, "server_of", lambda each: int("shard_1" in each.name))
    table, held = grown(range(700))
    earlier = tf.Variable(tf.ones([4 * 600], tf.int32), name="shard_1_seen")
    kept = {path: each for path, each in held.items() if not path.endswith("_sieve")}
    save(opened(tmp_path, two_servers), {**kept, "model/shard_1_seen": earlier}, 10)
    fresh, there = grown([])
    renamed = dict(zip(held, there.values(), strict=True))
    two_servers._are_ready = where == "on the servers"
    restore(opened(tmp_path, two_servers).newest(), renamed, io_device=None, servers=two_servers)
    fresh.restored()
    assert_same(kept, {path: renamed[path] for path in kept})
    assert not any(renamed[path].numpy().any() for path in held.keys() - kept.keys())
    np.testing.assert_array_equal(look_up(fresh, range(900)), look_up(table, range(900)))
