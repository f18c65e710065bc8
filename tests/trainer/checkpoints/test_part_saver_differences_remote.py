"""Differences in an object store: each server uploads and fetches the rows of its own."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tests.stores.faults import Fault
from tests.trainer.checkpoints.by_parts import ON_FIRST, in_bucket, two_servers, variables
from trainer import storage
from trainer.checkpoints import bases
from trainer.checkpoints.checkpoints import fetch, restore
from trainer.checkpoints.contents import contents

__all__ = ["in_bucket", "two_servers"]


@pytest.fixture
def of(in_bucket):
    """Make the checkpoints of an attempt of the chief, which may be differences."""
    return partial(in_bucket, share=0.5, last_step=100)


@pytest.fixture
def run(of):
    """A base at 10, and a difference of it at 20."""
    made, held = of(), variables(10)
    for step in (10, 20):
        held["global_step"].assign(step)
        held[ON_FIRST].scatter_update(tf.IndexedSlices(tf.fill([1, 4], float(step)), [step]))
        with made.flushed():
            made.save(held, io_device=None, fields={})
    return made, held


def left(tmp_path):
    """Return the files of parts with the servers, but for answers that are read."""
    found = (tmp_path / "servers/parts").rglob("*.*")
    return [each.name for each in found if each.parent.name != "replies"]


@pytest.mark.parametrize("where", ["on the servers", "by the chief", "in one process"])
def test_it_is_restored_exactly(run, of, tmp_path, two_servers, where):
    made, held = run
    assert contents(made.uri).base == storage.join(made.uri, "step-00000010")
    assert left(tmp_path) == ["ready.json"]
    found = fetch(made.last, tmp_path / "one") if where == "in one process" else of("new").newest()
    if found.apart:
        # The chief has what is not data, of both.
        names = sorted(each.name for each in found.folder.rglob("*") if each.is_file())
        assert names == ["variables.index", "variables.index"]
    two_servers._are_ready = where == "on the servers"
    fresh = variables(0, 0.0)
    restore(found, fresh, io_device=None, servers=two_servers)
    for path, value in held.items():
        np.testing.assert_array_equal(fresh[path], value)
    assert left(tmp_path) == ["ready.json"]


def test_a_part_of_the_base_that_is_gone_makes_it_damaged(run, of, caplog):
    made, _ = run
    storage.delete(storage.join(made.uri, "step-00000010", "variables.data-00000-of-00002"))
    assert of("new").newest() is None
    assert "passed over" in caplog.text
    assert "step-00000010 is damaged: variables.data-00000-of-00002 is missing" in caplog.text


def test_an_upload_that_fails_is_tried_again_and_nothing_half_made_is_read(run, of, gcs):
    made, held = run
    held["global_step"].assign(30)
    with made.flushed():
        gcs.plan.add(Fault(503, path="variables", times=2))
        made.save(held, io_device=None, fields={})
    found = of("new").newest()
    assert found.global_step == 30
    assert storage.name_of(bases.uri_of(found.uri, found.fields)) == "step-00000010"
