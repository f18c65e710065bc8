"""Which shards a task brings into its working folder."""

from __future__ import annotations

import pytest

from tests.trainer.objectives import NO_ROLES
from trainer import storage
from trainer.cluster.launcher import Job
from trainer.config.load import parse_config
from trainer.data.spec import KIND, SCHEMA, DatasetSpec, FeatureSpec
from trainer.strategies import parameter_server
from trainer.topology import Cluster, Task
from trainer.training.input import NUMBER_FILE, stage_input

SERVED = {"chief": ("a:1",), "ps": ("a:2",), "worker": ("a:3", "a:4", "a:5")}
ALONE = {"chief": ("a:1",)}
MIRRORED = {"worker": SERVED["worker"]}
ALL, SECOND = (0, 1, 2), (1,)


def published(folder, shards):
    """Publish a dataset of these numbers of shards; their content is not read here."""
    fields = {
        "dataset_schema": SCHEMA,
        "splits": {split: {"shards": [1] * count} for split, count in shards.items()},
        "features": {"x": FeatureSpec(shape=(), dtype="int64", stored="int").to_json()},
        **NO_ROLES,
        "inputs": ["x"],
        "targets": ["x"],
    }
    source = folder / "source"
    source.mkdir()
    spec = DatasetSpec.from_manifest(storage.Manifest(kind=KIND, fields=fields))
    for split in shards:
        for name in spec.files(split):
            (source / name).write_text(name, encoding="utf-8")
    storage.publish(source, storage.uri_of(folder / "dataset"), kind=KIND, fields=fields)
    return storage.uri_of(folder / "dataset")


@pytest.fixture
def staged(tmp_path):
    """Stage for one task of a cluster, and return its working folder."""

    def work(addresses, role, index=0, *, shards=None, partition="disjoint", **cluster):
        dataset = published(tmp_path, shards or {"train": 3, "validation": 2})
        config = parse_config({"data": {"partition": partition}, "cluster": cluster})
        job = Job(config=config, dataset=dataset, checkpoints="", workdir=tmp_path)
        stage_input(job, Cluster(addresses=addresses), Task(role=role, index=index))
        return tmp_path

    return work


def numbers(folder):
    return tuple(int(path.name.split("-")[1]) for path in sorted(folder.glob("*.tfrecord")))


@pytest.mark.parametrize(
    ("addresses", "task", "partition", "part"),
    [
        (SERVED, ("worker", 1), "disjoint", SECOND),
        (SERVED, ("worker", 1), "reshuffle", ALL),
        (MIRRORED, ("worker", 1), "disjoint", SECOND),
        (ALONE, ("chief", 0), "disjoint", ALL),
    ],
)
def test_who_trains_has_its_part_and_all_that_is_measured(staged, addresses, task, partition, part):
    folder = staged(addresses, *task, partition=partition)
    assert numbers(folder / "shards") == part
    assert numbers(folder / "validation") == (0, 1)


@pytest.mark.parametrize("role", ["chief", "ps"])
def test_who_trains_nothing_has_nothing(staged, role):
    folder = staged(SERVED, role)
    assert not list(folder.glob("shards")) + list(folder.glob("validation"))


def test_the_one_process_of_all_servers_has_everything(staged):
    folder = staged(SERVED, "chief", in_process=True)
    assert numbers(folder / "shards") == ALL
    assert numbers(folder / "validation") == (0, 1)


def test_a_dataset_without_validation_is_trained_on(staged):
    folder = staged(SERVED, "worker", shards={"train": 3})
    assert numbers(folder / "shards") == (0,)
    assert not (folder / "validation").exists()


def test_a_graph_can_read_whose_folder_it_runs_in(staged):
    folder = staged(SERVED, "worker", 2)
    assert (folder / NUMBER_FILE).read_text(encoding="utf-8") == "2"
    assert parameter_server.NUMBER_FILE == NUMBER_FILE
