"""Tables that grow on parameter servers: one row an id, whoever brings it, on any cluster."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cluster.growing import BATCH, TABLE, ids_of
from tests.cluster.servers import Trial, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

IDS, CAPACITY, SHARDS = 100, 300, 3
PROBLEM = "tests.cluster.growing:problem"
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
    """Return the row of each id that has one, and hold that none has two."""
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
    """Hold that exactly the ids that came have rows, and that these have learnt."""
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
    assert 10 * BATCH > IDS
    # They go on from what they were: no row was made anew, which is within 0.05 of zero.
    apart = max(np.abs(later[each] - rows[each]).max() for each in rows)
    assert apart < 0.2 < min(np.abs(row).max() for row in rows.values())


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["sync_parameter_server", "in_graph"])
def test_it_grows_under_the_synchronous_strategies(servers, strategy):
    grown(servers.lead(trial(strategy, [20, 100], 2, 2)))
