"""The variables of a run on parameter servers, which keep them from one attempt to the next.

By default, TensorFlow's variables have no names and end with the process that created them.
Therefore, the chief names all variables that the servers hold for a run: the variables of the
checkpoint, the bookkeeping of dynamic tables, and the turn counters. The names contain a random
token, so that different generations of values never share a variable. If the chief or some servers
die, the next attempt reuses the remaining variables without transferring their values.

Two kinds of variables describe the named ones:

- A `State` on each server, whose name depends only on the run. A restarted server has none.
- The permit of the chief on `ps-0`, a fencing token. The chief can change its record there, and
  hand out turns, only while the permit exists. The next chief removes it, so that an earlier chief
  that is still running fails.
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
# Version of `State` and of the named variables. Increase it when either changes. A chief ignores
# variables of another version, because a different version of Flotilla may have created them.
FORM = 6
ANSWER_SECONDS = 10.0
# Number of servers that store the global step. If the counter's server is lost, the others have it.
NOTED_ON = 3
# The path of the step counter, which must be the first variable.
STEP = "global_step"
# The errors that TensorFlow raises in the chief when a required server is lost or restarted.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
)
# TensorFlow's messages about a restarted server, in the chief and in a worker's closure. See
# `_is_ps_failure` of its coordinator.
_RESTARTED = "some remote workers have been restarted"
_GONE = (
    ("remote target /job:ps", "unable to find the relevant tensor remote_handle"),
    # The device of a restarted server is unknown to a task until the task has reconnected.
    ("/job:ps", "unknown device"),
)


def is_lost(error: Exception) -> bool:
    """Return whether an error means that a task or a message was lost."""
    if isinstance(error, tf.errors.InternalError):
        # The message was corrupted in transit, so the server cannot parse it.
        return "Unable to parse request" in str(error)
    if isinstance(error, tf.errors.InvalidArgumentError):
        text = str(error).lower()
        return _RESTARTED in text or any(all(each in text for each in one) for one in _GONE)
    return isinstance(error, (ClusterLostError, *_LOST))


@dataclass(frozen=True, kw_only=True)
class State:
    """A server's record of the variables of a run.

    Attributes:
        token: the token in the names of the variables.
        writer: the number in the name of the last chief's permit.
        layout: a digest of the variables and their servers.
        variables: the number of variables on all servers.
        maps: the number of shards of dynamic tables on all servers.
        held: the number of checkpoint variables on this server, without the step counter.
        is_whole: 1 if this server's values are complete, 0 while the chief assigns some of them.
        reached: the last known global step, only on the first few servers.
        saved: the global step of the newest published checkpoint, or -1 if none.
        noted: when `saved` was recorded, in seconds since 1970.
        back_to: the global step to which values were reset after `noted`, or -1 if they were not.
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
    """The variables on the servers do not match this chief's variables, and have been freed."""


class ServerState:
    """The variables on the servers that belong to this attempt or to earlier ones."""

    def __init__(self, uri: str, servers: int) -> None:
        """Find the state of the run with checkpoints at `uri`. Remove earlier chiefs' permits."""
        self._run = f"run-{FORM}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"
        self._servers = range(servers)
        self.servers = frozenset(self._servers)
        self._states = [
            open_variable([len(fields(State))], tf.int64, server_device(n), f"{self._run}-{n}")
            for n in self._servers
        ]
        self._writer, self._token = secrets.randbits(60), secrets.randbits(60)
        #: The permit of this chief. Its value is unused.
        self.permit = self._permit(self._writer)
        self.found = self._find()
        for each in self.found.values():
            # After this, no earlier chief can hand out turns or change its record on `ps-0`.
            _destroy(self._permit(each.writer))
        self.found = self._find() if self.found else {}
        #: The servers whose values this attempt reuses.
        self.taken = frozenset[int]()
        self._variables: Sequence[tf.Variable] = ()
        self._said: dict[int, State] = {}
        self._set = tf.function(
            self._trace_set, autograph=False, input_signature=[tf.TensorSpec([None], tf.int64)]
        )

    @property
    def living(self) -> frozenset[int]:
        """The servers with complete values, or none if values are of different generations."""
        tokens = {each.token for each in self.found.values()}
        whole = {number for number, each in self.found.items() if each.is_whole}
        return frozenset(whole if len(tokens) == 1 else ())

    def read_reached(self) -> int:
        """Return the global step of the living servers' values, or -1 if it is unknown.

        The step is exact if `ps-0` is alive. Otherwise, it is the last step that a chief recorded.
        """
        if 0 not in self.living:
            return max((each.reached for each in self.found.values()), default=-1)
        step = open_variable([], tf.int64, server_device(0), self._name(self.found[0].token, 0))
        with run_on_device(step.device):
            return int(fetch_value(step.read_value()))

    def select(self, servers: Collection[int]) -> None:
        """Choose the servers whose values `take` will reuse, and free the other servers' values."""
        self.taken = frozenset(servers)
        self._free(self.found.keys() - self.taken)

    def remove(self, reason: str) -> None:
        """Free all variables, and log the reason."""
        log.warning("the variables of an earlier attempt are not used: %s", reason)
        self.taken = frozenset()
        self._free(self.found)

    def take(
        self, variables: Mapping[str, tf.Variable], parts: Sequence[Any], described: Any, saved: Any
    ) -> None:
        """Name the variables. On the selected servers, they reuse the values that exist there.

        Call this method before tracing anything that uses the variables.

        Args:
            variables: the variables of this chief on the servers by path. `STEP` comes first.
            parts: the shards of dynamic tables.
            described: other settings, as JSON values. If they differ, no variable is reused.
            saved: the paths of the variables in a checkpoint.

        Raises:
            OpError: TensorFlow's error if a server is gone.
            MisfitError: if the servers hold variables that do not match.
        """
        if next(iter(variables)) != STEP:
            raise AssertionError("the step counter is not the first variable")
        self._variables = list(variables.values())
        layout = _layout(variables, parts, described)
        with run_separately():
            before = next((self.found[number] for number in self.taken), None)
            if before and before.layout != layout:
                self.remove("the variables, the workers or training.freeze have changed")
                raise MisfitError
            said = replace(before, writer=self._writer) if before else self._new(layout, len(parts))
            with tf.device(server_device(0)):
                self.permit.assign(1)
            held = [_find_server(variables[path].device) for path in saved if path != STEP]
            # Register before creating the variables, so that a later chief can find and free them.
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
                part.rename(*_name_map(self._name(said.token, number)))

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
        """Return whether the variables on a device have their values from an earlier attempt."""
        return _find_server(device) in self.taken

    def note_reverted(self, step: int) -> None:
        """Record that the servers outside `taken` were reset to the earlier `step`.

        Raises:
            OpError: as for `settle`.
        """
        self._change(self.servers - self.taken, back_to=step)

    def list_reverted(self) -> dict[int, int]:
        """Return the servers reset since the newest published checkpoint, with the step of each."""
        return {n: each.back_to for n, each in self._said.items() if each.back_to >= 0}

    def settle(self, *, is_whole: bool) -> None:
        """Record whether the values on the servers are complete, so that they can be reused.

        Raises:
            OpError: TensorFlow's error if a server is gone or another chief has taken over.
        """
        self._change(is_whole=int(is_whole))

    def note(self, saved: int, reached: int) -> None:
        """Record the global step of the newest published checkpoint, and the current one.

        Raises:
            OpError: as for `settle`.
        """
        if self._said and saved > self._said[0].saved:
            self._change(saved=saved, noted=int(time.time()))
            # A checkpoint at a later step than the reset has the later values: forget the reset.
            if known := [n for n, step in self.list_reverted().items() if step < saved]:
                self._change(known, back_to=-1)
        # A single server has nothing to reuse once it is lost, so do not record its global step.
        if len(self._servers) > 1:
            self._change(self._servers[:NOTED_ON], reached=reached)

    def seconds_since_save(self) -> float:
        """Return the seconds since a checkpoint was last recorded, or 0 if no values are reused."""
        noted = [self.found[number].noted for number in self.taken]
        return max(0.0, time.time() - max(noted)) if noted else 0.0

    def forget(self) -> None:
        """Free the named variables if all servers reply and no other chief has taken over."""

        def free() -> None:
            with suppress(tf.errors.OpError):
                # Fail if the next chief has removed the permit but has not registered yet.
                with run_on_device(self.permit.device):
                    fetch_value(self.permit.read_value())
                self.found = self._find()
                if 0 in self.found and self.found[0].writer == self._writer:
                    self._free(self.found)

        # Limit the wait, because servers of a stopped job may disappear without disconnecting.
        thread = threading.Thread(target=free, name="forget", daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)

    def _rename_all(self, token: int) -> None:
        """Name the variables of each server in one message, without copying values."""
        on = dict[str, list[int]]()
        for number, each in enumerate(self._variables):
            on.setdefault(each.device, []).append(number)
        for device, numbers in on.items():
            # Pass the handles as arguments, because a graph would keep captured handles alive.
            held = [self._variables[n].handle for n in numbers]
            before = [] if self.is_taken(device) else held
            del held
            with tf.device(device):
                handles = tf.function(self._handles, autograph=False)(token, tuple(numbers), before)
            for number, handle in zip(numbers, handles, strict=True):
                variable = self._variables[number]
                variable._handle = _attach_data(handle, variable.shape, variable.dtype)

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
        """Change the records of `servers` (default: all). On `ps-0`, this requires the permit."""
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

    def _trace_set(self, said: tf.Tensor) -> None:
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
        # Destroy the permit first, so that a chief that still writes fails. If this chief dies
        # here, the next chief frees the rest.
        for server, said in gone.items():
            _destroy(self._permit(said.writer))
            with run_on_device(server_device(server)):
                row = tf.constant(astuple(replace(said, is_whole=0)), tf.int64)
                self._states[server].assign(row, read_value=False)
        for server, said in gone.items():
            with run_on_device(server_device(server)):
                tf.function(self._trace_free, autograph=False)(said)
            _destroy(self._states[server])

    def _trace_free(self, said: State) -> None:
        names = [self._name(said.token, n) for n in range(max(said.variables, said.maps))]
        handles = [
            tf.raw_ops.VarHandleOp(shape=[], dtype=tf.float32, shared_name=name)
            for name in names[: said.variables]
        ]
        for ids, mutex in map(_name_map, names[: said.maps]):
            # The types must be those of the shard, or else the handle refers to another resource.
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
        return open_variable([], tf.int64, server_device(0), f"{self._run}-by-{writer}")


def open_variable(shape: Any, dtype: tf.DType, device: str, name: str) -> tf.Variable:
    """Open the variable `name` on a device. The variable outlives this process."""
    with tf.device(device):
        handle = tf.raw_ops.VarHandleOp(shape=shape, dtype=dtype, shared_name=name)
    return BaseResourceVariable(
        handle=_attach_data(handle, shape, dtype),
        shape=shape,
        dtype=dtype,
        trainable=False,
        handle_name=name,
        unique_id=name,
    )


def _attach_data(handle: tf.Tensor, shape: Any, dtype: tf.DType) -> tf.Tensor:
    """Attach the shape and dtype to a handle, as TensorFlow does for its own variables."""
    handle._handle_data = handle_data_util.create_handle_data(tf.TensorShape(shape), dtype)
    return handle


def _find_server(device: str) -> int | None:
    spec = tf.DeviceSpec.from_string(device)
    return spec.task if spec.job == "ps" else None


def _layout(variables: Mapping[str, tf.Variable], parts: Sequence[Any], described: Any) -> int:
    of = [
        (name, each.shape.as_list(), each.dtype.name, each.device)
        for name, each in variables.items()
    ]
    text = json.dumps([of, [each.device for each in parts], described])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _name_map(name: str) -> tuple[str, str]:
    return f"{name}-ids", f"{name}-mutex"


def _destroy(variable: tf.Variable) -> None:
    with run_on_device(variable.device):
        tf.raw_ops.DestroyResourceOp(resource=variable.handle, ignore_lookup_error=True)
