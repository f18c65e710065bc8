"""Checkpoints that hold the rows that changed since a whole one."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.checkpoints import by_parts
from tests.trainer.checkpoints.by_parts import ON_FIRST, two_servers, variables
from trainer import storage
from trainer.checkpoints.checkpoints import fetch, restore
from trainer.checkpoints.contents import contents
from trainer.errors import UserError

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


def test_a_base_stays_as_long_as_a_difference_names_it(run):
    made, held = run
    assert storage.names(made.uri) == [f"step-000000{step}" for step in (10, 20, 30)]
    move(held, list(range(600)), 4.0)
    save(made, held, 40)
    assert contents(made.uri).base == ""
    save(made, held, LAST)
    assert contents(made.uri).base == ""
    assert storage.names(made.uri) == ["step-00000040", "step-00000100"]


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
