"""Large embedding tables on two parameter servers: what is placed and sent where.

Everything that the tasks send each other goes through a relay that counts it.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cluster.lookups import DIMENSION
from tests.cluster.servers import CHIEF, Servers
from trainer.cluster import signals
from trainer.cluster.local import held_cluster
from trainer.topology import Cluster, Task

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

SERVING = [Task(role=role, index=index) for role in ("ps", "worker") for index in (0, 1)]
SMALL, LARGE = 1000, 1_000_000
BATCH = 64
# Its id up, a row down and its gradient up.
EXAMPLE = 4 + 2 * DIMENSION * 4
# The other messages of a step: announcements, learning rate, counters, the small variables.
ROUND_TRIPS = 20_000


@pytest.fixture(scope="module")
def relayed(tmp_path_factory):
    """Two parameter servers and two workers, and the counter of what goes between all tasks."""
    with held_cluster({"ps": 2, "worker": 2, "chief": 1}) as real:
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
    """Return what each trial of rows and batch said."""
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
    "strategy", [pytest.param("in_graph", marks=pytest.mark.long), "sync_parameter_server"]
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
