"""A chief that checks turns repeatedly: `python -m tests.cluster.looking SPEC`."""

import json
import os
import sys
from pathlib import Path

import psutil
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import from_tf_config
from flotilla.trainer.runtime import signals
from flotilla.trainer.strategies.parameter_server import Served
from flotilla.trainer.strategies.placement import server_device
from flotilla.trainer.strategies.self_scheduling import Turns
from flotilla.trainer.strategies.strategy import create
from tests.cluster.lead import say

FIRST, MORE = 500, 3000


def main() -> None:
    """Check turns until the server's memory is allocated, then measure how much it grows."""
    signals.end_with_parent()
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    strategy = create(parse_config(spec["config"]), *from_tf_config(os.environ["TF_CONFIG"]))
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
