"""Heartbeats: bytes in a pipe, and what their absence means."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from trainer.cluster import liveness

BEAT = "from trainer.cluster import liveness; import signal; liveness.begin(); signal.pause()"


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for each in (read, write):
        try:
            os.close(each)
        except OSError:
            assert each == write


def test_a_task_that_ended_is_not_stalled(pipe):
    read, write = pipe
    os.write(write, b"...")
    os.close(write)
    assert not liveness.wait_until_silent(read, 60)


def test_a_task_that_sent_one_heartbeat_and_no_more_is_stalled(pipe):
    read, write = pipe
    os.write(write, b".")
    assert liveness.wait_until_silent(read, 0.01)


def test_the_first_heartbeat_may_take_longer(pipe, monkeypatch):
    monkeypatch.setattr(liveness, "STARTING_SECONDS", 0.01)
    read, _ = pipe
    assert liveness.wait_until_silent(read, 0.001)
    monkeypatch.setattr(liveness, "STARTING_SECONDS", 60.0)
    os.close(pipe[1])
    assert not liveness.wait_until_silent(read, 0.001)


def test_a_process_sends_heartbeats_until_it_is_stopped(pipe, monkeypatch):
    monkeypatch.setattr(liveness, "STARTING_SECONDS", 1.0)
    read, write = pipe
    settings = {**os.environ, **liveness.heartbeat_environment(write, 0.1)}
    with subprocess.Popen([sys.executable, "-c", BEAT], env=settings, pass_fds=(write,)) as process:
        os.close(write)
        assert os.read(read, 1) == b"."
        assert os.read(read, 1) == b"."
        process.send_signal(signal.SIGSTOP)
        assert liveness.wait_until_silent(read, 1)
        process.kill()
        process.wait()
        assert not liveness.wait_until_silent(read, 60)


def test_no_heartbeats_without_a_reader(monkeypatch):
    monkeypatch.delenv(liveness.VARIABLE, raising=False)
    liveness.begin()


def test_a_reader_that_is_gone_is_no_error(pipe, monkeypatch):
    read, write = pipe
    os.close(read)
    monkeypatch.setattr(liveness.time, "sleep", lambda _: None)
    liveness._beat(write, 0)
    os.dup2(write, read)
