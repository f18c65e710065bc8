"""Snapshots of real servers: what is on the peer when a server is killed while it is copied."""

from __future__ import annotations

import pytest

from tests.cluster.servers import serving
from tests.cluster.snapshotted import IDS, ROWS, STEPS

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(("servers", "dies"), [(2, 1), (2, 0), (1, 0)])
def test_a_copy_is_whole_without_its_server(tmp_path, servers, dies):
    config = {
        "training": {"strategy": "async_parameter_server"},
        "cluster": {"parameter_servers": servers, "workers": 2, "snapshot_seconds": 1},
    }
    with serving(tmp_path, ps=servers, workers=2) as started:
        pids = [started.processes[f"ps-{number}"].pid for number in range(servers)]
        spec = {"config": config, "pids": pids, "dies": dies}
        leading = started.start_module("tests.cluster.snapshotted", spec)
        said = leading.next()
        leading.end()
    # At rest a copy is what the servers have.
    first, second = said["copies"]
    assert first["differ"] == second["differ"] == [[]] * servers
    # Then only what batches look up was marked: of the table its first rows.
    assert first["marked"] == said["rows"]
    of_table = [
        n for n, rows in zip(second["marked"], said["rows"], strict=True) if rows == ROWS / 2
    ]
    assert of_table == [IDS / 2] * 2
    peer = f"/job:ps/replica:0/task:{1 - dies}/" if servers > 1 else "/job:chief/replica:0/task:0/"
    assert [each.startswith(peer) for each in said["devices"]] == [True]
    assert said["global_step"] == 3 * STEPS
    assert any("table" in path for path in said["changed"])
    assert any("grown" in path for path in said["changed"])
    assert said["differ"] == []
