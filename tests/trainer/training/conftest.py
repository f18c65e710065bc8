"""The loss of parameter servers, without servers."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import tensorflow as tf

from trainer.checkpoints import joined
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.joined import Joined
from trainer.cluster.lease import NoLease
from trainer.config.load import parse_config
from trainer.events import heard_by
from trainer.strategies.async_parameter_server import AsyncParameterServer
from trainer.strategies.strategy import Strategy
from trainer.topology import Cluster
from trainer.training import recovery
from trainer.training.recovery import Recovery

CLUSTER = Cluster(
    addresses={
        "chief": ("localhost:1",),
        "ps": ("localhost:2", "localhost:3"),
        "worker": ("localhost:4",),
    }
)


FIELDS = {"metrics": {"loss": 0.5, "validation_loss": 0.25}}


def snapshots_of(copies):
    """Return the snapshots of an attempt that has these copies of servers."""
    made = create_autospec(recovery.ServerSnapshots, instance=True)
    made.of.side_effect = lambda lost, _noticed: {n: copies[n] for n in lost if n in copies}
    return made


def strategy_of(rejoin):
    """Return a strategy that goes on with lost servers by `rejoin`, where that is given."""
    made = create_autospec(AsyncParameterServer if rejoin else Strategy, instance=True)
    if rejoin:
        made.configure_mock(rejoins=True, cluster=CLUSTER, io_device=None)
        made.rejoin.side_effect = rejoin
    made.variables.return_value = {joined.STEP: tf.Variable(0, dtype=tf.int64)}
    return made


@pytest.fixture
def lose(monkeypatch):
    """Let servers be lost at step 500 of 1500 after a checkpoint at 400; return what is said."""
    seen = SimpleNamespace(saved=[], checkpoints=None, goes_on=None, prepare=lambda _: None)

    def save(*_, **options):
        seen.saved.append(options)
        return Joined(uri="file:///step-510", global_step=510, back_to=400)

    def lost(  # noqa: PLR0913
        tree=None,
        *,
        gone=(1,),
        mixes=True,
        whole=True,
        save=save,
        steps=(500, 400),
        halt=None,
        copies=None,
        published=None,
        rejoin=None,
        stops=lambda: False,
    ):
        read_step, newest = steps
        strategy = strategy_of(rejoin)
        strategy.configure_mock(read_step=read_step, mixes_steps=mixes, publishes=True)
        strategy.global_step.return_value = read_step
        strategy.halt.side_effect = halt
        seen.checkpoints = create_autospec(Checkpoints, instance=True, lease=NoLease())
        seen.checkpoints.newest_step.side_effect = [newest, published or newest]
        seen.checkpoints.parts = None
        seen.prepare(seen.checkpoints)
        monkeypatch.setattr(joined, "held_by", lambda _: {0: {}, 1: {"table": None}, 2: {}})
        monkeypatch.setattr(joined, "lost_of", lambda *_: set(gone))
        monkeypatch.setattr(joined, "save", save)
        heard = []
        error = tf.errors.UnavailableError(None, None, "it is gone")
        config, snapshots = parse_config(tree or {}), snapshots_of(copies or {})
        with heard_by(heard.append):
            made = Recovery(config, strategy, seen.checkpoints, lambda: FIELDS, snapshots, stops)
            seen.goes_on = made.goes_on(error, is_whole=whole)
        return heard

    seen.lose = lost
    return seen
