"""The variables of a run on servers, by names: servers outlive a chief, and the next one goes on.

TensorFlow's variables have no names, and end with the process that made them. So a chief gives all
that servers hold for a run names: the variables of a checkpoint, what tables that grow have
besides, and turns. A random token is in them, so that no two attempts that began anew share any.
The next chief takes what is there, and no value is sent.

Two more say what it is:

- A `Left` on each server, of a name that is known from the run alone. That of `ps-0` is kept up to
  date; the others tell which servers were started again since.
- The permit of the chief, on `ps-0`. What it changes itself, and not by its workers, needs the
  permit: one that was taken for dead, and lives, fails there when the next one has removed it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields, replace
from itertools import zip_longest
from typing import Any, NoReturn

import tensorflow as tf

from trainer.config.data import DYNAMIC
from trainer.config.schema import Config
from trainer.strategies.placement import fetched, in_own_line, operating_at, server_device
from trainer.strategies.remade import Remade, with_data, with_name
from trainer.strategies.strategy import Strategy

log = logging.getLogger(__name__)
# Of a `Left`, and of what has names: the chief of a version with another form looks for other ones,
# as servers may be older than it. To be counted up with each change.
FORM = 5
# What does not answer for so long is taken as gone.
ANSWER_SECONDS = 10.0
# The counter of steps, whose number is 0.
STEP = "global_step"
_PLACES, _GRAPH = "places", "graph"


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a server says of the variables of a run.

    Attributes:
        token: in their names.
        writer: in the name of the permit of the chief that had them last.
        layout: says which variables they are, and on which servers.
        variables: how many there are.
        placed: how many of them the model has made; `ps-0` has a list of their servers.
        maps: how many shards of tables that grow.
        is_whole: 1 where all have values to go on from; 0 while the chief assigns some.
        saved: the global step of the newest checkpoint that was published by then; -1: of none.
        noted: when that was noted, in seconds since 1970.
    """

    token: int
    writer: int
    layout: int
    variables: int
    placed: int
    maps: int
    is_whole: int
    saved: int
    noted: int


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


class MisfitError(Exception):
    """What was left is of other variables than those of this chief, and is removed."""


class LeftVariables:
    """What an earlier chief of a run has left on the servers, and what this one leaves."""

    def __init__(self, uri: str, servers: int) -> None:
        """Look for what is left of a run; the cluster has to be connected.

        Args:
            uri: of its checkpoints.
            servers: how many there are.

        Raises:
            OpError: of TensorFlow, where a server is gone.
        """
        self._run = f"run-{FORM}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"
        self._servers = range(servers)
        self._states = [
            self._named([len(fields(Left))], tf.int64, server, f"{self._run}-{server}")
            for server in self._servers
        ]
        self._writer, self._token = secrets.randbits(60), secrets.randbits(60)
        #: Of this chief. Its value does not matter.
        self.permit = self._permit(self._writer)
        # What is left on each server that has something.
        self._found = self._find()
        for each in self._found.values():
            # From here on nobody else changes what is there.
            _destroy(self._permit(each.writer))
        self._found = self._find() if self._found else {}
        #: Whether this chief goes on with it.
        self.is_taken = False
        #: The servers of the variables of the model, in their order, where it is to.
        self.places: Sequence[int] = ()
        #: The graph of the chief before, and of this one (`trainer.strategies.left_graphs`).
        self.found_graph = self.graph = b""
        #: The names of variables by their `id`; they live as long as this.
        self.names = {id(each): f"{self._run}-{n}" for n, each in enumerate(self._states)}
        self.names[id(self.permit)] = self._of_writer(self._writer)
        self._variables: Sequence[tf.Variable] = ()
        self._said: Left | None = None
        self._set = tf.function(
            self._setting, autograph=False, input_signature=[tf.TensorSpec([None], tf.int64)]
        )

    def begins_at(self, saved: int, newest: Callable[[], int], refused: str = "") -> int:
        """Return the global step at which an attempt begins; remove what it may not go on from.

        Args:
            saved: that of the newest checkpoint that can be read; -1: of none.
            newest: returns that of the newest one, read or not; -1 where there is none.
            refused: why nothing may be taken, if so.

        Raises:
            OpError: of TensorFlow, where a server is gone.
        """
        start = max(saved, 0)
        if not self._found:
            return start
        left = self._found.get(0)
        others = {each.token for each in self._found.values()}
        is_whole = bool(left and left.is_whole)
        reached = self._global_step(left) if left and is_whole else -1
        places = self._places_of(left) if left and is_whole else []
        reasons = {
            refused: True,
            "no checkpoint is published": saved < 0,
            "a server was started again": len(self._found) < len(self._servers) or len(others) > 1,
            "the chief was assigning values": not is_whole,
            "there were more servers": max(places, default=0) >= len(self._servers),
            # Who deletes a checkpoint does not want what came of it.
            "a checkpoint that was published before is gone": left and left.saved > newest(),
            "the newest checkpoint is newer": reached < start,
        }
        reason = next((reason for reason, is_so in reasons.items() if reason and is_so), "")
        if reason or not left:
            self._remove(reason)
            return start
        self.places = places
        self._take_graph(left)
        return reached

    def take(
        self,
        variables: Mapping[str, tf.Variable],
        parts: Sequence[Any],
        described: Any,
        places: Sequence[int],
    ) -> bool:
        """Give variables their names; return whether they have the values that were left.

        To be called before anything is traced with them.

        Args:
            variables: of this chief on the servers, by what they are; that of `STEP` first.
            parts: the shards of tables that grow.
            described: what else has to be the same for them to be the same, as JSON has it.
            places: the servers of the variables of the model, in the order in which they were made.

        Raises:
            OpError: of TensorFlow, where a server is gone.
            MisfitError: what was left is of other variables.
        """
        if next(iter(variables)) != STEP:
            raise AssertionError("the counter of steps is not the first one")
        self._variables = list(variables.values())
        layout = _layout(variables, parts, described)
        with in_own_line():
            left = self._found.get(0)
            if left and left.layout != layout:
                self.refuse("it is of other variables, workers, snapshots or training.freeze")
            self.is_taken = left is not None
            sizes = {"variables": len(variables), "placed": len(places), "maps": len(parts)}
            said = left or self._new(layout, sizes)
            with tf.device(server_device(0)):
                self.permit.assign(1)
            # Before there is anything that nobody else would find.
            self._register(replace(said, writer=self._writer))
            self.places, self._placed = places, self._list_of_places(said)
            self._placed.assign(places)
            self.names[id(self._placed)] = self._name(said, _PLACES)
            if not left:
                self._take_graph(said)
            self._rename_all(said)
            for number, part in enumerate(parts):
                part.rename(*_of_map(self._name(said, number)))
        return self.is_taken

    def _take_graph(self, said: Left) -> None:
        self._graph = self._named([], tf.string, 0, name := self._name(said, _GRAPH))
        self.names[id(self._graph)] = name
        with operating_at(self._graph.device):
            if self._found:
                self.found_graph = bytes(fetched(self._graph.read_value()))
            # One that ends its chief is not there for the next one.
            self._graph.assign("")

    def leave_graph(self, graph: bytes) -> None:
        """Leave a graph for the next chief; raises as `settle` does."""

        def leave(graph: tf.Tensor) -> None:
            # Nobody frees it where this chief was taken for dead.
            with tf.control_dependencies([self.permit.read_value()]):
                self._graph.assign(graph, read_value=False)

        self.graph = graph
        with operating_at(self._graph.device):
            tf.function(leave, autograph=False)(tf.constant(graph))

    def _new(self, layout: int, sizes: Mapping[str, int]) -> Left:
        return Left(
            token=self._token,
            writer=self._writer,
            layout=layout,
            is_whole=0,
            saved=-1,
            noted=int(time.time()),
            **sizes,
        )

    def refuse(self, reason: str) -> NoReturn:
        """Remove what is left, which is of other variables; raises `MisfitError`."""
        self._remove(reason)
        self.places, self.found_graph = (), b""
        self.names.pop(id(self._graph), None)
        raise MisfitError

    def settle(self, *, is_whole: bool) -> None:
        """Say whether the variables have values that training may go on from.

        Raises:
            OpError: of TensorFlow, where a server is gone, or another chief has taken them.
        """
        if self._said and self._said.is_whole != is_whole:
            self._change(replace(self._said, is_whole=int(is_whole)))

    def note(self, saved: int) -> None:
        """Say of which global step the newest published checkpoint is.

        Raises:
            OpError: as of `settle`.
        """
        if self._said and self._said.saved != saved:
            self._change(replace(self._said, saved=saved, noted=int(time.time())))

    def seconds_since_save(self) -> float | None:
        """Return how long ago the newest checkpoint was noted by the chief before.

        It is None where this one does not go on with what that one has left.
        """
        return max(0.0, time.time() - self._found[0].noted) if self.is_taken else None

    def remake(self, remade: Remade) -> None:
        """Say it again on servers that were started again; no variable is whole until `settle`."""
        if not self._said:
            return
        # Where the permit is gone with its server, nobody else has taken what was there.
        if not remade.variable(self.permit, tf.ones):
            self._change(replace(self._said, is_whole=0))
        for each in self._states:
            remade.variable(each)
        self._register(replace(self._said, is_whole=0))
        if remade.variable(self._placed):
            self._placed.assign(self.places)
        if remade.variable(self._graph):
            self._graph.assign(self.graph)

    def forget(self) -> None:
        """Free the memory of what has names, where servers answer, and no other chief took it."""

        def free() -> None:
            with suppress(tf.errors.OpError):
                self._found = self._find()
                if 0 in self._found and self._found[0].writer == self._writer:
                    self._free()

        # Where a job is stopped, its servers may be gone without a word.
        thread = threading.Thread(target=free, name="forget", daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)

    def _remove(self, reason: str) -> None:
        log.warning("what a chief has left on the servers is not used: %s", reason)
        self._free()

    def _rename_all(self, said: Left) -> None:
        """Give the variables of each server their names, in one message; else it is one for each.

        Without what was left they keep their values: no value is copied, as it is shared with the
        variable without a name, which ends.
        """
        on = dict[str, list[int]]()
        for number, each in enumerate(self._variables):
            on.setdefault(each.device, []).append(number)
        for device, numbers in on.items():
            # As arguments: a graph would keep what it was traced with.
            before = [] if self.is_taken else [self._variables[n].handle for n in numbers]
            with tf.device(device):
                handles = tf.function(self._handles, autograph=False)(said, tuple(numbers), before)
            for number, handle in zip(numbers, handles, strict=True):
                variable = self._variables[number]
                variable._handle = with_data(handle, variable.shape, variable.dtype)
                self.names[id(variable)] = self._name(said, number)

    def _handles(
        self, said: Left, numbers: Sequence[int], before: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        made = []
        for number, old in zip_longest(numbers, before):
            each = self._variables[number]
            handle = tf.raw_ops.VarHandleOp(
                shape=each.shape, dtype=each.dtype, shared_name=self._name(said, number)
            )
            if old is not None:
                value = tf.raw_ops.ReadVariableOp(resource=old, dtype=each.dtype)
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            made.append(handle)
        return made

    def _register(self, said: Left) -> None:
        self._said = said
        for each in self._states:
            with tf.device(each.device):
                each.assign(tf.constant(astuple(said), tf.int64), read_value=False)

    def _change(self, said: Left) -> None:
        with operating_at(server_device(0)):
            self._set(tf.constant(astuple(said), tf.int64))
        self._said = said

    def _setting(self, said: tf.Tensor) -> None:
        with tf.device(server_device(0)), tf.control_dependencies([self.permit.read_value()]):
            self._states[0].assign(said, read_value=False)

    def _places_of(self, left: Left) -> list[int]:
        placed = self._list_of_places(left)
        with operating_at(placed.device):
            return [int(each) for each in fetched(placed.read_value())]

    def _list_of_places(self, left: Left) -> tf.Variable:
        return self._named([left.placed], tf.int64, 0, self._name(left, _PLACES))

    def _find(self) -> dict[int, Left]:
        """Return what each server has of the run."""
        found = {}
        for server, state in enumerate(self._states):
            with operating_at(state.device):
                if fetched(tf.raw_ops.VarIsInitializedOp(resource=state.handle)):
                    values = map(int, fetched(state.read_value()))
                    names = (each.name for each in fields(Left))
                    found[server] = Left(**dict(zip(names, values, strict=True)))
        return found

    def _global_step(self, left: Left) -> int:
        step = self._named([], tf.int64, 0, self._name(left, 0))
        with operating_at(step.device):
            return int(fetched(step.read_value()))

    def _free(self) -> None:
        for server, left in self._found.items():
            # Who still writes fails first; who dies here leaves what the next one frees.
            _destroy(self._permit(left.writer))
            state = self._states[server]
            with operating_at(state.device):
                state.assign(tf.constant(astuple(replace(left, is_whole=0)), tf.int64))
                tf.function(self._freeing, autograph=False)(left)
            _destroy(state)
        self._found = {}

    def _freeing(self, left: Left) -> None:
        names = [self._name(left, number) for number in range(max(left.variables, left.maps))]
        others = [self._name(left, each) for each in (_PLACES, _GRAPH)]
        handles = [
            tf.raw_ops.VarHandleOp(shape=[], dtype=tf.float32, shared_name=name)
            for name in [*names[: left.variables], *others]
        ]
        for ids, mutex in map(_of_map, names[: left.maps]):
            # As a shard makes it; one of another kind would be another resource.
            handles.append(
                tf.raw_ops.MutableHashTableV2(
                    key_dtype=tf.int64, value_dtype=tf.int64, shared_name=ids
                )
            )
            handles.append(tf.raw_ops.MutexV2(shared_name=mutex))
        for each in handles:
            tf.raw_ops.DestroyResourceOp(resource=each, ignore_lookup_error=True)

    def _name(self, left: Left, what: int | str) -> str:
        return f"{self._run}-{left.token}-{what}"

    def _permit(self, writer: int) -> tf.Variable:
        return self._named([], tf.int64, 0, self._of_writer(writer))

    def _of_writer(self, writer: int) -> str:
        return f"{self._run}-by-{writer}"

    @staticmethod
    def _named(shape: Sequence[int], dtype: tf.DType, server: int, name: str) -> tf.Variable:
        return with_name(shape, dtype, server_device(server), name)


def _layout(variables: Mapping[str, tf.Variable], parts: Sequence[Any], described: Any) -> int:
    of = [
        (name, each.shape.as_list(), each.dtype.name, each.device)
        for name, each in variables.items()
    ]
    text = json.dumps([of, [each.device for each in parts], described])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _of_map(name: str) -> tuple[str, str]:
    """Return the names of the map and the mutex of a shard of a table."""
    return f"{name}-ids", f"{name}-mutex"


def _destroy(variable: tf.Variable) -> None:
    with operating_at(variable.device):
        tf.raw_ops.DestroyResourceOp(resource=variable.handle, ignore_lookup_error=True)
