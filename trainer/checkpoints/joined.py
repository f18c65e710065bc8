"""A checkpoint of what is left when parameter servers die: of older values for them alone.

The variables of servers that answer are saved as they are now. In place of the others are the
copies of a snapshot (`trainer.checkpoints.snapshots`), where one is newer than the newest
checkpoint. Otherwise there are stand-ins with the values of that: on the servers that are left
where these write their own parts, on the chief otherwise. So a save is one as any other, and every
reader reads it; the field `recovered` of its manifest says which variables are older, and of which
global step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from trainer.checkpoints.checkpoints import Checkpoints, RestoredCheckpoint, restore
from trainer.checkpoints.contents import RECOVERED, Older, older_of
from trainer.checkpoints.servers import operating_on, server_of, size_of
from trainer.checkpoints.snapshots import Copied
from trainer.checkpoints.tensor_bundle import Variables
from trainer.errors import UserError
from trainer.json_records import tree_of
from trainer.strategies.placement import server_device

STEP = "global_step"


class NothingSavedError(UserError):
    """There is nothing to save that the newest checkpoint has not."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A joined checkpoint: its own global step, and that of the oldest of its values.

    `age` is in seconds that of the oldest snapshot; 0 where values are of a checkpoint.
    """

    uri: str
    global_step: int
    back_to: int
    age: float = 0.0


def held_by(variables: Variables) -> dict[int, dict[str, tf.Variable]]:
    """Return the variables of each parameter server that holds some."""
    held: dict[int, dict[str, tf.Variable]] = {}
    for path, each in variables.items():
        if (server := server_of(each)) is not None:
            held.setdefault(server, {})[path] = each
    return held


def lost_of(held: Mapping[int, Variables], seconds: float) -> set[int]:
    """Return the servers whose variables cannot be read any more, or not within some seconds.

    A server that was started again answers, and does not have them.
    """
    answers: set[int] = set()
    threads = [
        threading.Thread(target=partial(_read_one, *each, answers), name="lost", daemon=True)
        for each in held.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return set(held) - answers


def _read_one(server: int, held: Variables, answers: set[int]) -> None:
    smallest = min(held.values(), key=lambda each: each.shape.num_elements() or 0)
    with suppress(tf.errors.OpError), operating_on(server):
        smallest.read_value().numpy()
        answers.add(server)


def save(  # noqa: PLR0913
    checkpoints: Checkpoints,
    variables: Variables,
    lost: set[int],
    *,
    io_device: str | None,
    fields: Mapping[str, Any],
    read_step: int,
    copies: Mapping[int, Copied] | None = None,
) -> Joined:
    """Save a checkpoint of what is left, at the global step reached, or that of copies alone.

    Args:
        checkpoints: those of the run. What servers that are gone had to publish is given up.
        variables: all of a checkpoint, by path.
        lost: the numbers of the servers that are gone, and not all that hold variables, unless
            there are copies of all of them.
        io_device: see `Checkpoints.save`.
        fields: of the manifest.
        read_step: the global step that was read last, for where its counter is lost.
        copies: of servers that are gone, in the memory of tasks that are left.

    Raises:
        NothingSavedError: no step was made since the newest checkpoint, or none is known of.
        UserError: there is no checkpoint that fits, or what is left cannot be saved.
    """
    by_parts = bool(checkpoints.parts and checkpoints.parts.takes(variables))
    if by_parts:
        checkpoints.without_lost()
    else:
        # An upload that ends while the newest one is looked for deletes its copy on this machine.
        with suppress(UserError):
            checkpoints.uploads.flush()
    loss = _Loss(checkpoints=checkpoints, variables=variables, lost=lost, io_device=io_device)
    newest = checkpoints.newest_step()
    copied = {n: each for n, each in (copies or {}).items() if each.global_step > newest}
    step, stand_ins, older = loss.replaced(copied, read_step, by_parts=by_parts)
    recovered = {f"ps-{server}": _tree(older[server]) for server in sorted(older)}
    everything = {**variables, **stand_ins}
    uri = checkpoints.save(everything, io_device=io_device, fields={**fields, RECOVERED: recovered})
    if by_parts:
        checkpoints.flush()
    ages = [each.age or 0.0 for each in older.values()]
    return Joined(
        uri=uri,
        global_step=step,
        back_to=min(each.global_step for each in older.values()),
        age=max(ages) if all(ages) else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """Servers that are gone, by their numbers, of those that hold variables."""

    checkpoints: Checkpoints
    variables: Variables
    lost: set[int]
    io_device: str | None

    def replaced(
        self, copied: Mapping[int, Copied], read_step: int, *, by_parts: bool
    ) -> tuple[int, dict[str, tf.Variable], dict[int, Older]]:
        """Return the global step, stand-ins, and what they are for each server by its number."""
        held = held_by(self.variables)
        left, others = held.keys() - self.lost, self.lost - copied.keys()
        # Where no server is left, the chief writes.
        by_parts = by_parts and bool(left)
        counter = self.variables[STEP]
        step = read_step if server_of(counter) in self.lost else int(counter.numpy())
        if not left:
            if others:
                raise NothingSavedError("no server is left, and not all of them were copied")
            # Nothing is newer than that.
            step = min(each.global_step for each in copied.values())
        # One that was saved at this step is not published, or it would be the newest one.
        self.checkpoints.last = ""
        stand_ins, older = self._restored(others, step, by_parts=by_parts) if others else ({}, {})
        for each in copied.values():
            stand_ins |= each.variables
        older |= {server: _copied(each) for server, each in copied.items()}
        # An update of a worker that ends late must not count.
        stand_ins[STEP] = self._like(counter, min(left) if by_parts else None)
        stand_ins[STEP].assign(step)
        return step, stand_ins, older

    def _restored(
        self, lost: Collection[int], step: int, *, by_parts: bool
    ) -> tuple[dict[str, tf.Variable], dict[int, Older]]:
        """Return stand-ins with values of the newest checkpoint, for some of the servers."""
        found = _before(self.checkpoints, step)
        stand_ins = self._stand_ins(lost, by_parts=by_parts)
        restore(found, stand_ins, io_device=self.io_device, servers=self.checkpoints.servers)
        return stand_ins, older_in(found, {path: self.variables[path] for path in stand_ins})

    def _stand_ins(self, lost: Collection[int], *, by_parts: bool) -> dict[str, tf.Variable]:
        """Return new variables for those of servers, on the servers that hold least."""
        held = held_by(self.variables)
        gone = {path: each for server in lost for path, each in held.get(server, {}).items()}
        load = {server: size_of(own) for server, own in held.items() if server not in self.lost}
        made = {}
        for path, each in sorted(gone.items(), key=lambda pair: -size_of(dict([pair]))):
            server = min(load, key=lambda number: load[number]) if by_parts else None
            if server is not None:
                load[server] += size_of({path: each})
            made[path] = self._like(each, server)
        return made

    def _like(self, variable: tf.Variable, server: int | None) -> tf.Variable:
        return _like(variable, server, self.io_device)


def _tree(older: Older) -> dict[str, Any]:
    return {name: each for name, each in tree_of(older).items() if each is not None}


def _copied(copy: Copied) -> Older:
    return Older(
        global_step=copy.global_step,
        # The counter does not go back.
        variables=tuple(sorted({*copy.variables} - {STEP})),
        age=copy.age,
    )


def older_in(found: RestoredCheckpoint, gone: Variables) -> dict[int, Older]:
    """Return what each lost server goes back to, by its number, from the checkpoint before.

    Where that is a joined one too, what had gone back in it is of an even earlier global step.
    """
    earlier = older_of(found.fields).values()
    older = {}
    for server, held in sorted(held_by(gone).items()):
        paths = sorted({*held} - {STEP})
        steps = [each.global_step for each in earlier if not set(paths).isdisjoint(each.variables)]
        older[server] = Older(global_step=min([found.global_step, *steps]), variables=tuple(paths))
    return older


def _before(checkpoints: Checkpoints, step: int) -> RestoredCheckpoint:
    """Return the newest checkpoint, which has to be of an earlier global step."""
    found = checkpoints.newest()
    if not found:
        raise NothingSavedError("no checkpoint is published yet")
    if step <= found.global_step:
        raise NothingSavedError("no step is known since the newest checkpoint")
    return found


def _like(variable: tf.Variable, server: int | None, io_device: str | None) -> tf.Variable:
    with tf.device(io_device if server is None else server_device(server)):
        return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
