"""The settings of TensorFlow's channels, as a variable of the environment."""

from __future__ import annotations

import os

import pytest

from trainer.cluster.rejoin import VARIABLE, find_soon

RESOLVE, CONNECT = "grpc.dns_min_time_between_resolutions_ms", "grpc.min_reconnect_backoff_ms"
OURS = f"{RESOLVE}=1000,{CONNECT}=5000"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", OURS),
        ("grpc.max_receive_message_length=-1", f"grpc.max_receive_message_length=-1,{OURS}"),
        ("grpc.a=1,", f"grpc.a=1,{OURS}"),
        # Another option whose name begins with ours.
        (f"{RESOLVE}_more=7", f"{RESOLVE}_more=7,{OURS}"),
        (f"{RESOLVE}=30000", f"{RESOLVE}=30000,{CONNECT}=5000"),
        (f"{CONNECT}=1, {RESOLVE}=2", f"{CONNECT}=1, {RESOLVE}=2"),
    ],
)
def test_tasks_are_found_soon_unless_the_user_has_said_otherwise(monkeypatch, before, after):
    monkeypatch.setenv(VARIABLE, before)
    find_soon()
    assert os.environ[VARIABLE] == after
    # A task may be run twice in a process.
    find_soon()
    assert os.environ[VARIABLE] == after


def test_without_the_variable_it_is_set(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    find_soon()
    assert os.environ[VARIABLE] == OURS
