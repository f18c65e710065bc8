"""What a server holds of a chief that looks at it once a second, for days."""

from __future__ import annotations

import pytest

from tests.cluster.looking import MORE
from tests.cluster.servers import serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

# 2,400 to 3,100 were left by each look that TensorFlow fetched by itself.
MOST_BYTES = 800


def test_a_look_leaves_nothing_in_the_memory_of_a_server(tmp_path):
    config = {
        "training": {"strategy": "async_parameter_server"},
        "cluster": {"parameter_servers": 1, "workers": 1},
    }
    with serving(tmp_path, ps=1, workers=1) as started:
        spec = {"config": config, "pid": started.processes["ps-0"].pid}
        leading = started.start_module("tests.cluster.looking", spec)
        said = leading.next()
        leading.end()
    assert said["grown"] < MOST_BYTES * MORE
