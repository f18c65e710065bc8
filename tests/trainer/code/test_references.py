"""What refers to a bundle: runs, also resumed ones, and schedules."""

from __future__ import annotations

import pytest

from trainer import storage
from trainer.code import references


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


def names(*letters):
    return {letter * 64 for letter in letters}


def uri(root, letter):
    return storage.join(root, "code", letter * 64)


def test_runs_and_schedules_refer_to_bundles(root):
    assert references.referred(root) == set()
    references.of_run(root, "digits-1", uri(root, "a"))
    references.of_run(root, "digits-1", uri(root, "a"))
    references.of_run(root, "digits-1", uri(root, "b"))
    references.of_schedule(uri(root, "c"), "nightly")
    references.of_schedule(uri(root, "c"), "weekly")
    assert references.referred(root) == names("a", "b", "c")
    references.forget_schedule(uri(root, "c"), "nightly")
    references.forget_schedule(uri(root, "c"), "never was")
    assert references.referred(root) == names("a", "b", "c")
    references.forget_schedule(uri(root, "c"), "weekly")
    assert references.referred(root) == names("a", "b")


def test_a_damaged_note_hides_no_other(root):
    references.of_run(root, "digits-1", uri(root, "a"))
    storage.write_bytes(storage.join(root, "digits-2", "code.json"), b"{")
    assert references.referred(root) == names("a")


def test_it_is_the_same_in_a_bucket(s3):
    s3.create_bucket("bundles-noted")
    root = "s3://bundles-noted/r"
    references.of_run(root, "digits-1", uri(root, "a"))
    references.of_schedule(uri(root, "c"), "nightly")
    assert references.referred(root) == names("a", "c")
    references.forget_schedule(uri(root, "c"), "nightly")
    assert references.referred(root) == names("a")
