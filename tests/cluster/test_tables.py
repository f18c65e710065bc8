"""Tests tables on parameter servers: sharded, growing, fine-tuned and warm-started."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import list_checkpoints
from flotilla.trainer.cluster.local import reserve_cluster
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.schema import STRATEGIES
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.events import WarmStart
from flotilla.trainer.models.registry import reset_uids
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime import signals
from tests.cluster.launched import run_to_end, some_of
from tests.cluster.lookups import DIMENSION
from tests.cluster.problems import GROWING_BATCH, TABLE, ids_of, net, values_of
from tests.cluster.servers import CHIEF, Servers, Trial, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

SERVING = [Task(role=role, index=index) for role in ("ps", "worker") for index in (0, 1)]
SMALL, LARGE = 1000, 1_000_000
BATCH = 64
# Bytes that a lookup transfers per example: an ID to the server, a row back, and the row's gradient
# to the server.
EXAMPLE = 4 + 2 * DIMENSION * 4
# Maximum size of all other messages of a step, in bytes: announcements, learning rate, counters and
# small variables.
ROUND_TRIPS = 20_000


@pytest.fixture(scope="module")
def relayed(tmp_path_factory):
    """Start two parameter servers and two workers, and count the bytes between all tasks."""
    with reserve_cluster({"ps": 2, "worker": 2, "chief": 1}) as real:
        ports = [real.addresses[task.role][task.index].rpartition(":")[2] for task in SERVING]
        relay = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.relay", *ports],
            env={**signals.parent_environment()},
            stdout=subprocess.PIPE,
            text=True,
        )
        said = json.loads(relay.stdout.readline())
        addresses = dict(zip(SERVING, said["addresses"], strict=True))

        def seen_by(observer: Task) -> Cluster:
            roles = {"chief": real.addresses["chief"], "ps": (), "worker": ()}
            for task in SERVING:
                own = real.addresses[task.role][task.index]
                roles[task.role] += (own if task == observer else addresses[task],)
            return Cluster(addresses=roles)

        servers = Servers(real, tmp_path_factory.mktemp("relayed"))
        try:
            for task in SERVING:
                servers.cluster = seen_by(task)
                servers.start(task)
            servers.cluster = seen_by(CHIEF)
            yield servers, said["counter"]
        finally:
            servers.end()
            relay.kill()
            relay.communicate()


def measured(relayed, strategy, trials, optimizer="adam", **args):
    """Return the result of each trial; a trial is a pair of row count and batch size."""
    servers, counter = relayed
    settings = {"name": optimizer, "args": args}
    config = {
        "training": {"strategy": strategy, "optimizer": settings},
        "cluster": {"parameter_servers": 2, "workers": 2},
    }
    spec = {"config": config, "counter": counter, "trials": trials}
    leading = servers.start_module("tests.cluster.lookups", spec)
    said = [leading.next() for _ in trials]
    leading.end()
    return said


@pytest.fixture(scope="module")
def asynchronous(relayed):
    return measured(
        relayed, "async_parameter_server", [(SMALL, BATCH), (LARGE, BATCH), (LARGE, 4 * BATCH)]
    )


def test_half_of_the_rows_stand_on_each_server(asynchronous):
    for said, rows in zip(asynchronous, (SMALL, LARGE, LARGE), strict=True):
        devices, shapes = said["devices"], said["shapes"]
        assert {devices[f"model/table/shard_{n}"] for n in (0, 1)} == {
            f"/job:ps/replica:0/task:{n}/device:CPU:0" for n in (0, 1)
        }
        assert [shapes[f"model/table/shard_{n}"] for n in (0, 1)] == [[rows // 2, DIMENSION]] * 2


def test_the_slots_of_the_optimizer_are_on_the_server_of_their_shard(asynchronous):
    devices = asynchronous[0]["devices"]
    for shard in ("shard_0", "shard_1"):
        slots = [path for path in devices if path.startswith("optimizer/") and shard in path]
        assert len(slots) == 2
        assert {devices[slot] for slot in slots} == {devices[f"model/table/{shard}"]}


def test_a_step_moves_as_much_for_a_large_table_as_for_a_small_one(asynchronous):
    small, large, _ = (said["bytes"] for said in asynchronous)
    assert large == pytest.approx(small, rel=0.1)
    assert large < ROUND_TRIPS + BATCH * EXAMPLE


def test_a_step_moves_more_for_a_larger_batch(asynchronous):
    _, large, batch = (said["bytes"] for said in asynchronous)
    assert (batch - large) / (3 * BATCH) == pytest.approx(EXAMPLE, rel=0.1)


@pytest.mark.parametrize(
    "strategy", some_of(["in_graph", "sync_parameter_server"], "sync_parameter_server")
)
def test_no_table_moves_where_the_chief_applies_the_updates(relayed, strategy):
    small, large = measured(relayed, strategy, [(SMALL, BATCH), (LARGE, BATCH)])
    assert large["bytes"] == pytest.approx(small["bytes"], rel=0.1)
    assert large["bytes"] < 3 * (ROUND_TRIPS + BATCH * EXAMPLE)


def test_no_table_moves_where_gradients_are_clipped_by_their_norm(relayed):
    (said,) = measured(
        relayed, "async_parameter_server", [(LARGE, BATCH)], "adagrad", global_clipnorm=1.0
    )
    assert said["bytes"] < ROUND_TRIPS + BATCH * EXAMPLE


IDS, CAPACITY, SHARDS = 100, 300, 3
PROBLEM = "tests.cluster.problems:growing"
ADAGRAD = {"optimizer": {"name": "adagrad", "learning_rate": 0.5}}


def trial(strategy, runs, servers, workers, **named):
    return Trial(
        {
            "training": {"strategy": strategy},
            "cluster": {"parameter_servers": servers, "workers": workers},
        },
        PROBLEM,
        runs=runs,
        arguments={"ids": IDS, "capacity": CAPACITY, **ADAGRAD},
        **named,
    )


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("two"), ps=2, workers=2) as started:
        yield started


def rows_of(variables):
    """Return the row of each ID that has one; check that no ID has two."""
    found = {}
    for shard in range(SHARDS):
        own = {
            name: np.array(variables[f"model/{TABLE}/shard_{shard}_{name}"])
            for name in ("ids", "used", "rows")
        }
        for slot in np.flatnonzero(own["used"][:-1] >= 0):
            assert own["ids"][slot] not in found
            found[own["ids"][slot]] = own["rows"][slot]
    return found


def grown(outcome):
    """Check that exactly the seen IDs have rows, and that these rows were trained."""
    rows = rows_of(outcome.variables)
    assert set(rows) == {int(ids_of(np.int64(each))) for each in range(IDS)}
    metrics = outcome.reports[-1]["metrics"]["tables"][TABLE]
    assert metrics == {"rows": IDS, "evicted": 0, "turned_away": 0}
    assert outcome.reports[-1]["loss"] < 0.1
    return rows


def test_an_asynchronous_table_is_taken_over_by_one_server(servers, tmp_path):
    outcome = servers.lead(trial("async_parameter_server", [20, 100], 2, 2))
    rows = grown(outcome)
    devices = [
        {
            device
            for path, device in outcome.devices.items()
            if f"shard_{shard}" in path and TABLE in path
        }
        for shard in range(SHARDS)
    ]
    assert [len(each) for each in devices] == [1] * SHARDS
    assert len(set.union(*devices)) == 2
    with serving(tmp_path, ps=1, workers=1) as other:
        start = dict(outcome.variables)
        again = other.lead(trial("async_parameter_server", [10], 1, 1, start=start))
    later = grown(again)
    assert 10 * GROWING_BATCH > IDS
    # New rows would be within 0.05 of zero, so these were restored.
    apart = max(np.abs(later[each] - rows[each]).max() for each in rows)
    assert apart < 0.2 < min(np.abs(row).max() for row in rows.values())


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["sync_parameter_server", "in_graph"])
def test_it_grows_under_the_synchronous_strategies(servers, strategy):
    grown(servers.lead(trial(strategy, [20, 100], 2, 2)))


FROZEN = ["dense/*", "batch_normalization/*"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a file with a model of three classes, whose variables all have different values."""
    reset_uids()
    model = net(InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(3,)))
    for number, variable in enumerate(model.variables):
        if "seed" not in variable.path:
            variable.assign(np.full(variable.shape, 0.01 * (number + 1)))
    file = tmp_path_factory.mktemp("pretrained") / "model.keras"
    model.save(file)
    return file


@pytest.mark.parametrize("strategy", some_of(STRATEGIES, "async_parameter_server"))
def test_what_is_frozen_stays_as_in_the_file_and_all_else_is_trained(
    pretrained, dataset, tmp_path, strategy
):
    warm_start = {"from": str(pretrained), "exclude": ["dense_1/*"]}
    found, run = trained(
        tmp_path, dataset, steps=20, strategy=strategy, warm_start=warm_start, freeze=FROZEN
    )
    left = {event.left["excluded"] for event in run.events(WarmStart)}
    assert left == {2}
    first, last = found[0], found[max(found)]
    assert storage.read_manifest(last).fields["warmed_from"] == storage.uri_of(pretrained)
    before, after = values_of(first), values_of(last)
    moved = {key for key in before if (before[key] != after[key]).any() and "seed" not in key}
    assert len(moved) == 2
    assert all(key.startswith("variables/model.Sdense_1.S") for key in moved)
    for variable in keras.saving.load_model(pretrained).variables:
        layer, name = variable.path.split("/")
        if layer in ("dense", "batch_normalization"):
            (value,) = [after[key] for key in after if f".S{layer}.S{name}/" in key]
            np.testing.assert_array_equal(value, variable.numpy(), err_msg=variable.path)


ASYNC = "async_parameter_server"
CLICKS = DataConfig(dataset="clicks", shards=2)
NET = {"name": "tests.cluster.problems:net"}
TABLES = {"name": "two_tower", "args": {"rows": {"user": 1000, "item": 500}, "shards": 2}}


def trained(folder, dataset, *, steps, strategy, model=NET, **training):
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
    run = run_to_end(config, dataset, folder)
    return {step: uri for uri, step in list_checkpoints(run.checkpoints)}, run


@pytest.fixture(scope="module")
def digits(tmp_path_factory, dataset):
    """Return a checkpoint of a stateful model that was trained in one process."""
    folder = tmp_path_factory.mktemp("digits")
    found, _ = trained(folder, dataset, steps=60, strategy="single")
    return NET, dataset, found[60]


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """Return a checkpoint of sharded tables that were trained on workers and two servers."""
    folder = tmp_path_factory.mktemp("clicks")
    dataset = prepare(CLICKS, storage.uri_of(folder), folder / "scratch").uri
    found, _ = trained(folder, dataset, steps=60, strategy="async_parameter_server", model=TABLES)
    return TABLES, dataset, found[max(found)]


def require_begun_with(uri, found, run):
    first, before = values_of(found[0]), values_of(uri)
    assert first.keys() == before.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(first[key], value, err_msg=key)
    assert storage.read_manifest(found[0]).fields["global_step"] == 0
    assert storage.read_manifest(found[max(found)]).fields["warmed_from"] == uri
    assert {event.uri for event in run.events(WarmStart)} == {uri}
    last = values_of(found[max(found)])
    assert any((last[key] != first[key]).any() for key in first)


# The only strategy without a chief. `make test-long` runs the others.
@pytest.mark.parametrize("strategy", some_of(STRATEGIES, "multi_worker_mirrored"))
def test_every_strategy_begins_with_exactly_these_weights(digits, tmp_path, strategy):
    model, dataset, uri = digits
    found, run = trained(
        tmp_path, dataset, steps=20, strategy=strategy, model=model, warm_start=uri
    )
    require_begun_with(uri, found, run)


@pytest.mark.parametrize("strategy", some_of(["single", ASYNC, "in_graph"], ASYNC))
def test_tables_that_are_spread_are_taken_whole(clicks, tmp_path, strategy):
    model, dataset, uri = clicks
    found, run = trained(
        tmp_path, dataset, steps=20, strategy=strategy, model=model, warm_start=uri
    )
    require_begun_with(uri, found, run)
