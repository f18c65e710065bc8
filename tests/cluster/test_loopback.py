"""A local run under attack: who reaches its tasks, which run whatever graph they are sent."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.cluster.launched import launched
from tests.cluster.strangers import open_ports, other_addresses, reached

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RUN = {"training": {"steps": 10**7, "checkpoint_every": 200}, "cluster": {"workers": 2}}


def run_of(strategy, **cluster):
    return {
        "training": {**RUN["training"], "strategy": strategy},
        "cluster": {**RUN["cluster"], **cluster},
    }


def read_as_task(address: str, port: int, path: str, seconds: int = 2) -> bytes:
    """Have the task behind an address read a file for us; raises TensorFlow's error."""
    host = f"[{address}]" if ":" in address else address
    settings = tf.compat.v1.ConfigProto(operation_timeout_in_ms=1000 * seconds)
    with tf.Graph().as_default():
        content = tf.io.read_file(path)
        with tf.compat.v1.Session(f"grpc://{host}:{port}", config=settings) as session:
            return session.run(content)


@pytest.mark.parametrize(
    ("config", "tasks"),
    [
        (run_of("async_parameter_server", evaluator=True), 5),
        (run_of("multi_worker_mirrored"), 2),
        pytest.param(run_of("async_parameter_server", in_process=True), 1, marks=pytest.mark.long),
        pytest.param(run_of("sync_parameter_server"), 4, marks=pytest.mark.long),
        pytest.param(run_of("in_graph"), 4, marks=pytest.mark.long),
        pytest.param(run_of("single"), 1, marks=pytest.mark.long),
    ],
)
def test_no_stranger_reaches_a_task_of_a_local_run(dataset, tmp_path, config, tasks):
    others = other_addresses()
    with launched(config, dataset, tmp_path) as run:
        run.wait_for_step(200)
        found = {process: open_ports(process) for process in run.tasks()}
        assert len(found) == tasks
        ports = sorted(port for each in found.values() for port in each)
        assert reached(["127.0.0.1", "::1"], ports) == [
            (address, port) for address in ("127.0.0.1", "::1") for port in ports
        ]
        assert reached(others, ports) == []


def test_a_strangers_session_runs_no_graph_in_a_task(dataset, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret", encoding="utf-8")
    with launched(run_of("async_parameter_server"), dataset, tmp_path) as run:
        run.wait_for_step(200)
        (port,) = open_ports(run.task("ps-0"))
        # What other processes of this machine can do.
        assert read_as_task("127.0.0.1", port, str(secret), seconds=120) == b"secret"
        for address in other_addresses():
            if "%" not in address:
                with pytest.raises(tf.errors.OpError):
                    read_as_task(address, port, str(secret))
