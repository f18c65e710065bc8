import os
import signal
import subprocess

import pytest

from flotilla.trainer.cluster.forks import forked
from tests.trainer.cluster.forks.serving import SECONDS, Asked, serving

pytestmark = pytest.mark.cluster


def started(asked):
    with asked.descriptors() as output:
        return forked.start_process(asked.wanted, output)


def test_a_process_is_forked_where_there_is_a_server(tmp_path, monkeypatch):
    with serving(tmp_path) as server:
        monkeypatch.setenv(forked.VARIABLE, server.first)
        asked = Asked(folder=tmp_path)
        process = started(asked)
        asked.says()
        assert isinstance(process, forked.Forked)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        process.kill()
        assert process.wait(SECONDS) == -signal.SIGKILL
        process.kill()


@pytest.mark.parametrize("address", ["", forked.NONE, "no-such-server"])
def test_it_is_started_anew_where_there_is_none(tmp_path, monkeypatch, address):
    monkeypatch.setenv(forked.VARIABLE, address)
    asked = Asked(folder=tmp_path, environment={"PYTHONPATH": os.getcwd()})
    process = started(asked)
    assert asked.says()["session"]
    asked.end(5)
    assert isinstance(process, subprocess.Popen)
    assert process.wait(SECONDS) == 5


def test_it_is_started_anew_where_nothing_is_to_be_loaded(tmp_path, monkeypatch):
    with serving(tmp_path) as server:
        monkeypatch.setenv(forked.VARIABLE, server.first)
        asked = Asked(folder=tmp_path, loaded="", environment={"PYTHONPATH": os.getcwd()})
        process = started(asked)
        asked.says()
        asked.end(0)
        assert isinstance(process, subprocess.Popen)
        assert process.wait(SECONDS) == 0
