"""The settings of TensorFlow's channels, as a variable of the environment."""

from __future__ import annotations

import os

import pytest

from trainer.cluster.rejoin import OPTIONS, VARIABLE, find_soon

RESOLVE, CONNECT = "grpc.dns_min_time_between_resolutions_ms", "grpc.min_reconnect_backoff_ms"
AGAIN = "grpc.initial_reconnect_backoff_ms=100"
ALIVE = (
    "grpc.keepalive_time_ms=310000,grpc.http2.ping_timeout_ms=60000,"
    "grpc.keepalive_timeout_ms=120000,grpc.http2.max_pings_without_data=0,"
    "grpc.enable_http_proxy=0"
)
OURS = f"{RESOLVE}=1000,{AGAIN},{CONNECT}=5000,{ALIVE}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", OURS),
        ("grpc.max_receive_message_length=-1", f"grpc.max_receive_message_length=-1,{OURS}"),
        ("grpc.a=1,", f"grpc.a=1,{OURS}"),
        # Another option whose name begins with ours.
        (f"{RESOLVE}_more=7", f"{RESOLVE}_more=7,{OURS}"),
        (f"{RESOLVE}=30000", f"{RESOLVE}=30000,{AGAIN},{CONNECT}=5000,{ALIVE}"),
        (f"{CONNECT}=1, {RESOLVE}=2", f"{CONNECT}=1, {RESOLVE}=2,{AGAIN},{ALIVE}"),
        (f"{OURS},a=1", f"{OURS},a=1"),
    ],
)
def test_tasks_are_found_soon_unless_the_user_has_said_otherwise(monkeypatch, before, after):
    monkeypatch.setenv(VARIABLE, before)
    find_soon()
    assert os.environ[VARIABLE] == after
    # A task may be run twice in a process.
    find_soon()
    assert os.environ[VARIABLE] == after


def test_no_server_takes_the_questions_for_too_many():
    # That of gRPC's servers, for a channel with a call that was sent nothing.
    assert OPTIONS["grpc.keepalive_time_ms"] > 300_000


def test_without_the_variable_it_is_set(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    find_soon()
    assert os.environ[VARIABLE] == OURS
