"""Fresh runs with the weights of another one, under every strategy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.launched import launched
from trainer import storage
from trainer.checkpoints.index import list_checkpoints
from trainer.config.data import DataConfig
from trainer.config.schema import STRATEGIES
from trainer.data.prepare import prepare
from trainer.events import Progress, Restart, WarmStart

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

CLICKS = DataConfig(dataset="clicks", shards=2)
# One that a chief leads, and one that all workers lead; `make test-long` runs the others.
LED_DIFFERENTLY = ("async_parameter_server", "multi_worker_mirrored")
TABLES = {"name": "two_tower", "args": {"rows": {"user": 1000, "item": 500}, "shards": 2}}


def values(uri):
    """Return the variables of the model in a checkpoint by key."""
    reader = tf.train.load_checkpoint(str(storage.local_path(uri) / "variables"))
    keys = reader.get_variable_to_shape_map()
    return {key: reader.get_tensor(key) for key in keys if key.startswith("variables/model.S")}


def trained(folder, dataset, *, steps, strategy, model, **training):
    """Train to the end; return the URIs of all checkpoints by global step, and the run."""
    config = {
        "model": model,
        "training": {
            "strategy": strategy,
            "steps": steps,
            "keep": 100,
            "validate_every": 0,
            **training,
        },
        "cluster": {"parameter_servers": 2, "workers": 2},
    }
    with launched(config, dataset, folder) as run:
        code, said = run.end()
    assert code == 0, said
    return {step: uri for uri, step in list_checkpoints(run.checkpoints)}, run


@pytest.fixture(scope="module")
def digits(tmp_path_factory, dataset):
    """A checkpoint of a stateful model that one process has trained."""
    folder = tmp_path_factory.mktemp("digits")
    model = {"name": "tests.cluster.stateful:net"}
    found, _ = trained(folder, dataset, steps=60, strategy="single", model=model)
    return model, dataset, found[60]


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """A checkpoint of sharded tables that workers and two servers have trained."""
    folder = tmp_path_factory.mktemp("clicks")
    dataset = prepare(CLICKS, storage.uri_of(folder), folder / "scratch").uri
    found, _ = trained(folder, dataset, steps=60, strategy="async_parameter_server", model=TABLES)
    return TABLES, dataset, found[max(found)]


def require_begun_with(uri, found, run):
    first, before = values(found[0]), values(uri)
    assert first.keys() == before.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(first[key], value, err_msg=key)
    assert storage.read_manifest(found[0]).fields["global_step"] == 0
    assert storage.read_manifest(found[max(found)]).fields["warmed_from"] == uri
    assert {event.uri for event in run.events(WarmStart)} == {uri}
    # Training goes on from there.
    last = values(found[max(found)])
    assert any((last[key] != first[key]).any() for key in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        each if each in LED_DIFFERENTLY else pytest.param(each, marks=pytest.mark.long)
        for each in STRATEGIES
    ],
)
def test_every_strategy_begins_with_exactly_these_weights(digits, tmp_path, strategy):
    model, dataset, uri = digits
    found, run = trained(
        tmp_path, dataset, steps=20, strategy=strategy, model=model, warm_start=uri
    )
    require_begun_with(uri, found, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("single", marks=pytest.mark.long),
        "async_parameter_server",
        pytest.param("in_graph", marks=pytest.mark.long),
    ],
)
def test_tables_that_are_spread_are_taken_whole(clicks, tmp_path, strategy):
    model, dataset, uri = clicks
    found, run = trained(
        tmp_path, dataset, steps=20, strategy=strategy, model=model, warm_start=uri
    )
    require_begun_with(uri, found, run)


@pytest.mark.slow
def test_another_model_is_refused_by_one_line_before_training(digits, tmp_path):
    _, dataset, uri = digits
    config = {
        "model": {"name": "softmax"},
        "training": {"steps": 100, "warm_start": uri},
        "cluster": {"parameter_servers": 1, "workers": 1},
    }
    with launched(config, dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 1
    assert said.count("\n") == 1
    assert said.startswith(f"training.warm_start: {uri} is the checkpoint of another model: it has")
    assert run.events(Restart) == run.events(Progress) == []
    assert list_checkpoints(run.checkpoints) == []
