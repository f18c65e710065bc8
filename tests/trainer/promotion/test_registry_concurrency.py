"""Tests the registry with writers that promote and register at the same time."""

import threading
from functools import partial
from typing import Any

import pytest

from flotilla.trainer import storage
from flotilla.trainer.promotion import registry
from tests.stores.fixtures import bucket_name
from tests.trainer.promotion.test_registry import (
    LINEAGE,
    NAME,
    check,
    exported,
    promote,
    promote_all,
    register,
    together,
)

BUCKETS = ["gs", "s3", "gs unconditional", "s3 unconditional"]


def store(request):
    scheme, _, unconditional = request.param.partition(" ")
    server = request.getfixturevalue("gcs" if scheme == "gs" else "s3")
    bucket = bucket_name()
    server.create_bucket(bucket)
    server.plan.unconditional = bool(unconditional)
    options = "?region=us-east-1" if scheme == "s3" else ""
    yield f"{scheme}://{bucket}/store_root{options}", server.plan
    server.plan.unconditional, server.plan.before = False, None


# These tests take half a minute with the S3 stand-in, and three seconds with the GCS stand-in.
bucket = pytest.fixture(
    store,
    params=[
        pytest.param(each, marks=pytest.mark.slow if each.startswith("s3") else ())
        for each in BUCKETS
    ],
)


@pytest.fixture(params=["file", *BUCKETS])
def store_root(request, tmp_path):
    if request.param == "file":
        yield storage.uri_of(tmp_path / "root")
        return
    yield from (uri for uri, _ in store(request))


@pytest.mark.slow
def test_two_promotions_at_once_leave_one_champion_and_both_know_it(store_root, tmp_path):
    for text in "abc":
        register(store_root, tmp_path, text)
    promote(store_root, 1, after=0)
    ends = together(
        lambda: promote(store_root, 2, after=1, by="run x"),
        lambda: promote(store_root, 3, after=1, by="run y"),
    )
    check(store_root, ends)


@pytest.mark.slow
def test_a_promotion_and_a_rollback_at_once(store_root, tmp_path):
    promote_all(store_root, tmp_path, "ab")
    register(store_root, tmp_path, "c")
    ends = together(
        lambda: promote(store_root, 3, after=2, by="run x"),
        lambda: registry.rollback(store_root, NAME, by="me"),
    )
    if all(isinstance(end, registry.Promotion) for end in ends):
        # If the first promotion ended before the second began to read, both succeed.
        ends = [max(ends, key=lambda end: end.number)]
    check(store_root, ends)


@pytest.mark.slow
def test_two_registrations_at_once_have_versions_of_their_own(store_root, tmp_path):
    models = {}
    for text in "abcd":
        (tmp_path / text).mkdir()
        models[text] = exported(tmp_path / text, text)
    act = partial(registry.register, store_root, NAME, lineage=LINEAGE)
    made = together(*(partial(act, models[text], scratch=tmp_path / text) for text in "abcd"))
    assert sorted(each.number for each in made) == [1, 2, 3, 4]
    for text, each in zip("abcd", made, strict=True):
        served = each.manifest.fields["saved_model"]
        assert storage.read_file(each.uri, f"{served}/saved_model.pb").decode() == text
        assert storage.verify(each.uri).fields["source"]["uri"] == models[text]


@pytest.mark.slow
def test_the_same_model_registered_twice_at_once_is_one_version(store_root, tmp_path):
    model = exported(tmp_path)
    act = partial(registry.register, store_root, NAME, model, lineage=LINEAGE, scratch=tmp_path)
    assert {each.number for each in together(act, act, act)} == {1}
    assert len(registry.versions(store_root, NAME)) == 1


@pytest.mark.long
def test_whenever_another_comes_between_one_wins(bucket, tmp_path):
    store_root, plan = bucket
    for text in "ab":
        register(store_root, tmp_path, text)
    at = 0
    while raced(store_root, plan, at):
        at += 1
    assert at > 8, "there was much to come between"


def raced(store_root, plan, at):
    """Promote while another client promotes before request `at`; return whether it did."""
    after = registry.newest(store_root, NAME)
    own, requests = threading.Lock(), iter(range(10_000))
    ends: list[Any] = []

    def between(_request):
        if own.acquire(blocking=False):
            try:
                if next(requests) == at:
                    ends.extend(together(lambda: promote(store_root, 2, after=after, by="run y")))
            finally:
                own.release()

    plan.before = between
    mine = together(lambda: promote(store_root, 1, after=after, by="run x"))
    plan.before = None
    check(store_root, ends + mine)
    return bool(ends)
