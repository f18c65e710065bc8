"""Fresh runs with the weights of another one: under every strategy, and the whole pipeline."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.launched import launched
from tests.pipelines.called import call, setting
from trainer import checkpoint_listing, registry, storage
from trainer.config import STRATEGIES, DataConfig
from trainer.data.prepare import prepare

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

CLICKS = DataConfig(dataset="clicks", shards=2)
TABLES = {"name": "two_tower", "args": {"shards": 2}}
FEW = setting(training__checkpoint_every=100, gate__min__accuracy=0.5)


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
    return {step: uri for uri, step in checkpoint_listing.listed(run.checkpoints)}, run


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
    assert {event["uri"] for event in run.happened("warm_start")} == {uri}
    # Training goes on from there.
    last = values(found[max(found)])
    assert any((last[key] != first[key]).any() for key in first)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_begins_with_exactly_these_weights(digits, tmp_path, strategy):
    model, dataset, uri = digits
    found, run = trained(
        tmp_path, dataset, steps=20, strategy=strategy, model=model, warm_start=uri
    )
    require_begun_with(uri, found, run)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "async_parameter_server", "in_graph"])
def test_tables_that_are_spread_are_taken_whole(clicks, tmp_path, strategy):
    model, dataset, uri = clicks
    found, run = trained(
        tmp_path, dataset, steps=20, strategy=strategy, model=model, warm_start=uri
    )
    require_begun_with(uri, found, run)


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
    assert run.happened("restart") == run.happened("progress") == []
    assert checkpoint_listing.listed(run.checkpoints) == []


class TestChampion:
    @pytest.fixture(scope="class")
    def workdir(self, tmp_path_factory):
        return tmp_path_factory.mktemp("champion") / "runs"

    @pytest.fixture(scope="class")
    def first(self, workdir):
        """A run that asks for the champion when there is none, and becomes it."""
        steps = setting(training__steps=600, training__warm_start="champion")
        called = call("run", workdir, *FEW, *steps, cwd=workdir.parent)
        assert called.code == 0, called.err + called.log
        return called

    @pytest.fixture(scope="class")
    def second(self, workdir, first):
        assert first.told["status"] == "blessed"
        steps = setting(
            training__steps=60,
            training__warm_start="champion",
            training__validate_every=20,
            training__optimizer__learning_rate=0.0005,
        )
        called = call("run", workdir, *FEW, *steps, cwd=workdir.parent)
        assert called.code == 0, called.err + called.log
        return called

    def test_the_first_run_begins_from_scratch_and_says_so(self, first):
        root = storage.uri_of(first.workdir)
        line = f"training begins from scratch: digits has no champion yet below {root}"
        assert first.err.splitlines().count(line) == 1
        manifest = storage.read_manifest(first.told["artifacts"]["checkpoint"])
        assert manifest.fields["warmed_from"] == ""

    def test_the_second_run_begins_at_the_champions_loss(self, first, second):
        champion = first.told["metrics"]["loss"]
        rows = [e for e in second.happened("progress") if e["global_step"] <= 20]
        cold = first.happened("progress")[0]
        assert champion < 0.5 < cold["loss"]
        assert rows
        assert all(row["loss"] < champion + 0.15 for row in rows)
        uri = first.told["artifacts"]["checkpoint"]
        assert f"training begins with the weights of {uri}" in second.err.splitlines()

    def test_manifest_and_lineage_say_what_it_began_with(self, first, second):
        uri = first.told["artifacts"]["checkpoint"]
        manifest = storage.read_manifest(second.told["artifacts"]["checkpoint"])
        assert manifest.fields["warmed_from"] == uri
        root = storage.uri_of(second.workdir)
        one, two = registry.versions(root, "digits")
        assert one.manifest.fields["lineage"]["warmed_from"] == ""
        assert two.manifest.fields["lineage"]["warmed_from"] == uri

    def test_a_resumed_run_goes_on_from_its_own_checkpoint(self, workdir, first, second):
        # The champion is the second run itself by now, and the checkpoint of the first one is gone.
        shutil.rmtree(first.folder / "checkpoints")
        more = [*setting(training__steps=90), "--resume", second.told["run_id"]]
        called = call("train", workdir, *more, cwd=workdir.parent)
        assert called.code == 0, called.err + called.log
        (life,) = called.happened("life")
        assert (life["resumed"], life["global_step"]) == (True, 60)
        assert called.happened("warm_start") == []
        manifest = storage.read_manifest(called.told["artifacts"]["checkpoint"])
        assert manifest.fields["global_step"] == 90
        assert manifest.fields["warmed_from"] == first.told["artifacts"]["checkpoint"]
