"""Tests the references to a bundle from runs, including resumed ones, and from schedules."""

import pytest

from flotilla.trainer import storage
from flotilla.trainer.code import bundle
from tests.trainer.code.referred import referred


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


def names(*letters):
    return {letter * 64 for letter in letters}


def uri(root, letter):
    return storage.join(root, "code", letter * 64)


def test_runs_and_schedules_refer_to_bundles(root):
    assert referred(root) == set()
    bundle.note_run(root, "digits-1", uri(root, "a"))
    bundle.note_run(root, "digits-1", uri(root, "a"))
    bundle.note_run(root, "digits-1", uri(root, "b"))
    bundle.note_schedule(uri(root, "c"), "nightly")
    bundle.note_schedule(uri(root, "c"), "weekly")
    assert referred(root) == names("a", "b", "c")
    bundle.forget_schedule(uri(root, "c"), "nightly")
    bundle.forget_schedule(uri(root, "c"), "never was")
    assert referred(root) == names("a", "b", "c")
    bundle.forget_schedule(uri(root, "c"), "weekly")
    assert referred(root) == names("a", "b")


def test_a_damaged_note_hides_no_other(root):
    bundle.note_run(root, "digits-1", uri(root, "a"))
    storage.write_bytes(storage.join(root, "digits-2", "code.json"), b"{")
    assert referred(root) == names("a")


def test_it_is_the_same_in_a_bucket(s3):
    s3.create_bucket("bundles-noted")
    root = "s3://bundles-noted/r"
    bundle.note_run(root, "digits-1", uri(root, "a"))
    bundle.note_schedule(uri(root, "c"), "nightly")
    assert referred(root) == names("a", "c")
    bundle.forget_schedule(uri(root, "c"), "nightly")
    assert referred(root) == names("a")
