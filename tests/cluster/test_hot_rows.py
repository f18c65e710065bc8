"""Hot rows that workers keep: nothing of them is lost at a boundary, and steps are counted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cluster.hot import IDS, RATE, ROWS
from tests.cluster.servers import Trial, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

RUNS = [20, 41]
PATHS = {
    "split": ["model/split/shard_0", "model/split/shard_1"],
    "whole": ["model/whole/embeddings"],
}


def test_all_that_two_workers_summed_up_is_on_the_servers_at_a_boundary(tmp_path):
    training = {
        "strategy": "async_parameter_server",
        # Fewer than a batch has.
        "cached_rows": 3,
        "cache_staleness": 7,
    }
    config = {"training": training, "cluster": {"parameter_servers": 2, "workers": 2}}
    start = {
        path: np.zeros([ROWS // len(paths), 2]).tolist()
        for paths in PATHS.values()
        for path in paths
    }
    with serving(tmp_path, ps=2, workers=2) as servers:
        outcome = servers.lead(Trial(config, "tests.cluster.hot:linear", RUNS, start=start))
    assert [report["global_step"] for report in outcome.reports] == [20, 61]
    for name, paths in PATHS.items():
        found = np.zeros([ROWS, 2])
        for shard, path in enumerate(paths):
            found[shard :: len(paths)] = outcome.variables[path]
        times = np.bincount(IDS[name], minlength=ROWS)
        expected = np.repeat(-RATE * sum(RUNS) * times[:, np.newaxis], 2, axis=1)
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)
