"""What a limit of the disk means for a dataset."""

from __future__ import annotations

import pytest

from tests.trainer.objectives import NO_ROLES
from trainer.config.load import parse_config
from trainer.data.shards.shard_store import AT_ONCE, order_of, part_range, streaming_of
from trainer.data.spec import KIND, SCHEMA, FeatureSpec, shard_name
from trainer.errors import ConfigError
from trainer.storage import Manifest
from trainer.storage.manifest import FileEntry

MB = 10**6


def manifest_of(train, validation=()):
    """Return the manifest of a dataset of shards of these megabytes."""
    splits = {"train": train, "validation": validation}
    return Manifest(
        kind=KIND,
        files=tuple(
            FileEntry(shard_name(split, index, len(sizes)), size * MB, "00000000")
            for split, sizes in splits.items()
            for index, size in enumerate(sizes)
        ),
        fields={
            "dataset_schema": SCHEMA,
            "splits": {split: {"shards": [1] * len(sizes)} for split, sizes in splits.items()},
            "features": {"x": FeatureSpec(shape=(), dtype="int64", stored="int").to_json()},
            **NO_ROLES,
            "inputs": ["x"],
            "targets": ["x"],
        },
    )


def found(manifest, disk, workers=1, **sections):
    sections["data"] = {"disk": disk, **sections.get("data", {})}
    return streaming_of(parse_config(sections), manifest, workers)


@pytest.mark.parametrize(
    ("disk", "workers", "partition", "streams"),
    [
        ("", 1, "disjoint", False),
        ("82MB", 1, "disjoint", False),
        ("81MB", 1, "disjoint", True),
        ("42MB", 2, "disjoint", False),
        ("41MB", 2, "disjoint", True),
        ("42MB", 2, "reshuffle", True),
    ],
)
def test_shards_stream_where_those_of_a_worker_and_the_validation_do_not_fit(
    disk, workers, partition, streams
):
    manifest = manifest_of([10] * 8, [1, 1])
    assert bool(found(manifest, disk, workers, data={"partition": partition})) is streams


@pytest.mark.parametrize(("disk", "at_once"), [("20MB", 1), ("50MB", 2), ("300MB", AT_ONCE)])
def test_as_many_shards_are_read_as_can_come_meanwhile(disk, at_once):
    streaming = found(manifest_of([10] * 100), disk)
    assert streaming.at_once == at_once
    assert (2 * at_once + 1) * 10 * MB <= streaming.limit or at_once == 1


@pytest.mark.parametrize(
    ("validation", "least"), [((), "19.0MB"), ((5,), "19.0MB"), ((12,), "22.0MB")]
)
def test_less_than_two_shards_is_one_line(validation, least):
    manifest = manifest_of([10, 9, 8, 7], validation)
    with pytest.raises(ConfigError, match=rf"data\.disk: 18MB .* {least} or more, or data\.shards"):
        found(manifest, "18MB")
    assert found(manifest, "22MB")


def test_workers_in_one_process_have_all_or_are_refused():
    manifest = manifest_of([10] * 8)
    assert found(manifest, "80MB", cluster={"in_process": True}) is None
    with pytest.raises(ConfigError, match=r"data\.disk: with cluster\.in_process"):
        found(manifest, "40MB", cluster={"in_process": True})


def test_every_epoch_has_an_order_of_its_own_that_the_seed_gives():
    names = [str(index) for index in range(20)]
    orders = [order_of(names, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == sorted(names) for order in orders)
    assert order_of(names, 1, 1) == orders[3]


@pytest.mark.parametrize("of", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("batch_size", [1, 5, 13, 100])
@pytest.mark.parametrize("shards", [(13, 11, 12), (1,), (4, 0, 9), (50, 1, 1, 1)])
def test_parts_are_whole_batches_in_a_row_and_name_the_shards_that_they_need(
    shards, batch_size, of
):
    owner = [index for index, count in enumerate(shards) for _ in range(count)]
    seen = 0
    for part in range(of):
        where = part_range(shards, batch_size, part, of)
        begin = sum(shards[: where.first]) + where.skip
        assert where.take == 0 or begin == seen
        needed = owner[seen : seen + where.take]
        if needed:
            assert (where.first, where.last - 1) == (needed[0], needed[-1])
        seen += where.take
        assert seen % batch_size == 0 or seen == len(owner)
    assert seen == len(owner)
