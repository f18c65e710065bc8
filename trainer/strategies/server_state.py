"""The variables of a run on parameter servers, by names: servers outlive an attempt of a chief.

TensorFlow's variables have no names, and end with the process that made them. So a chief gives all
that servers hold for a run names: the variables of a checkpoint, what tables that grow have
besides, and turns. A random token is in them, so that no two runs of values share any. The next
attempt takes what is there, whether the chief died, or some of the servers with what they held. No
value is sent.

Two more variables say what it is:

- A `State` on each server, of a name that is known from the run alone. A server that was started
  again has none.
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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from flotilla.trainer.runtime.errors import ClusterLostError
from flotilla.trainer.strategies.placement import (
    fetch_value,
    run_on_device,
    run_separately,
    server_device,
)

log = logging.getLogger(__name__)
# Of a `State`, and of what has names: the chief of a version with another form looks for other
# ones, as servers may be older than it. To be counted up with each change.
FORM = 6
# What does not answer for so long is taken as gone.
ANSWER_SECONDS = 10.0
# So many servers have a note of the global step, as that of its counter may be lost.
NOTED_ON = 3
# The counter of steps, whose number is 0.
STEP = "global_step"
# What TensorFlow raises in the chief when a server that it relies on is gone or was restarted.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
)
# What it says of a server that was restarted, and connected again with a worker that was restarted:
# to the chief itself, and in the closure of a worker; see `_is_ps_failure` of its coordinator.
_RESTARTED = "some remote workers have been restarted"
_GONE = (
    ("remote target /job:ps", "unable to find the relevant tensor remote_handle"),
    # Also where a worker is connected again meanwhile, so that the chief knows no such device.
    ("/job:ps", "unknown device"),
)


def is_lost(error: Exception) -> bool:
    """Say whether an error means that a task, or a message to one, is gone; and not a bad step."""
    if isinstance(error, tf.errors.InternalError):
        # A message that was damaged on its way, so that the server cannot parse it.
        return "Unable to parse request" in str(error)
    if isinstance(error, tf.errors.InvalidArgumentError):
        text = str(error).lower()
        return _RESTARTED in text or any(all(each in text for each in one) for one in _GONE)
    return isinstance(error, (ClusterLostError, *_LOST))


@dataclass(frozen=True, kw_only=True)
class State:
    """What a server says of the variables of a run.

    Attributes:
        token: in their names.
        writer: in the name of the permit of the chief that had them last.
        layout: says which variables they are, and on which servers.
        variables: how many there are, on all servers.
        maps: how many shards of tables that grow, on all servers.
        held: how many variables of a checkpoint this server holds, without the counter of steps.
        is_whole: 1 where those of this server have values to go on from; 0 while the chief assigns
            some.
        reached: the global step that was read last, on the first few servers.
        saved: that of the newest checkpoint that was published by then; -1: of none.
        noted: when that was noted, in seconds since 1970.
        back_to: the global step to which the values of this server went back since then; -1: none.
    """

    token: int
    writer: int
    layout: int
    variables: int
    maps: int
    held: int
    is_whole: int
    reached: int
    saved: int
    noted: int
    back_to: int


class MisfitError(Exception):
    """What was on the servers is of other variables than those of this chief, and is removed."""


class ServerState:
    """What earlier attempts of a run have left on the servers, and what this one leaves."""

    def __init__(self, uri: str, servers: int) -> None:
        """Look for what is there of a run; the cluster has to be connected.

        Args:
            uri: of its checkpoints.
            servers: how many there are.

        Raises:
            OpError: of TensorFlow, where a server is gone.
        """
        self._run = f"run-{FORM}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"
        self._servers = range(servers)
        #: The numbers of all servers.
        self.servers = frozenset(self._servers)
        self._states = [
            with_name([len(fields(State))], tf.int64, server_device(n), f"{self._run}-{n}")
            for n in self._servers
        ]
        self._writer, self._token = secrets.randbits(60), secrets.randbits(60)
        #: Of this chief. Its value does not matter.
        self.permit = self._permit(self._writer)
        #: What is there on each server that has something.
        self.found = self._find()
        for each in self.found.values():
            # From here on nobody else changes what is there.
            _destroy(self._permit(each.writer))
        self.found = self._find() if self.found else {}
        #: The servers of which this attempt takes the values.
        self.taken = frozenset[int]()
        self._variables: Sequence[tf.Variable] = ()
        self._said: dict[int, State] = {}
        self._set = tf.function(
            self._setting, autograph=False, input_signature=[tf.TensorSpec([None], tf.int64)]
        )

    @property
    def living(self) -> frozenset[int]:
        """The servers whose variables have values of one run that training may go on from."""
        tokens = {each.token for each in self.found.values()}
        whole = {number for number, each in self.found.items() if each.is_whole}
        return frozenset(whole if len(tokens) == 1 else ())

    def reached(self) -> int:
        """Return the global step that the living servers have reached.

        It is exact where `ps-0` lives, and otherwise what its last chief has noted; -1: nothing.
        """
        if 0 not in self.living:
            return max((each.reached for each in self.found.values()), default=-1)
        step = with_name([], tf.int64, server_device(0), self._name(self.found[0].token, 0))
        with run_on_device(step.device):
            return int(fetch_value(step.read_value()))

    def go_on_with(self, servers: Collection[int]) -> None:
        """Take the values of these servers with the next `take`; free what others have."""
        self.taken = frozenset(servers)
        self._free(self.found.keys() - self.taken)

    def remove(self, reason: str) -> None:
        """Free all that is there, and say why."""
        log.warning("what the servers have of an attempt before is not used: %s", reason)
        self.taken = frozenset()
        self._free(self.found)

    def take(
        self, variables: Mapping[str, tf.Variable], parts: Sequence[Any], described: Any, saved: Any
    ) -> None:
        """Give variables their names; those on the servers that are taken have the values there.

        To be called before anything is traced with them.

        Args:
            variables: of this chief on the servers, by what they are; that of `STEP` first.
            parts: the shards of tables that grow.
            described: what else has to be the same for them to be the same, as JSON has it.
            saved: the paths of those that a checkpoint has.

        Raises:
            OpError: of TensorFlow, where a server is gone.
            MisfitError: what is there is of other variables.
        """
        if next(iter(variables)) != STEP:
            raise AssertionError("the counter of steps is not the first one")
        self._variables = list(variables.values())
        layout = _layout(variables, parts, described)
        with run_separately():
            before = next((self.found[number] for number in self.taken), None)
            if before and before.layout != layout:
                self.remove("it is of other variables, workers or training.freeze")
                raise MisfitError
            said = replace(before, writer=self._writer) if before else self._new(layout, len(parts))
            with tf.device(server_device(0)):
                self.permit.assign(1)
            held = [_server_of(variables[path].device) for path in saved if path != STEP]
            # Before there is anything that nobody else would find.
            self._register(
                {
                    n: replace(
                        said,
                        held=held.count(n),
                        is_whole=int(n in self.taken),
                        back_to=self.found[n].back_to if n in self.taken else -1,
                    )
                    for n in self._servers
                }
            )
            self._rename_all(said.token)
            for number, part in enumerate(parts):
                part.rename(*_of_map(self._name(said.token, number)))

    def _new(self, layout: int, maps: int) -> State:
        return State(
            token=self._token,
            writer=self._writer,
            layout=layout,
            variables=len(self._variables),
            maps=maps,
            held=0,
            is_whole=0,
            reached=-1,
            saved=-1,
            noted=int(time.time()),
            back_to=-1,
        )

    def is_taken(self, device: str) -> bool:
        """Say whether what is on a device has the values of an attempt before."""
        return _server_of(device) in self.taken

    def went_back(self, step: int) -> None:
        """Note that the values of the servers that are not taken are of an earlier global step.

        Raises:
            OpError: as of `settle`.
        """
        self._change(self.servers - self.taken, back_to=step)

    def back_to(self) -> dict[int, int]:
        """Return the servers whose values went back since the newest published checkpoint.

        With each comes the global step to which they did.
        """
        return {n: each.back_to for n, each in self._said.items() if each.back_to >= 0}

    def settle(self, *, is_whole: bool) -> None:
        """Say whether the variables have values that training may go on from.

        Raises:
            OpError: of TensorFlow, where a server is gone, or another chief has taken them.
        """
        self._change(is_whole=int(is_whole))

    def note(self, saved: int, reached: int) -> None:
        """Note the global step of the newest published checkpoint, and the one that was reached.

        Raises:
            OpError: as of `settle`.
        """
        if self._said and saved > self._said[0].saved:
            self._change(saved=saved, noted=int(time.time()))
            # Not of the checkpoint to which they went back, which was on its way then.
            if known := [n for n, step in self.back_to().items() if step < saved]:
                self._change(known, back_to=-1)
        # Of a single server nothing is left without its counter.
        if len(self._servers) > 1:
            self._change(self._servers[:NOTED_ON], reached=reached)

    def seconds_since_save(self) -> float:
        """Return how long ago the newest checkpoint was noted, if this attempt takes values."""
        noted = [self.found[number].noted for number in self.taken]
        return max(0.0, time.time() - max(noted)) if noted else 0.0

    def forget(self) -> None:
        """Free the memory of what has names, where servers answer, and no other chief took it."""

        def free() -> None:
            with suppress(tf.errors.OpError):
                # The next chief, which has removed the permit, may have said nothing yet.
                with run_on_device(self.permit.device):
                    fetch_value(self.permit.read_value())
                self.found = self._find()
                if 0 in self.found and self.found[0].writer == self._writer:
                    self._free(self.found)

        # Where a job is stopped, its servers may be gone without a word.
        thread = threading.Thread(target=free, name="forget", daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)

    def _rename_all(self, token: int) -> None:
        """Give the variables of each server their names, in one message; no value is copied."""
        on = dict[str, list[int]]()
        for number, each in enumerate(self._variables):
            on.setdefault(each.device, []).append(number)
        for device, numbers in on.items():
            # As arguments: a graph would keep what it was traced with.
            held = [self._variables[n].handle for n in numbers]
            before = [] if self.is_taken(device) else held
            del held
            with tf.device(device):
                handles = tf.function(self._handles, autograph=False)(token, tuple(numbers), before)
            for number, handle in zip(numbers, handles, strict=True):
                variable = self._variables[number]
                variable._handle = _with_data(handle, variable.shape, variable.dtype)

    def _handles(
        self, token: int, numbers: Sequence[int], before: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        made = []
        for place, number in enumerate(numbers):
            each = self._variables[number]
            handle = tf.raw_ops.VarHandleOp(
                shape=each.shape, dtype=each.dtype, shared_name=self._name(token, number)
            )
            if before:
                value = tf.raw_ops.ReadVariableOp(resource=before[place], dtype=each.dtype)
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            made.append(handle)
        return made

    def _register(self, said: dict[int, State]) -> None:
        self._said = said
        for number, each in enumerate(self._states):
            with tf.device(each.device):
                each.assign(tf.constant(astuple(said[number]), tf.int64), read_value=False)

    def _change(self, servers: Collection[int] = (), **values: int) -> None:
        """Change what all servers say, or some; `ps-0` comes first, where the permit is."""
        said = {
            number: replace(each, **values) if number in (servers or self.servers) else each
            for number, each in self._said.items()
        }
        for number in (number for number, each in said.items() if each != self._said[number]):
            row = tf.constant(astuple(said[number]), tf.int64)
            with run_on_device(server_device(number)):
                if number == 0:
                    self._set(row)
                else:
                    self._states[number].assign(row, read_value=False)
        self._said = said

    def _setting(self, said: tf.Tensor) -> None:
        with tf.device(server_device(0)), tf.control_dependencies([self.permit.read_value()]):
            self._states[0].assign(said, read_value=False)

    def _find(self) -> dict[int, State]:
        found = {}
        for server, state in enumerate(self._states):
            with run_on_device(state.device):
                if fetch_value(tf.raw_ops.VarIsInitializedOp(resource=state.handle)):
                    values = map(int, fetch_value(state.read_value()))
                    names = (each.name for each in fields(State))
                    found[server] = State(**dict(zip(names, values, strict=True)))
        return found

    def _free(self, servers: Collection[int]) -> None:
        gone = {server: self.found.pop(server) for server in list(servers)}
        # Who still writes fails first; who dies here leaves what the next one frees.
        for server, said in gone.items():
            _destroy(self._permit(said.writer))
            with run_on_device(server_device(server)):
                row = tf.constant(astuple(replace(said, is_whole=0)), tf.int64)
                self._states[server].assign(row, read_value=False)
        for server, said in gone.items():
            with run_on_device(server_device(server)):
                tf.function(self._freeing, autograph=False)(said)
            _destroy(self._states[server])

    def _freeing(self, said: State) -> None:
        names = [self._name(said.token, n) for n in range(max(said.variables, said.maps))]
        handles = [
            tf.raw_ops.VarHandleOp(shape=[], dtype=tf.float32, shared_name=name)
            for name in names[: said.variables]
        ]
        for ids, mutex in map(_of_map, names[: said.maps]):
            # As a shard makes it; one of another kind would be another resource.
            handles.append(
                tf.raw_ops.MutableHashTableV2(
                    key_dtype=tf.int64, value_dtype=tf.int64, shared_name=ids
                )
            )
            handles.append(tf.raw_ops.MutexV2(shared_name=mutex))
        for each in handles:
            tf.raw_ops.DestroyResourceOp(resource=each, ignore_lookup_error=True)

    def _name(self, token: int, number: int) -> str:
        return f"{self._run}-{token}-{number}"

    def _permit(self, writer: int) -> tf.Variable:
        return with_name([], tf.int64, server_device(0), f"{self._run}-by-{writer}")


def with_name(shape: Any, dtype: tf.DType, device: str, name: str) -> tf.Variable:
    """Return the variable of a device that has a name, with its value if any, and that stays."""
    with tf.device(device):
        handle = tf.raw_ops.VarHandleOp(shape=shape, dtype=dtype, shared_name=name)
    return BaseResourceVariable(
        handle=_with_data(handle, shape, dtype),
        shape=shape,
        dtype=dtype,
        trainable=False,
        handle_name=name,
        unique_id=name,
    )


def _with_data(handle: tf.Tensor, shape: Any, dtype: tf.DType) -> tf.Tensor:
    """Return the handle of a variable, with what TensorFlow notes of those that it makes itself."""
    handle._handle_data = handle_data_util.create_handle_data(tf.TensorShape(shape), dtype)
    return handle


def _server_of(device: str) -> int | None:
    spec = tf.DeviceSpec.from_string(device)
    return spec.task if spec.job == "ps" else None


def _layout(variables: Mapping[str, tf.Variable], parts: Sequence[Any], described: Any) -> int:
    of = [
        (name, each.shape.as_list(), each.dtype.name, each.device)
        for name, each in variables.items()
    ]
    text = json.dumps([of, [each.device for each in parts], described])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _of_map(name: str) -> tuple[str, str]:
    return f"{name}-ids", f"{name}-mutex"


def _destroy(variable: tf.Variable) -> None:
    with run_on_device(variable.device):
        tf.raw_ops.DestroyResourceOp(resource=variable.handle, ignore_lookup_error=True)
