"""Tests what the agent next to a user's program does when a container, job or pod must end."""

import json
import subprocess
import sys
from unittest.mock import create_autospec

import pytest

from flotilla.components.kubernetes.pods import program_agent
from flotilla.components.kubernetes.pods.program_agent import Reaction
from flotilla.components.kubernetes.pods.shutdown import ShutdownServer
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.program.agent import Agent
from flotilla.trainer.runtime.errors import BEGIN_AGAIN, DONE, FAILED, USAGE

LEADER, SERVER = Task(role="worker", index=0), Task(role="ps", index=0)
CLUSTER = Cluster(addresses={"ps": ("localhost:1",), "worker": ("localhost:2",)})


@pytest.fixture
def agent():
    return create_autospec(Agent, instance=True)


def test_the_leader_stops_at_once(agent):
    reaction = Reaction(CLUSTER, LEADER, 10)
    reaction.agent = agent
    reaction.take(15)
    agent.stop.assert_called_once_with()


def test_a_server_waits_for_the_leader(agent, monkeypatch):
    waits = []

    class Connection:
        def __init__(self, host):
            self.host = host

        def wait(self, _notice, timeout):
            waits.append((self.host, timeout))
            assert not agent.stop.called

    monkeypatch.setattr(program_agent, "ShutdownConnection", Connection)
    reaction = Reaction(CLUSTER, SERVER, 10)
    reaction.agent = agent
    reaction.take(15)
    agent.begin_no_more.assert_called_once_with()
    for thread in [each for each in program_agent.threading.enumerate() if each.daemon]:
        if "_wait" in thread.name:
            thread.join(10)
    assert waits == [("localhost", 10)]
    agent.stop.assert_called_once_with()


@pytest.mark.parametrize("code", [DONE, BEGIN_AGAIN])
def test_only_the_end_of_a_leader_that_is_done_is_announced(code, monkeypatch):
    server = create_autospec(ShutdownServer, instance=True)
    monkeypatch.setattr(program_agent, "ShutdownServer", lambda _servers: server)
    Reaction(CLUSTER, LEADER, 10).finish(code)
    assert server.announce.called == (code == DONE)


def test_a_job_that_is_asked_to_end_fails_so_that_no_pod_comes_again(agent):
    reaction = Reaction(CLUSTER, LEADER, 10)
    reaction.agent = agent
    reaction.end_job("no heartbeat")
    agent.stop.assert_called_once_with("no heartbeat", code=FAILED)
    # Because of this flag, the agent deletes the job after the program's container has ended.
    assert reaction.ends_job


def test_a_pod_without_its_cluster_is_refused_in_one_line(tmp_path):
    module = "flotilla.components.kubernetes.pods.program_agent"
    found = subprocess.run(
        [sys.executable, "-m", module, "--dataset", "d", "--checkpoints", "c"],
        cwd=tmp_path,
        env={"TF_CONFIG": json.dumps({}), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == USAGE
    assert found.stderr.splitlines()[-1].startswith("agent: TF_CONFIG: 'cluster' must map roles")
