"""A chief of two servers and two workers that goes on when ps-0 was killed and is started again.

It takes the cluster as JSON. Each line that it prints is JSON; it waits for a line before it runs
into the loss, before it connects again, and before each worker has to reach ps-0.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import keras
import tensorflow as tf

from trainer.models.table_shard import Asked, Noted, Rules, Shard
from trainer.strategies.placement import server_device
from trainer.strategies.remade import Remade, connect_again
from trainer.strategies.turns import Turns

LOST, STAYS = server_device(0), server_device(1)
IDS = [5, 7]


def shard_of() -> Shard:
    """Return a shard of eight slots on ps-0."""
    with tf.device(LOST):
        values = {
            "rows": tf.zeros([9, 2]),
            "ids": tf.zeros([9], tf.int64),
            "used": tf.fill([9], tf.constant(-1, tf.int64)),
            "tally": tf.zeros([6], tf.int64),
        }
        noted = Noted(
            **{name: keras.Variable(each, trainable=False) for name, each in values.items()}
        )
        rules = Rules(min_count=1, min_age=0, max_age=0)
        return Shard(noted, 8, rules, lambda _, count, __: tf.zeros([count, 2]))


class Chief:
    """What is on the servers, and the step of the workers."""

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
        """Make all of it."""
        self.coordinator = coordinator
        with tf.device(LOST):
            self.lost = tf.Variable([0.0, 0.0], trainable=False)
            self.applied = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.turns = Turns(2, self.applied)
        with tf.device(STAYS):
            self.stays = tf.Variable([0.0], trainable=False)
        self.shard = shard_of()
        made = coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(9).repeat())
        self.batches = iter(made)
        self.step = tf.function(self._step)

    def _step(self, batches: Any, closure: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        own = self.turns.begin(closure)
        next(batches)
        slots = tf.constant(-1, tf.int64)
        if self.turns.take(own):
            for each in (self.lost, self.stays):
                with tf.device(each.device):
                    each.assign_add(tf.ones_like(each), read_value=False)
            with tf.device(LOST):
                ids = tf.constant(IDS, tf.int64)
                asked = Asked(keys=ids, checks=ids[:0], counts=tf.ones_like(ids))
                slots = tf.reduce_sum(self.shard.admitted(asked, None))
            self.applied.assign_add(1, read_value=False)
        return own[1], slots

    def run(self, count: int) -> tuple[int, list[int]]:
        """Take so many steps; return the highest number of a run, and the sums of slots."""
        self.turns.deal(count)
        ended = [
            self.coordinator.schedule(self.step, args=(self.batches, tf.constant(n, tf.int64)))
            for n in range(count)
        ]
        self.coordinator.join()
        made = [each.fetch() for each in ended]
        return max(int(run) for run, _ in made), sorted({int(slots) for _, slots in made})

    def lose(self) -> str:
        """Take steps until a loss is noticed; return the error's type."""
        try:
            for _ in range(9):
                self.run(4)
        except tf.errors.OpError as error:
            return type(error).__name__
        return ""

    def rejoin(self) -> dict[str, Any]:
        """Connect again, and give ps-0 other values; return what was made."""
        connect_again(self.coordinator)
        self.remade = remade = Remade([0])
        noted = self.shard.noted
        variables = [
            *(self.lost, self.stays, self.applied, *self.shard.unsaved),
            *(each.value for each in (noted.rows, noted.ids, noted.used, noted.tally)),
        ]
        made = [remade.variable(each) for each in variables]
        again = [remade.variable(each) for each in (self.lost, self.stays)]
        before = (self.shard.map, self.shard.mutex)
        self.shard.make_map()
        for old, new in zip(before, (self.shard.map, self.shard.mutex), strict=True):
            remade.handle(old, new)
        were_lost = self.turns.remake(remade)
        self.lost.assign([100.0, 200.0])
        noted.ids.assign([0, *IDS, *[0] * 6])
        noted.used.assign([-1, 1, 1, *[-1] * 6])
        self.shard.restored()
        remade.rebind()
        remade.require_reached(2)
        return {"made": made, "again": again, "were_lost": were_lost}

    def values(self) -> dict[str, Any]:
        """Return the values on both servers."""
        of_both = {"lost": self.lost.numpy().tolist(), "stays": self.stays.numpy().tolist()}
        return {**of_both, "applied": int(self.applied.numpy())}


def say(**found: Any) -> None:
    """Write a line."""
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


def main() -> None:
    """Take steps before and after the loss."""
    cluster = tf.train.ClusterSpec(json.loads(sys.argv[1]))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    chief = Chief(tf.distribute.coordinator.ClusterCoordinator(strategy))
    newest, slots = chief.run(20)
    traced = chief.step.experimental_get_tracing_count()
    say(slots=slots, **chief.values())
    sys.stdin.readline()
    say(error=chief.lose())
    sys.stdin.readline()
    made = chief.rejoin()
    stayed = chief.values()["stays"]
    later, slots = chief.run(10)
    traced = chief.step.experimental_get_tracing_count() - traced
    is_later = later > newest
    say(slots=slots, is_later=is_later, traced=traced, stayed=stayed, **made, **chief.values())
    sys.stdin.readline()
    try:
        chief.remade.require_reached(2)
    except tf.errors.OpError as error:
        say(error=type(error).__name__)
    # Threads of the coordinator wait for more.
    os._exit(0)


if __name__ == "__main__":
    main()
