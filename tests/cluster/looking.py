"""A chief that checks turns repeatedly: `python -m tests.cluster.looking SPEC`."""

import psutil
import tensorflow as tf

from flotilla.trainer.strategies.async_parameter_server import Turns
from flotilla.trainer.strategies.parameter_server import Served
from flotilla.trainer.strategies.placement import server_device
from tests.cluster.lead import begin, say

FIRST, MORE = 500, 3000


def main() -> None:
    """Check turns until the server's memory is allocated, then measure how much it grows."""
    spec, strategy = begin()
    assert isinstance(strategy, Served)
    strategy.connect()
    with tf.device(server_device(0)):
        turns = Turns(1, tf.Variable(0, dtype=tf.int64))
    server = psutil.Process(spec["pid"])
    for _ in range(FIRST):
        turns.look()
    before = server.memory_info().rss
    for _ in range(MORE):
        turns.look()
    say(grown=server.memory_info().rss - before)


if __name__ == "__main__":
    main()
