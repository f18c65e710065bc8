"""Fixtures that run a program under the local launcher and check that nothing is left."""

import os
from pathlib import Path

import pytest

from flotilla.trainer.cluster import forks
from flotilla.trainer.cluster.local import launch
from flotilla.trainer.cluster.process import MODULES
from tests.trainer.cluster.serving import serving


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    """Return the address of a fork server that has imported the agent, as in a run."""
    with serving(tmp_path_factory.mktemp("server"), at_once=MODULES["program"]) as found:
        yield found.first


@pytest.fixture
def launched(server, tmp_path, monkeypatch):
    """Return a function that runs a job and then checks that no process is left."""
    monkeypatch.setenv(forks.VARIABLE, server)

    def train(job):
        try:
            launch(job)
        finally:
            assert not left(tmp_path)

    return train


def left(folder):
    """Return the processes whose command line or environment names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and path.name != str(os.getpid()):
            found.append((path / "cmdline").read_text())
    return found
