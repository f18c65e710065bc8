"""The copies of a run on servers, by names: servers outlive a chief, and the next one finds them.

A copy is a number of variables with the token of the copy in their names. Two more say what it is:

- The registry, of a name that is known from the run alone: which copy of which variables.
- What the attempt that writes it counts in, of a name of its own: the global step of the copy, how
  often it was written, and the newest checkpoint that was published by then. A server ends what a
  chief that dies runs there between two operations. So each write counts before and after: an odd
  number says that the copy is torn. It stays odd after a write that has failed.

The first operation of a write needs what it counts in. A chief that was taken for dead, and lives,
fails there when the next attempt has removed that, and changes nothing of the copy. Nor does it
remove any at its end: it knows its own by the name of what it counts in.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from trainer.checkpoints.checkpoints import Checkpoints
from trainer.config.data import DYNAMIC
from trainer.config.schema import Config
from trainer.strategies.parameter_server import Served
from trainer.strategies.placement import fetched, operating_at, server_device
from trainer.strategies.remade import Remade
from trainer.strategies.strategy import Strategy

log = logging.getLogger(__name__)
# The last fields of a `Left` that was never complete.
_NOTHING = (-1, 0, -1)
# Of `Left`, and of what a copy has: the chief of a version with another form looks for other names,
# as servers may be older than it. To be counted up with each change.
FORM = 1


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a server says of the copy of a run that it has.

    Attributes:
        token: in the names of the copy's variables.
        writer: in the name of what the attempt that wrote it counts in.
        layout: of its variables; see `layouts_of`.
        count: of its variables.
        of: how many such copies the attempt had on servers.
        global_step: its own; -1 where it was never complete.
        writes: an odd number where one has begun and not ended.
        saved: the global step of the newest checkpoint that was published by then; -1: of none.
    """

    token: int
    writer: int
    layout: int
    count: int
    of: int
    global_step: int
    writes: int
    saved: int

    @property
    def is_whole(self) -> bool:
        """Whether all of its values may be used."""
        return self.global_step >= 0 and self.writes % 2 == 0


def run_of(uri: str) -> str:
    """Return what the names of the copies of a run begin with; `uri` is that of its checkpoints."""
    return f"snapshot-{FORM}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"


def left_on(run: str, servers: Iterable[int]) -> dict[int, Left]:
    """Return what servers have of a run, by their numbers.

    Raises:
        OpError: of TensorFlow, where a server is gone.
    """
    found = {}
    for server in servers:
        if registered := _values(_registry(run, server)):
            token, writer, *others = registered
            counted = _values(_counts(run, server, writer)) or _NOTHING
            names = (each.name for each in fields(Left))
            values = (token, writer, *others, *counted)
            found[server] = Left(**dict(zip(names, values, strict=True)))
    return found


def forget(run: str, servers: Iterable[int], writers: Collection[int] | None = None) -> None:
    """Free the memory of what servers have of a run, or of what some writers have written of it.

    Raises:
        OpError: of TensorFlow, where a server is gone.
    """
    for server, left in left_on(run, servers).items():
        if writers is not None and left.writer not in writers:
            continue
        # What counts its writes first: none begins from then on.
        _destroy(_counts(run, server, left.writer))
        for number in range(left.count):
            _destroy(_named([], tf.float32, server, f"{run}-{server}-{left.token}-{number}"))
        _destroy(_registry(run, server))


class LeftCopies:
    """What an earlier attempt of a run has left on the servers, as far as this one may use it."""

    def __init__(
        self, config: Config, strategy: Strategy, checkpoints: Checkpoints | None = None
    ) -> None:
        """Describe it; `checkpoints` are those of the run. Nothing is looked for yet."""
        self._config, self._strategy, self._checkpoints = config, strategy, checkpoints
        #: In the names of what this attempt counts in.
        self.writer = secrets.randbits(60)
        #: What may be used, by the servers that have it.
        self.left: dict[int, Left] = {}
        #: Of the variables of this attempt; see `layouts_of`.
        self.layouts: Mapping[int, int] = {}
        #: What the names of copies begin with; empty where nobody would find them.
        self.run = ""
        self._servers = range(0)
        if isinstance(strategy, Served) and strategy.publishes and checkpoints:
            self.run, self._servers = run_of(checkpoints.uri), range(strategy.cluster.count("ps"))

    def find(self, saved: int | None) -> int:
        """Look on the servers for what is newer than the newest checkpoint.

        Args:
            saved: the global step of that; None where there is none.

        Returns: the global step at which the attempt begins. What may not be used is removed.

        Raises:
            OpError: of TensorFlow, where a server is gone.
        """
        start = saved or 0
        if not self.run or not isinstance(self._strategy, Served):
            return start
        self._strategy.connect()
        self.left = left_on(self.run, self._servers)
        if not self.left:
            return start
        steps = [each.global_step for each in self.left.values()]
        if max(steps) <= (-1 if saved is None else saved):
            self.left = {}
            self.forget()
            return start
        reasons = {
            "no checkpoint is published": saved is None,
            "cluster.snapshot_seconds is not set": not self._config.cluster.snapshot_seconds,
            whole_only(self._config, self._strategy): True,
            "some of them are gone": any(e.of != len(self.left) for e in self.left.values()),
            "one of them is not complete": not all(e.is_whole for e in self.left.values()),
            "a checkpoint that was published before them is gone": self._are_without_checkpoint(),
            "the newest checkpoint is as new as one of them": min(steps) <= start,
        }
        if reason := next((reason for reason, is_so in reasons.items() if reason and is_so), ""):
            self._remove(reason)
            return start
        return min(steps)

    def _are_without_checkpoint(self) -> bool:
        # Who deletes a checkpoint does not want what came of it.
        there = self._checkpoints.newest_step() if self._checkpoints else -1
        return any(each.saved > there for each in self.left.values())

    def published(self) -> int:
        """Return the global step of the newest checkpoint that this attempt knows is published."""
        return self._checkpoints.published_step if self._checkpoints else -1

    def require(self, layouts: Mapping[int, int], *, of_all: bool) -> None:
        """Remove what is of other variables.

        `layouts` are those of this attempt, which are `of_all` of its variables or not.
        """
        self.layouts = layouts
        found = {server: each.layout for server, each in self.left.items()}
        if found and not (of_all and found == layouts):
            self._remove("they are of other variables, or of another training.freeze")

    def _remove(self, reason: str) -> None:
        steps = max(each.global_step for each in self.left.values())
        log.warning(
            "snapshots up to global step %d, which a chief has left on the servers, are not used: "
            "%s",
            steps,
            reason,
        )
        self.left = {}
        self.forget()

    def forget(self) -> None:
        """Free the memory of all that servers have of the run."""
        if self.run:
            forget(self.run, self._servers)

    def forget_own(self) -> None:
        """Free the memory of what is of this attempt, or was found by it."""
        if self.run:
            writers = {self.writer, *(each.writer for each in self.left.values())}
            forget(self.run, self._servers, writers)


def whole_only(config: Config, strategy: Strategy) -> str:
    """Return why no variables may have values of another step than the others, or nothing."""
    wanted = config.cluster.recovery
    reasons = {
        "cluster.recovery is full": wanted == "full",
        "cluster.recovery is auto, and training is synchronous": wanted == "auto"
        and not strategy.mixes_steps,
        "data.partition is dynamic: no example may count twice": config.data.partition == DYNAMIC,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


class Entry:
    """What a server says of its copy: which it is (the registry), and how far it has come.

    `counts` has the last three fields of a `Left`: int64 [3].
    """

    def __init__(self, before: LeftCopies, peer: int, sizes: tuple[int, int]) -> None:
        """Describe a copy; `sizes` are `count` and `of` of a `Left`.

        Its variables are those of what was left on its server, or new ones.
        """
        self.peer = peer
        self._run, self._writer = before.run, before.writer
        self._rest = (before.layouts[peer], *sizes)
        self.counts = _counts(self._run, peer, self._writer)
        left = before.left.get(peer)
        self.is_new = left is None
        self._token = left.token if left else secrets.randbits(60)

    def register(self, left: Left | None = None) -> None:
        """Say on the server what it has: nothing, or what was `left`."""
        counted = (left.global_step, 0, left.saved) if left else _NOTHING
        with operating_at(server_device(self.peer)):
            self.counts.assign(tf.constant(counted, tf.int64))
            values = (self._token, self._writer, *self._rest)
            _registry(self._run, self.peer).assign(tf.constant(values, tf.int64))

    def is_as(self, left: Left) -> bool:
        """Say whether nothing was written since it was `left`, and let no other attempt write."""
        counts = _counts(self._run, self.peer, left.writer)
        found = _values(counts)
        _destroy(counts)
        return found == (left.global_step, left.writes, left.saved)

    def count(self, writes: tf.Tensor) -> tf.Operation:
        """Say how often the copy was written, in a graph."""
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self.counts.handle, indices=[1], updates=writes[None]
        )

    def complete(self, steps: tf.Tensor) -> tf.Operation:
        """Say of which global step it is, and of which the newest checkpoint, in a graph."""
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self.counts.handle, indices=[0, 2], updates=steps
        )

    def variable(self, number: int, value: tf.Tensor) -> tf.Variable:
        """Return a variable of the copy by its number, with a first value where it is new."""
        name = f"{self._run}-{self.peer}-{self._token}-{number}"
        made = _named(value.shape, value.dtype, self.peer, name)
        made.assign(value, read_value=False)
        return made

    def made(self, number: int, like: tf.Variable) -> tf.Variable:
        """Return a variable of the copy by its number: of zeros, or what was left."""
        if self.is_new:
            return self.variable(number, tf.zeros(like.shape, like.dtype))
        name = f"{self._run}-{self.peer}-{self._token}-{number}"
        return _named(like.shape, like.dtype, self.peer, name)

    def remake(self, remade: Remade) -> None:
        """Say it again on a server that was started again."""
        remade.variable(self.counts, make=lambda _: _counts(self._run, self.peer, self._writer))
        self.register()


def _named(shape: Any, dtype: Any, server: int, name: str) -> tf.Variable:
    """Return the variable of a server that has a name; without a value where there is none."""
    with tf.device(server_device(server)):
        handle = tf.raw_ops.VarHandleOp(shape=shape, dtype=dtype, shared_name=name)
    # As TensorFlow does for its own, which must not have a name.
    handle._handle_data = handle_data_util.create_handle_data(tf.TensorShape(shape), dtype)
    return BaseResourceVariable(
        handle=handle, shape=shape, dtype=dtype, trainable=False, handle_name=name, unique_id=name
    )


def _registry(run: str, server: int) -> tf.Variable:
    """Return the first five fields of a `Left`: int64 [5]."""
    return _named([5], tf.int64, server, f"{run}-{server}")


def _counts(run: str, server: int, writer: int) -> tf.Variable:
    """Return the last three fields of a `Left`: int64 [3]."""
    return _named([3], tf.int64, server, f"{run}-{server}-by-{writer}")


def _values(variable: tf.Variable) -> tuple[int, ...] | None:
    """Return the numbers of a variable; None where it is not there."""
    with operating_at(variable.device):
        if not fetched(tf.raw_ops.VarIsInitializedOp(resource=variable.handle)):
            return None
        return tuple(map(int, fetched(variable.read_value())))


def _destroy(variable: tf.Variable) -> None:
    with operating_at(variable.device):
        tf.raw_ops.DestroyResourceOp(resource=variable.handle, ignore_lookup_error=True)
