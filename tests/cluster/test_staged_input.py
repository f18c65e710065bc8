"""Tests that the workers read each training example as often as they should."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from flotilla.trainer import storage
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.data.read import evaluation_batches, training_batches
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.training.server import PATTERN, stage_input

BATCH = 16


def staged(dataset: str, folder: Path, workers: int, partition: str = "disjoint") -> list[Path]:
    """Stage the examples of every worker; return the workers' folders."""
    cluster = Cluster(addresses={"worker": tuple(f"host-{i}:1" for i in range(workers))})
    config = parse_config({"data": {"partition": partition}, "cluster": {"workers": workers}})
    folders = [folder / f"worker-{index}" for index in range(workers)]
    for index, workdir in enumerate(folders):
        workdir.mkdir()
        job = Job(config=config, dataset=dataset, checkpoints="file:///none", workdir=workdir)
        stage_input(job, cluster, Task(role="worker", index=index))
    return folders


def drawn(spec: DatasetSpec, count: int, seed: int = 0) -> list[tuple[bytes, int]]:
    """Return the first examples that training reads from the working folder, in order."""
    batches = training_batches(spec, PATTERN, batch_size=BATCH, seed=seed)
    return [
        (image.tobytes(), int(label))
        for image, label in batches.unbatch().take(count).as_numpy_iterator()
    ]


def shares(spec: DatasetSpec, workers: int) -> list[int]:
    shards = spec.shards["train"]
    return [sum(shards[index::workers]) for index in range(workers)]


@dataclass(frozen=True)
class Whole:
    uri: str
    spec: DatasetSpec
    examples: Counter[tuple[bytes, int]]


@pytest.fixture(scope="module")
def whole(dataset) -> Whole:
    spec = DatasetSpec.from_manifest(storage.read_manifest(dataset))
    files = [storage.local_path(dataset) / name for name in spec.files("train")]
    batches = evaluation_batches(spec, files, batch_size=BATCH).unbatch()
    examples = ((image.tobytes(), int(label)) for image, label in batches.as_numpy_iterator())
    return Whole(dataset, spec, Counter(examples))


@pytest.mark.parametrize("workers", [1, 3])
def test_an_epoch_of_all_workers_is_every_example_once(whole, tmp_path, monkeypatch, workers):
    seen: Counter[tuple[bytes, int]] = Counter()
    folders = staged(whole.uri, tmp_path, workers)
    for folder, count in zip(folders, shares(whole.spec, workers), strict=True):
        monkeypatch.chdir(folder)
        examples = drawn(whole.spec, 2 * count)
        first, second = examples[:count], examples[count:]
        assert Counter(first) == Counter(second)
        assert first != second
        seen.update(first)
    assert seen == whole.examples


def test_with_reshuffle_every_worker_sees_everything_in_an_order_of_its_own(
    whole, tmp_path, monkeypatch
):
    orders = []
    for index, folder in enumerate(staged(whole.uri, tmp_path, 2, "reshuffle")):
        monkeypatch.chdir(folder)
        orders.append(drawn(whole.spec, whole.examples.total(), seed=index))
    assert Counter(orders[0]) == Counter(orders[1]) == whole.examples
    assert orders[0] != orders[1]
