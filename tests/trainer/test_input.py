"""Which shards a task brings into its working folder."""

from __future__ import annotations

import pytest

from trainer import input as module
from trainer.cluster import Cluster, Task
from trainer.config_file import parse
from trainer.input import NAME_FILE, NUMBER_FILE, stage_input
from trainer.launcher import Job
from trainer.strategies import tally

SERVED = {"chief": ("a:1",), "ps": ("a:2",), "worker": ("a:3", "a:4", "a:5")}
ALONE = {"chief": ("a:1",)}
MIRRORED = {"worker": SERVED["worker"]}
ALL, SECOND = (0, 1), (1, 3)


@pytest.fixture
def staged(monkeypatch, tmp_path):
    """Tell which part of how many a task asks for; None where it asks for nothing."""

    def part(addresses, role, index=0, partition="disjoint", **cluster):
        asked = []

        def remember(dataset, folder, split, *, index, of):
            assert (dataset, folder, split) == ("file:///data", tmp_path / "shards", "train")
            asked.append((index, of))

        monkeypatch.setattr(module, "stage_shards", remember)
        config = parse({"data": {"partition": partition}, "cluster": cluster})
        job = Job(config=config, dataset="file:///data", checkpoints="", workdir=tmp_path)
        stage_input(job, Cluster(addresses=addresses), Task(role=role, index=index))
        return asked[0] if asked else None

    return part


@pytest.mark.parametrize(
    ("addresses", "task", "partition", "part"),
    [
        (SERVED, ("worker", 1), "disjoint", SECOND),
        (SERVED, ("worker", 1), "reshuffle", ALL),
        (MIRRORED, ("worker", 1), "disjoint", SECOND),
        (ALONE, ("chief", 0), "disjoint", ALL),
        (SERVED, ("chief", 0), "disjoint", None),
        (SERVED, ("ps", 0), "disjoint", None),
    ],
)
def test_who_trains_has_its_part(staged, addresses, task, partition, part):
    assert staged(addresses, *task, partition) == part


def test_the_one_process_of_all_servers_has_everything(staged):
    assert staged(SERVED, "chief", in_process=True) == ALL


def test_a_graph_can_read_whose_folder_it_runs_in(staged, tmp_path):
    staged(SERVED, "worker", 2)
    assert (tmp_path / NAME_FILE).read_text(encoding="utf-8") == "worker-2"
    assert (tmp_path / NUMBER_FILE).read_text(encoding="utf-8") == "2"
    assert tally.NAME_FILE == NAME_FILE
