"""Training on a real cluster of processes on loopback, undisturbed."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import tensorflow as tf

from tests.cluster.launched import launched
from tests.trainer.tensorboard.event_files import hyperparameters, scalars
from trainer import storage
from trainer.checkpoints import checkpoints
from trainer.checkpoints.index import list_checkpoints, newest_checkpoint
from trainer.config.load import parse_config
from trainer.data.spec import DatasetSpec
from trainer.errors import UserError
from trainer.events import AttemptBegin
from trainer.models import registry
from trainer.models.spec import InputSpec
from trainer.topology import Cluster, Task, check_port

pytestmark = pytest.mark.cluster


def settings(**training: object) -> dict[str, object]:
    return {
        "training": {"steps": 300, "checkpoint_every": 100, "validate_every": 150, **training},
        "cluster": {"parameter_servers": 2, "workers": 3},
    }


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A run of 300 steps on 2 parameter servers and 3 workers, and what it said."""
    with launched(settings(), dataset, tmp_path_factory.mktemp("trained")) as run:
        ended = run.end()
    return run, ended


def test_ends_well_at_exactly_the_steps_asked_for(trained):
    run, (code, said) = trained
    assert code == 0, said
    assert run.newest() == 300
    assert run.history()[-1]["global_step"] == 300


def test_keeps_the_newest_checkpoints_at_their_boundaries(trained):
    run, _ = trained
    assert [step for _, step in list_checkpoints(run.checkpoints)] == [100, 200, 300]


def test_learns(trained):
    run, _ = trained
    rows = run.history()
    assert rows[-1]["loss"] < rows[0]["loss"] / 4
    assert rows[-1]["validation_accuracy"] > 0.9


def test_validates_at_its_boundaries_and_at_the_end(trained):
    run, _ = trained
    rows = [row for row in run.history() if "validation_loss" in row]
    assert [row["global_step"] for row in rows] == [150, 300]


def test_each_worker_has_shards_of_its_own_and_together_they_have_all(trained, dataset):
    run, _ = trained
    names = [
        {path.name for path in (run.folder / "cluster" / f"worker-{i}" / "shards").iterdir()}
        for i in range(3)
    ]
    spec = DatasetSpec.from_manifest(storage.read_manifest(dataset))
    assert set.union(*names) == set(spec.files("train"))
    assert sum(map(len, names)) == len(spec.files("train"))


def test_each_task_has_a_folder_and_a_log_of_its_own(trained):
    run, _ = trained
    tasks = {"chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "worker-2"}
    assert {path.parent.name for path in run.folder.glob("cluster/*/log.txt")} == tasks


def test_the_optimizer_has_counted_every_update(trained):
    run, _ = trained
    uri, _ = newest_checkpoint(run.checkpoints)
    reader = tf.train.load_checkpoint(str(storage.local_path(uri) / "variables"))
    names = {name for name in reader.get_variable_to_shape_map() if "global_step" in name}
    assert {int(reader.get_tensor(name)) for name in names} == {300}


def test_the_checkpoint_restores_into_a_model_of_one_process(trained, dataset, tmp_path):
    run, _ = trained
    spec = DatasetSpec.from_manifest(storage.read_manifest(dataset))
    inputs = InputSpec.of(spec.features, spec.inputs, (10,))
    model = registry.build(parse_config({}).model, inputs, seed=1)
    before = [variable.numpy() for variable in model.variables]
    uri, _ = newest_checkpoint(run.checkpoints)
    manifest = checkpoints.restore_model(uri, model, tmp_path)
    assert manifest.fields["strategy"] == "async_parameter_server"
    for variable, old in zip(model.trainable_variables, before, strict=True):
        assert (variable.numpy() != old).any()


def test_tensorboard_finds_the_metrics(trained):
    run, _ = trained
    logs = run.folder / "checkpoints" / "logs"
    tags = {(name, tag) for name, _, tag, _ in scalars(logs)}
    train, validation = (f"{run.folder.name}/{part}" for part in ("train", "validation"))
    assert {(train, name) for name in ("loss", "learning_rate", "steps_per_second")} <= tags
    assert {(validation, name) for name in ("loss", "accuracy")} <= tags
    _, values = hyperparameters(logs, run.folder.name)
    assert values["training.steps"] == 300


def test_says_nothing_secret_on_the_command_line(trained):
    run, _ = trained
    config = json.loads((run.folder / "cluster" / "chief-0" / "config.json").read_text())
    assert parse_config(config) == parse_config(settings())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_the_global_step_is_exact_for_every_seed(dataset, tmp_path, seed):
    with launched(settings(steps=501, seed=seed), dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 0, said
    assert run.newest() == 501


@pytest.mark.slow
def test_a_loss_that_diverges_ends_with_one_line_and_a_finite_checkpoint(dataset, tmp_path):
    wild = settings(optimizer={"name": "sgd", "learning_rate": 1e6})
    with launched(wild, dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 1
    assert said.count("\n") == 1
    assert "training diverged: the loss is" in said
    assert "training.optimizer.learning_rate" in said
    assert run.newest() == 0


@pytest.mark.long
def test_an_adam_that_has_thrown_its_weights_away_has_diverged_too(dataset, tmp_path):
    wild = settings(optimizer={"name": "adam", "learning_rate": 1e6})
    with launched(wild, dataset, tmp_path) as run:
        code, said = run.end()
    assert (code, run.newest()) == (1, 0)
    assert "training diverged" in said


@pytest.mark.slow
def test_a_model_that_cannot_be_built_ends_the_run_with_its_line(dataset, tmp_path):
    with launched({"model": {"name": "no_such_package:model"}}, dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 1
    assert said.startswith("model no_such_package:model: cannot import no_such_package")
    assert said.count("\n") == 1


def test_a_workdir_that_cannot_be_written_is_one_line(dataset, tmp_path):
    (tmp_path / "cluster").write_text("a file where the folder should be")
    with launched(settings(), dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 1
    assert said.startswith(f"cannot write to {tmp_path / 'cluster'}")


@pytest.mark.long
def test_two_clusters_at_once_do_not_meet(dataset, tmp_path):
    with (
        launched(settings(steps=100), dataset, tmp_path / "one") as one,
        launched(settings(steps=100), dataset, tmp_path / "two") as two,
    ):
        ends = [one.end(), two.end()]
    assert [code for code, _ in ends] == [0, 0]
    assert (one.newest(), two.newest()) == (100, 100)


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        cluster = Cluster(addresses={"ps": (address,)})
        with pytest.raises(UserError, match=f"ps-0 cannot serve on {address}: Address already in"):
            check_port(cluster, Task(role="ps", index=0))


@pytest.mark.long
def test_training_goes_on_where_it_was_left(dataset, tmp_path: Path):
    with launched(settings(steps=200), dataset, tmp_path) as first:
        first.end()
    with launched(settings(steps=350), dataset, tmp_path) as second:
        code, said = second.end()
    assert code == 0, said
    (attempt,) = second.events(AttemptBegin)
    assert (attempt.resumed, attempt.global_step) == (True, 200)
    assert second.newest() == 350
    steps = [row["global_step"] for row in second.history()]
    assert steps == sorted(set(steps))
