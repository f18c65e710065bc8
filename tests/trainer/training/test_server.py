"""Tests the tasks of workers and parameter servers."""

import errno
import os
from pathlib import Path

import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import part_server
from flotilla.trainer.checkpoints.part_server import READY, REQUESTS, PartServer
from flotilla.trainer.cluster import loopback
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.features.dataset_spec import KIND, SCHEMA, DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.strategies import parameter_server
from flotilla.trainer.training import server
from flotilla.trainer.training.server import NUMBER_FILE, stage_input
from tests.trainer.objectives import NO_ROLES


class Serves(Exception):  # noqa: N818
    """Raised when TensorFlow's server is created."""


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Return a function that runs `serve`, and calls `look` when the server would start."""

    def called(look):
        parts, seen = PartServer(tmp_path, "ps-0"), []

        def serves(*_, **__):
            seen.append(look())
            raise Serves

        monkeypatch.setattr(server, "PartServer", lambda *_: parts)
        monkeypatch.setattr(tf.distribute, "Server", serves)
        monkeypatch.setattr(loopback, "close_to_others", lambda _: None)
        job = Job(config=Config(), workdir=tmp_path, dataset="", checkpoints="")
        cluster = Cluster(addresses={"chief": ("c:1",), "worker": ("w:1",), "ps": ("p:1",)})
        try:
            with pytest.raises(Serves):
                server.serve(job, cluster, Task(role="ps", index=0))
        finally:
            parts.stop()
        return seen

    monkeypatch.chdir(tmp_path)
    return called


def test_a_server_cleans_its_folder_before_the_chief_reaches_it(tmp_path, serve):
    left = tmp_path / REQUESTS / "of-another-process.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    assert serve(lambda: (Path(READY).exists(), left.exists())) == [(True, False)]
    assert Path.cwd() == tmp_path


def test_graphs_do_not_find_what_is_left_where_nothing_can_be_written(
    tmp_path, serve, monkeypatch, caplog
):
    left = tmp_path / READY
    left.parent.mkdir()
    left.write_text('{"task": "ps-0"}')

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(part_server.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(part_server.Path, "mkdir", refuse)
    found = serve(lambda: (left.exists(), bool(tf.io.matching_files(READY).shape[0])))
    assert found == [(True, False)]
    assert "Read-only file system" in caplog.text


SERVED = {"chief": ("a:1",), "ps": ("a:2",), "worker": ("a:3", "a:4", "a:5")}
ALONE = {"chief": ("a:1",)}
MIRRORED = {"worker": SERVED["worker"]}
ALL, SECOND = (0, 1, 2), (1,)


def published(folder, shards):
    """Publish a dataset with these numbers of shards; the tests do not read their content."""
    fields = {
        "dataset_schema": SCHEMA,
        "block_rows": 512,
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
    """Return a function that stages the input of a task and returns its working folder."""

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
    ("addresses", "task", "given", "part"),
    [
        (SERVED, ("worker", 1), {}, SECOND),
        (SERVED, ("worker", 1), {"partition": "reshuffle"}, ALL),
        (MIRRORED, ("worker", 1), {}, SECOND),
        (ALONE, ("chief", 0), {}, ALL),
        (SERVED, ("chief", 0), {"in_process": True}, ALL),
    ],
)
def test_who_trains_has_its_part_and_all_that_is_measured(staged, addresses, task, given, part):
    folder = staged(addresses, *task, **given)
    assert numbers(folder / "shards") == part
    assert numbers(folder / "validation") == (0, 1)


@pytest.mark.parametrize("role", ["chief", "ps"])
def test_who_trains_nothing_has_nothing(staged, role):
    folder = staged(SERVED, role)
    assert not list(folder.glob("shards")) + list(folder.glob("validation"))


def test_a_dataset_without_validation_is_trained_on_and_a_graph_can_read_whose_folder_it_is(staged):
    folder = staged(SERVED, "worker", 2, shards={"train": 3})
    assert numbers(folder / "shards") == (2,)
    assert not (folder / "validation").exists()
    assert (folder / NUMBER_FILE).read_text(encoding="utf-8") == "2"
    assert parameter_server.NUMBER_FILE == NUMBER_FILE
