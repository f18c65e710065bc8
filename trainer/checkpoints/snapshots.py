"""Snapshots: what each parameter server holds, copied into the memory of another task.

When a server dies, its variables come back from there (`trainer.checkpoints.joined`), newer than
those of the newest checkpoint. The copy is on its peer: the next server that holds variables, or
the chief where there is no other. The chief calls functions of both tasks, between which values are
sent directly. It does not hand them to the peer as a whole: servers see no other ones' devices.

Each portion of a copy is two functions. The first one has read all of it into the memory of the
peer when it ends. Only then the second one, which needs nobody but the peer, assigns it. So a
server that dies meanwhile leaves whole what was copied: a variable, or a row, with its slots.

Of a `RowGroup` the marked rows are copied, all else whole. Marks are cleared before rows are read:
an update in between marks its rows again, and the next snapshot has them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import tensorflow as tf

from trainer.checkpoints.servers import side_by_side, size_of
from trainer.checkpoints.tensor_bundle import Variables
from trainer.strategies.placement import fetched, operating_at, server_device
from trainer.strategies.remade import FirstValues, Remade, without_name
from trainer.strategies.updates.touched_rows import RowGroup

# So many bytes of rows are on their way at once: no more of a server's memory is needed.
PORTION = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The variables of a server, by path, as they were at a global step: a copy elsewhere.

    `age` is the seconds from then on until the server was lost, as far as that was noticed.
    """

    global_step: int
    age: float
    variables: Variables


def _peers(held: Mapping[int, Variables]) -> dict[int, int | None]:
    """Return who has the copy of each server: None for the chief."""
    servers = sorted(held)
    if len(servers) == 1:
        return dict.fromkeys(servers)
    return dict(zip(servers, [*servers[1:], servers[0]], strict=True))


class Snapshots:
    """The copies of all servers of an attempt, each of them the newest that is whole."""

    def __init__(
        self,
        held: Mapping[int, Variables],
        groups: Sequence[RowGroup],
        io_device: str | None,
        seconds: float,
    ) -> None:
        """Take memory for the copies; nothing is copied yet.

        Args:
            held: the variables of each server that holds some, by path.
            groups: those of which rows alone are copied.
            io_device: the chief's.
            seconds: between the beginnings of two snapshots.
        """
        self._seconds = seconds
        self._copies = {
            server: _Copy(held[server], groups, peer, io_device)
            for server, peer in _peers(held).items()
        }
        # The global step of the newest copy of each server, and when that began.
        self._taken: dict[int, tuple[int, float]] = {}
        self._began, self._lasted = -math.inf, 0.0

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the bytes that each task has more, and those besides while it gets a copy."""
        return {
            "the chief" if each.peer is None else f"ps-{each.peer}": (
                size_of(each.variables),
                each.on_their_way(),
            )
            for each in self._copies.values()
        }

    def needs(self) -> str:
        """Return the line that says so."""
        of_each = (
            f"{size / 1e6:,.1f} MB on {task}, and {more / 1e6:,.1f} MB more there while it is "
            "copied"
            for task, (size, more) in sorted(self.sizes().items())
        )
        every = f"a snapshot of the servers every {self._seconds:g} s needs memory"
        return f"{every}: {', '.join(of_each)}"

    def is_due(self, *, rests: bool) -> bool:
        """Say whether the next one is to be taken; where workers rest, it had better wait.

        Not more than half of the time is spent on them.
        """
        wait = max(self._seconds, 2 * self._lasted)
        return time.monotonic() - self._began >= (2 * wait if rests else wait)

    def take(self, global_step: int) -> None:
        """Copy what each server has now; `global_step` is that of training before.

        Raises:
            OpError: of TensorFlow, where a task is gone, or has no memory. What was copied of a
                server before stays; this is not to be called again.
        """
        began = time.monotonic()

        def one(server: int) -> None:
            self._copies[server].take()
            self._taken[server] = (global_step, began)

        side_by_side(self._copies, one)
        # The first one traces its functions and copies all rows: no later one takes as long.
        is_first = self._began == -math.inf
        self._began, self._lasted = began, 0.0 if is_first else time.monotonic() - began

    def remake(self, remade: Remade) -> None:
        """Make again the copies that are gone with their servers; the next one has all rows."""
        for server, copy in self._copies.items():
            if copy.remake(remade):
                self._taken.pop(server, None)
        self._began = -math.inf

    def of(self, lost: Collection[int], noticed: float) -> dict[int, Copied]:
        """Return the copies of lost servers, without those that were lost themselves.

        `noticed` is when the loss was, by the monotonic clock.
        """
        found = {}
        for server in lost:
            copy = self._copies.get(server)
            if copy and server in self._taken and copy.peer not in lost:
                step, began = self._taken[server]
                age = max(round(noticed - began, 3), 0.001)
                found[server] = Copied(global_step=step, age=age, variables=copy.variables)
        return found


class _Copy:
    """The variables of one server, and their copy on its peer: a server, or None for the chief."""

    def __init__(
        self,
        held: Variables,
        groups: Sequence[RowGroup],
        peer: int | None,
        io_device: str | None,
    ) -> None:
        self.peer = peer
        self._chief = f"{io_device or ''}/device:CPU:0"
        self._device = self._chief if peer is None else server_device(peer)
        paths = {id(each): path for path, each in held.items()}
        first = FirstValues()
        self.variables = {}
        for path, each in held.items():
            of = each.shape, each.dtype, self._device
            self.variables[path] = without_name(*of, first.of(*of, tf.zeros))
        self._groups = [each for each in groups if id(each.variables[0]) in paths]
        self._of_groups = [
            [self.variables[paths[id(each)]] for each in group.variables] for group in self._groups
        ]
        by_rows = {id(each) for group in self._groups for each in group.variables}
        self._whole = {path: each for path, each in held.items() if id(each) not in by_rows}
        self._rows = np.array([group.rows for group in self._groups], np.int64)
        share = PORTION // max(1, len(self._groups))
        self._most = [max(1, share // group.row_bytes) for group in self._groups]
        self._make_functions()

    def remake(self, remade: Remade) -> bool:
        """Make the copy again where it is gone, without values; return whether it was."""
        were_gone = [remade.variable(each) for each in self.variables.values()]
        if not any(were_gone):
            return False
        for group in self._groups:
            if group.marks is not None:
                group.marks.assign(tf.ones(group.marks.shape, tf.bool))
        return True

    def on_their_way(self) -> int:
        """Return the bytes that the peer has twice until they are assigned, at most."""
        rows = zip(self._groups, self._most, strict=True)
        portion = sum(min(most, group.rows) * group.row_bytes for group, most in rows)
        return max(size_of(self._whole), portion)

    def _make_functions(self) -> None:
        made = partial(tf.function, autograph=False)
        values = [tf.TensorSpec(each.shape, each.dtype) for each in self._whole.values()]
        rows = list[tf.TensorSpec]()
        for group in self._groups:
            rows.append(tf.TensorSpec([None], tf.int64))
            rows += [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in group.variables]
        self._read_whole = made(self._reading_whole)
        self._assign_whole = made(self._assigning_whole, input_signature=[values])
        cursors = tf.TensorSpec([len(self._groups)], tf.int64)
        self._read_rows = made(self._reading_rows, input_signature=[cursors])
        self._assign_rows = made(self._assigning_rows, input_signature=[rows])

    def take(self) -> None:
        """Copy what the server has now."""
        with operating_at(self._chief):
            if self._whole:
                self._assign_whole(self._read_whole())
            cursors = np.zeros_like(self._rows)
            while (cursors < self._rows).any():
                reached, *found = self._read_rows(tf.constant(cursors))
                self._assign_rows(found)
                cursors = fetched(reached)

    def _here(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device(self._device):
            return [tf.identity(each) for each in values]

    def _reading_whole(self) -> list[tf.Tensor]:
        found = []
        for each in self._whole.values():
            with tf.device(each.device):
                found.append(each.read_value())
        return self._here(found)

    def _assigning_whole(self, values: Sequence[tf.Tensor]) -> None:
        with tf.device(self._device):
            for path, value in zip(self._whole, values, strict=True):
                self.variables[path].assign(value, read_value=False)

    def _reading_rows(self, cursors: tf.Tensor) -> list[tf.Tensor]:
        """Return where the next portion begins in each group, and rows with values of this one."""
        reached, found = list[tf.Tensor](), list[tf.Tensor]()
        for number, (group, most) in enumerate(zip(self._groups, self._most, strict=True)):
            with tf.device(group.variables[0].device):
                begin = tf.identity(cursors[number])
                # Nobody waits for a message while it is locked.
                with tf.control_dependencies([begin]):
                    rows, *values = group.locked(partial(_rows_of, group, begin, most))
                last = tf.reduce_max(tf.concat([[begin], rows], 0))
                end = tf.constant(group.rows, tf.int64)
                reached.append(tf.where(tf.size(rows) < most, end, last + 1))
            found += [rows, *values]
        with tf.device(self._device):
            return [tf.stack(reached), *self._here(found)]

    def _assigning_rows(self, found: Sequence[tf.Tensor]) -> None:
        given = iter(found)
        with tf.device(self._device):
            for copies in self._of_groups:
                rows = next(given)
                for each in copies:
                    tf.raw_ops.ResourceScatterUpdate(
                        resource=each.handle, indices=rows, updates=next(given)
                    )


def give_back(copies: Variables, variables: Variables, chief: str | None) -> None:
    """Assign copies to variables that were made again, by path, some of them after the other.

    Args:
        copies: as they are in a `Copied`.
        variables: with at least these paths.
        chief: its device.

    Raises:
        OpError: of TensorFlow, where a task is gone.
    """
    together = dict[str, tf.Variable]()
    with operating_at(f"{chief or ''}/device:CPU:0"):
        for path, copy in copies.items():
            if size_of({path: copy}) > PORTION:
                _give_back_rows(copy, variables[path])
                continue
            if size_of({**together, path: copy}) > PORTION:
                _give_back_whole(together, variables)
                together = {}
            together[path] = copy
        _give_back_whole(together, variables)


def _give_back_whole(copies: Variables, variables: Variables) -> None:
    @partial(tf.function, autograph=False)
    def give_back() -> None:
        for path, copy in copies.items():
            with tf.device(copy.device):
                value = copy.read_value()
            with tf.device(variables[path].device):
                variables[path].assign(tf.identity(value), read_value=False)

    give_back()


def _give_back_rows(copy: tf.Variable, variable: tf.Variable) -> None:
    count = int(copy.shape[0])
    most = max(1, PORTION * count // size_of({"": copy}))

    @partial(tf.function, autograph=False)
    def give_back(begin: tf.Tensor) -> None:
        with tf.device(copy.device):
            rows = tf.range(begin, tf.minimum(begin + most, count))
            values = tf.raw_ops.ResourceGather(resource=copy.handle, indices=rows, dtype=copy.dtype)
        with tf.device(variable.device):
            tf.raw_ops.ResourceScatterUpdate(
                resource=variable.handle, indices=tf.identity(rows), updates=tf.identity(values)
            )

    for begin in range(0, count, most):
        give_back(tf.constant(begin, tf.int64))


def _rows_of(group: RowGroup, begin: tf.Tensor, most: int) -> list[tf.Tensor]:
    """Return numbers [n] of the first rows from `begin` on that may have changed, and values."""
    marks, cleared = group.marks, []
    if marks is None:
        rows = tf.range(begin, tf.minimum(begin + most, group.rows))
    else:
        rows = tf.where(marks.read_value()[begin:])[:most, 0] + begin
        cleared.append(
            tf.raw_ops.ResourceScatterUpdate(
                resource=marks.handle, indices=rows, updates=tf.fill(tf.shape(rows), False)
            )
        )
    with tf.control_dependencies(cleared):
        return [
            tf.identity(rows),
            *(
                tf.raw_ops.ResourceGather(resource=each.handle, indices=rows, dtype=each.dtype)
                for each in group.variables
            ),
        ]
