"""A task that comes back at another address is found there soon, and one that is cut off is lost.

A channel of gRPC resolves a name again at most every 30 s, and waits 20 s for an address at which
nobody answers. A machine without power closes no connection: a channel asks for a sign after
minutes of silence, and gives up without one. See `docs/decisions/0021-liveness.md`.
"""

from __future__ import annotations

import os

# Read by TensorFlow once, when a process opens its first channel: NAME=NUMBER,NAME=NUMBER.
VARIABLE = "TF_GRPC_DEFAULT_OPTIONS"
OPTIONS = {
    # As often as TensorFlow's channels try to connect.
    "grpc.dns_min_time_between_resolutions_ms": 1000,
    # Tried again so soon after a connection was refused, then more and more seldom. Else after 1 s.
    "grpc.initial_reconnect_backoff_ms": 100,
    # How long gRPC waits for a connection, whatever its name says. Within it two lost packets of
    # TCP are sent again, and a task that starts does not serve before it is over.
    "grpc.min_reconnect_backoff_ms": 5000,
    # gRPC's servers close a channel that asks more than twice within 300 s without having been sent
    # anything, as in a call that lasts for hours, and no option of TensorFlow's changes that.
    "grpc.keepalive_time_ms": 310_000,
    "grpc.http2.ping_timeout_ms": 60_000,
    # gRPC sets TCP_USER_TIMEOUT to it: how long bytes that were sent may be unacknowledged. Not
    # shorter than a task may be stopped or swapped out, by `training.stall_timeout`.
    "grpc.keepalive_timeout_ms": 120_000,
    # Asked again for as long as a call lasts; otherwise twice.
    "grpc.http2.max_pings_without_data": 0,
    # Not through a proxy that the environment names for the web: it knows no task, and calls to
    # loopback would hang.
    "grpc.enable_http_proxy": 0,
}


def find_soon() -> None:
    """Have the channels of this process, not yet connected, find a task at its new address."""
    given = [each for each in os.environ.get(VARIABLE, "").split(",") if each]
    names = {each.partition("=")[0].strip() for each in given}
    added = [f"{name}={value}" for name, value in OPTIONS.items() if name not in names]
    os.environ[VARIABLE] = ",".join([*given, *added])
