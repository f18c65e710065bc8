"""Queries a TensorFlow server for its devices: `python -m tests.cluster.asks TARGET`.

Like a chief, it sends all queries on one channel: one at the start, and one per input line.
"""

import sys
import time

import tensorflow as tf

from flotilla.trainer.cluster import liveness
from flotilla.trainer.runtime import signals
from tests.cluster.lead import say


def main() -> None:
    signals.end_with_parent()
    liveness.find_tasks_soon()
    session = tf.compat.v1.Session(sys.argv[1])
    say(devices=_devices(session))
    for _ in sys.stdin:
        say(devices=_devices(session))


def _devices(session: tf.compat.v1.Session) -> int:
    while True:
        try:
            return len(session.list_devices())
        except tf.errors.UnavailableError:
            # A call to an unreachable server fails immediately, and gRPC does not report a
            # reconnection, so poll.
            time.sleep(0.2)


if __name__ == "__main__":
    main()
