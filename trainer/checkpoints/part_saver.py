"""Checkpoints by parts, on the chief: each parameter server writes and reads what it holds.

Values never pass through the chief. A save is three stages, of which training waits for the first:

1. A snapshot: each server copies its variables in its own memory. TensorFlow copies at once what
   is looked up by rows, and all else at its next update.
2. Each server writes its snapshot to a file of its own, unless a number is not finite. Then the
   snapshot is gone. The next save waits for the end of this stage, so that there is one copy.
3. Each server adds its file to a draft of the checkpoint (`trainer.checkpoints.part_server`), and
   the chief, which merges their indexes, commits it. Until then nobody reads any of it.

What is published is a checkpoint of TensorFlow's own with a file of data for each server: every
reader of checkpoints reads it as it reads one with a single file.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf

from trainer import storage
from trainer.checkpoints import bases, contents, part_server
from trainer.checkpoints.contents import StoredVariable
from trainer.checkpoints.index import KIND
from trainer.checkpoints.part_server import Reply, Request
from trainer.checkpoints.servers import (
    Marked,
    PartServers,
    bytes_of,
    changed_rows,
    fingerprints,
    is_large,
    lost,
    merge,
    operating_on,
    server_of,
    side_by_side,
    size_of,
)
from trainer.checkpoints.tensor_bundle import (
    CHANGED_ROWS,
    CHANGED_VALUES,
    GRAPH,
    WRITE,
    Layout,
    Layouts,
    Variables,
)
from trainer.checkpoints.uploads import UploadQueue
from trainer.errors import ClusterLostError, UserError
from trainer.storage.errors import reported
from trainer.storage.retry import shorter_retry

# While a store does not answer, the next save must not wait for this one.
ASK_SECONDS = 5.0
log = logging.getLogger(__name__)


class Owner(Protocol):
    """The checkpoints of a run, as far as parts need them."""

    def before_publication(self) -> None:
        """Raise where nothing may be published; publish what has to be there before."""

    def published(self, uri: str, step: int) -> None:
        """Note that a checkpoint is published."""

    def not_finite(self, path: str, step: int) -> UserError:
        """Return the error of a variable that is not finite."""


@dataclass(eq=False, kw_only=True)
class _Save:
    """One checkpoint on its way; `snapshot` is empty as soon as it is written.

    `servers` has the server of each path, and `parts` the number of the part of each server.
    """

    uri: str
    step: int
    fields: Mapping[str, Any]
    stored: Mapping[str, StoredVariable]
    files: Mapping[str, bytes]
    servers: Mapping[str, int]
    parts: Mapping[int, int]
    layout: Layout
    token: str
    snapshot: dict[str, tf.Tensor] = field(default_factory=dict)
    base: Marked | None = None
    # Of all large variables, and of those of which it holds changed rows alone.
    marks: dict[str, tf.Tensor] = field(default_factory=dict)
    rows: dict[str, tf.Tensor] = field(default_factory=dict)
    draft: str = ""
    opened: ExitStack = field(default_factory=ExitStack)
    replies: dict[int, Reply] = field(default_factory=dict)
    running: bool = False
    over: bool = False

    def prefix(self, server: int) -> str:
        """Return where a server writes: straight to the draft where it has it as a folder."""
        shared = storage.local_path(self.draft)
        name = f"part-{server}"
        return f"{shared}/{name}" if shared else f"{part_server.FOLDER}/{self.token}-{name}"


class PartSaver:
    """Saves checkpoints by parts; what fails behind training is raised by its next call."""

    #: A difference of more than this share of a whole checkpoint is not written; 0: none is.
    share = 0.0
    #: From this step on checkpoints are whole.
    last_step = 0

    def __init__(
        self, servers: PartServers, owner: Owner, uploads: UploadQueue, scratch: Path, least: int
    ) -> None:
        """Save by parts where servers hold `least` bytes or more."""
        self.servers = servers
        self.least = least
        self._owner = owner
        self._uploads = uploads
        self._scratch = scratch
        self._written = threading.Event()
        self._written.set()
        self._mutex = threading.Lock()
        self._last: _Save | None = None
        # Those in whose place a newer one is published.
        self._replaced: list[_Save] = []
        # The newest whole checkpoint, and all that are not published yet.
        self._base: Marked | None = None
        self._pending: list[_Save] = []
        self._failure: BaseException | None = None
        # Why the newest one is not going to be published.
        self._dropped = ""
        self._layouts = Layouts(scratch)

    def takes(self, variables: Variables) -> bool:
        """Say whether variables are saved by parts."""
        held = {path: each for path, each in variables.items() if server_of(each) is not None}
        return bool(held) and size_of(held) >= self.least and self.servers.are_ready()

    def save(
        self, uri: str, variables: Variables, fields: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> None:
        """Take a snapshot, and publish it at `uri` behind training, with small files besides.

        Raises:
            UserError: an earlier checkpoint could not be published.
        """
        self._written.wait()
        self.require()
        servers = {path: server_of(each) or 0 for path, each in variables.items()}
        parts = {server: part for part, server in enumerate(sorted(set(servers.values())))}
        stored = {
            path: StoredVariable(
                dtype=each.dtype.name, shape=tuple(each.shape.as_list()), part=parts[servers[path]]
            )
            for path, each in variables.items()
        }
        save = _Save(
            uri=uri,
            step=fields["global_step"],
            fields=fields,
            stored=stored,
            files=files,
            servers=servers,
            parts=parts,
            layout=self.layout_of(variables),
            token=secrets.token_hex(6),
        )
        snapshots = side_by_side(parts, partial(_copies, variables, servers))
        save.snapshot = {path: value for own in snapshots for path, value in own.items()}
        self._written.clear()
        threading.Thread(target=self._write, args=(save,), name="parts", daemon=True).start()

    def layout_of(self, variables: Variables) -> Layout:
        """Return the layout of variables, made once; raises `UserError`."""
        return self._layouts.of(variables, self.servers.io_device)

    def is_busy(self) -> bool:
        """Say whether a save is not published yet, or has failed."""
        with self._mutex:
            left = [each for each in self._pending if not each.over]
        return bool(left or self._failure or not self._written.is_set())

    def without_base(self) -> None:
        """Save the next one whole: fingerprints of the last one are gone with a server."""
        with self._mutex:
            self._base = None

    def bases(self) -> set[str]:
        """Return the URIs of what differences need that are still on their way."""
        with self._mutex:
            return {each.base.uri for each in self._pending if each.base and not each.over}

    def require(self) -> None:
        """Raise what has failed behind training, if anything has."""
        if self._failure:
            raise self._failure

    def settle(self) -> None:
        """Wait until what was saved is written by the servers, and waits to be published."""
        self._written.wait()
        self.require()

    def flush(self) -> None:
        """Wait until all that was saved is published; raises `UserError`."""
        try:
            self.settle()
        except ClusterLostError:
            raise
        except UserError:
            # An earlier one may be on its way, and the process ends next.
            with suppress(UserError):
                self._uploads.flush()
            raise
        self._uploads.flush()
        if self._dropped:
            raise UserError(self._dropped)

    def _write(self, save: _Save) -> None:
        try:
            save.draft = save.opened.enter_context(storage.draft(save.uri))
            with self._mutex:
                self._pending = [*(each for each in self._pending if not each.over), save]
                save.base = self._base if save.step < self.last_step else None
            if save.base:
                self._require_base(save, save.base)
            side_by_side(save.parts, partial(self._compare, save))
            self._choose(save)
            side_by_side(save.parts, partial(self._write_part, save))
            save.snapshot.clear()
            with self._mutex:
                older, self._last, self._dropped = self._last, save, ""
                if older and not (older.running or older.over):
                    older.over = True
                    self._replaced.append(older)
            self._uploads.put("checkpoint", partial(self._publish, save))
        # The thread that trains has to end, as if it had saved itself.
        except BaseException as error:
            self._failure = error
            save.marks.clear()
            save.rows = {}
        save.snapshot.clear()
        try:
            # What is replaced and cannot be removed now is, before the next one is published.
            with suppress(UserError):
                if self._failure:
                    self._discard(save)
                self._discard_replaced()
        finally:
            self._written.set()

    def _require_base(self, save: _Save, base: Marked) -> None:
        """Make a save whole whose base was deleted, as long as there is a snapshot to write."""
        try:
            with shorter_retry(ASK_SECONDS):
                if bases.is_there(base.uri, base.created):
                    return
        except UserError:
            # It is asked for again before the save is published.
            return
        log.warning("%s will be whole: its base %s was deleted", save.uri, base.uri)
        with self._mutex:
            save.base = None
            if self._base is base:
                self._base = None

    def _compare(self, save: _Save, server: int) -> None:
        """Find out on a server which rows of its large variables changed since the base."""
        own = {path: save.snapshot[path] for path, at in save.servers.items() if at == server}
        with lost(server), operating_on(server):
            self._require_finite(own, save.step)
            if not self.share or save.step >= self.last_step:
                return
            for path in (path for path, value in own.items() if is_large(value)):
                save.marks[path] = fingerprints(own[path])
                before = save.base.marks.get(path) if save.base else None
                if before is not None and before.shape == save.marks[path].shape:
                    save.rows[path] = changed_rows(save.marks[path], before)

    def _choose(self, save: _Save) -> None:
        """Decide whether this is a difference, and which variables it holds rows of."""
        size = bytes_of
        gains = {
            path: size(save.snapshot[path]) - size(save.snapshot[path], rows)
            for path, rows in save.rows.items()
        }
        whole = sum(map(size, save.snapshot.values()))
        gained = sum(gain for gain in gains.values() if gain > 0)
        if gained and whole - gained <= self.share * whole:
            save.rows = {path: rows for path, rows in save.rows.items() if gains[path] > 0}
            save.marks.clear()
        else:
            with self._mutex:
                save.rows, save.base = {}, None
        stored = {
            path: replace(each, changed=int(save.rows[path].shape[0]))
            if path in save.rows
            else each
            for path, each in save.stored.items()
        }
        fields = {**save.fields, "variables": contents.to_field(stored)}
        if save.base:
            fields[bases.FIELD] = {"uri": save.base.uri, "created": save.base.created}
        save.fields = fields

    def _write_part(self, save: _Save, server: int) -> None:
        names: list[str] = []
        values: list[tf.Tensor] = []
        with operating_on(server):
            for path in (path for path, at in save.servers.items() if at == server):
                key, rows = save.layout.keys[path], save.rows.get(path)
                # Of a difference, no more than one whole value is there next to its rows.
                value = save.snapshot.pop(path)
                if rows is None:
                    names, values = [*names, key], [*values, value]
                    continue
                names += [f"{CHANGED_ROWS}{key}", f"{CHANGED_VALUES}{key}"]
                with lost(server):
                    values += [rows, tf.gather(value, rows)]
            # The first has what belongs to no variable.
            if save.parts[server] == 0:
                names, values = [*names, GRAPH], [*values, tf.constant(save.layout.graph)]
        written = partial(
            tf.raw_ops.SaveV2,
            prefix=save.prefix(server),
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=values,
        )
        self.servers.on_files(server, WRITE, save.prefix(server), written)

    def _require_finite(self, values: Mapping[str, tf.Tensor], step: int) -> None:
        for path, value in values.items():
            if value.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(value))):
                raise self._owner.not_finite(path, step)

    def _publish(self, save: _Save) -> None:
        with self._mutex:
            if save.over:
                return
            save.running = True
        try:
            self._discard_replaced()
            self._owner.before_publication()
            if save.base and not bases.is_there(save.base.uri, save.base.created):
                self._drop(save, save.base)
                return
            if not save.replies and storage.is_published(save.uri):
                # A valid one would have been resumed.
                storage.delete(save.uri)
            side_by_side(save.parts, partial(self._publish_part, save))
            small = self._add_small(save)
            self._owner.before_publication()
            entries = [*small, *(each.entry for each in save.replies.values())]
            made = storage.commit(
                save.draft, save.uri, kind=KIND, files=entries, fields=save.fields
            )
            with self._mutex:
                if save.marks:
                    self._base = Marked(uri=save.uri, created=made.created, marks=save.marks)
                save.running, save.over = False, True
            save.opened.close()
        except BaseException:
            with self._mutex:
                # At once: a newer one leaves what still runs to its end, and removes all else.
                save.running = False
                # A newer one was waiting for its end.
                save.over = self._last is not save
            if save.over:
                self._discard(save)
            raise
        self._owner.published(save.uri, save.step)

    def _discard_replaced(self) -> None:
        """Remove the parts of those in whose place a newer one is published."""
        while replaced := self._next_replaced():
            self._discard(replaced)
            with self._mutex, suppress(ValueError):
                self._replaced.remove(replaced)

    def _next_replaced(self) -> _Save | None:
        with self._mutex:
            return self._replaced[0] if self._replaced else None

    def _publish_part(self, save: _Save, server: int) -> None:
        if server not in save.replies:
            name = contents.data_file(save.parts[server], len(save.parts))
            request = Request(
                action="publish", uri=save.draft, prefix=save.prefix(server), name=name
            )
            save.replies[server] = self.servers.ask(server, request)

    def _add_small(self, save: _Save) -> list[storage.FileEntry]:
        """Add what is no data of a server, which is written on this machine first."""
        with (
            reported(f"save {save.uri}"),
            tempfile.TemporaryDirectory(dir=self._scratch) as name,
        ):
            folder = Path(name)
            for path, data in save.files.items():
                (folder / path).write_bytes(data)
            merge([save.replies[server] for server in save.parts], folder, self.servers)
            return [storage.add_file(save.draft, at, at.name) for at in folder.iterdir()]

    def _drop(self, save: _Save, base: Marked) -> None:
        """Do not publish a difference that nobody could read; what is saved next is whole."""
        reason = f"{save.uri} is not published: its base {base.uri} was deleted"
        log.warning("%s", reason)
        with self._mutex:
            save.running, save.over = False, True
            if self._base is base:
                self._base = None
            if self._last is save:
                self._dropped = f"{reason}; start again to go on from the newest one that is whole"
        self._discard(save)

    def _discard(self, save: _Save) -> None:
        save.opened.close()
        if save.draft and not storage.local_path(save.draft):
            side_by_side(
                save.parts,
                lambda n: self.servers.ask(n, Request(action="discard", prefix=save.prefix(n))),
            )


def _copies(variables: Variables, servers: Mapping[str, int], server: int) -> dict[str, tf.Tensor]:
    """Return what a server's variables are now; later updates change nothing of it."""
    with lost(server), operating_on(server):
        own = (path for path, at in servers.items() if at == server)
        return {path: variables[path].read_value() for path in own}
