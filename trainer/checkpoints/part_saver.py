"""Checkpoints by parts, on the chief: each parameter server writes and reads its own variables.

Values never pass through the chief. A save has three stages, and training waits only for the first:

1. Each server copies its variables to its memory, as a snapshot. TensorFlow copies variables with
   row lookups immediately, and others at their next update.
2. Each server writes its snapshot to a file, unless a value is not finite, and frees it. The next
   save waits for the end of this stage, so there is never more than one copy.
3. Each server adds its file to a draft of the checkpoint
   (`flotilla.trainer.checkpoints.part_server`). The chief merges the indexes and commits the draft.
   Only then do readers see the checkpoint.

The result is a TensorFlow checkpoint with one data file per server, which all readers of
checkpoints support.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import contents, part_server
from flotilla.trainer.checkpoints.contents import StoredVariable
from flotilla.trainer.checkpoints.index import KIND
from flotilla.trainer.checkpoints.part_server import Reply, Request
from flotilla.trainer.checkpoints.servers import (
    PartServers,
    count_bytes,
    find_server,
    lost,
    merge,
    run_on_server,
    side_by_side,
)
from flotilla.trainer.checkpoints.tensor_bundle import GRAPH, WRITE, Layout, Variables, make_layout
from flotilla.trainer.checkpoints.uploads import UploadQueue
from flotilla.trainer.runtime.errors import ClusterLostError, UserError
from flotilla.trainer.storage.errors import report_errors


class Owner(Protocol):
    """The methods of a run's checkpoints that the saver calls."""

    def prepare_publication(self) -> None:
        """Raise an error if publication is not allowed. Otherwise, publish what must come first."""

    def note_published(self, uri: str, step: int) -> None:
        """Report that a checkpoint was published."""

    def not_finite(self, path: str, step: int) -> UserError:
        """Return the error for a variable with a value that is not finite."""


@dataclass(eq=False, kw_only=True)
class _Save:
    """A checkpoint to publish. `servers` maps paths to servers, and `parts` servers to parts."""

    uri: str
    fields: Mapping[str, Any]
    files: Mapping[str, bytes]
    servers: Mapping[str, int]
    parts: Mapping[int, int]
    layout: Layout
    token: str
    snapshot: dict[str, tf.Tensor] = field(default_factory=dict)
    draft: str = ""
    opened: ExitStack = field(default_factory=ExitStack)
    replies: dict[int, Reply] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.fields["global_step"])

    def prefix(self, server: int) -> str:
        """Return the prefix of a server's files. A local draft folder contains these files."""
        shared = storage.local_path(self.draft)
        name = f"part-{server}"
        return f"{shared}/{name}" if shared else f"{part_server.FOLDER}/{self.token}-{name}"


class PartSaver:
    """A saver of checkpoints by parts. Its next call raises the error of a background thread."""

    def __init__(
        self, servers: PartServers, owner: Owner, uploads: UploadQueue, scratch: Path, least: int
    ) -> None:
        """Save by parts if servers store at least `least` bytes."""
        self.servers = servers
        self.least = least
        self._owner = owner
        self._uploads = uploads
        self._scratch = scratch
        self._written = threading.Event()
        self._written.set()
        # Canceled saves with parts that have not been removed yet.
        self._unwanted: list[_Save] = []
        self._failure: BaseException | None = None

    def takes(self, variables: Variables) -> bool:
        """Return whether these variables are saved by parts."""
        held = {path: each for path, each in variables.items() if find_server(each) is not None}
        return bool(held) and count_bytes(held) >= self.least and self.servers.are_ready()

    def save(
        self, uri: str, variables: Variables, fields: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> None:
        """Take a snapshot, and publish it at `uri` in the background. Raises `UserError`."""
        self.settle()
        servers = {path: find_server(each) or 0 for path, each in variables.items()}
        parts = {server: part for part, server in enumerate(sorted(set(servers.values())))}
        stored = {
            path: StoredVariable.describe(each, part=parts[servers[path]])
            for path, each in variables.items()
        }
        save = _Save(
            uri=uri,
            fields={**fields, "variables": contents.to_field(stored)},
            files=files,
            servers=servers,
            parts=parts,
            layout=self.get_layout(variables),
            token=secrets.token_hex(6),
        )
        snapshots = side_by_side(parts, partial(_copies, variables, servers))
        save.snapshot = {path: value for own in snapshots for path, value in own.items()}
        self._written.clear()
        threading.Thread(target=self._write, args=(save,), name="parts", daemon=True).start()

    def get_layout(self, variables: Variables) -> Layout:
        """Return the cached layout of these variables, or create it. Raises `UserError`."""
        return make_layout(variables, self.servers.io_device, self._scratch)

    def require(self) -> None:
        """Raise the error of a background thread, if any."""
        if self._failure:
            raise self._failure

    def settle(self) -> None:
        """Wait until the servers have written all saves, and their publication is queued."""
        self._written.wait()
        self.require()

    def flush(self) -> None:
        """Wait until all saves are published. Raises `UserError`."""
        try:
            self.settle()
        except ClusterLostError:
            raise
        except UserError:
            # Wait for the upload of an earlier save, because the process exits after this error.
            with suppress(UserError):
                self._uploads.flush()
            raise
        self._uploads.flush()

    def _write(self, save: _Save) -> None:
        try:
            save.draft = save.opened.enter_context(storage.draft(save.uri))
            side_by_side(save.parts, partial(self._require_finite, save))
            side_by_side(save.parts, partial(self._write_part, save))
            save.snapshot.clear()
            publish, discard = partial(self._publish, save), partial(self._discard, save)
            self._uploads.put("checkpoint", publish, discard)
        # The training thread raises the error at its next call of `require`, as if it had saved the
        # checkpoint itself.
        except BaseException as error:
            self._failure = error
            save.snapshot.clear()
            self._discard(save)
        finally:
            self._written.set()

    def _require_finite(self, save: _Save, server: int) -> None:
        with lost(server), run_on_server(server):
            for path, value in save.snapshot.items():
                if save.servers[path] != server or not value.dtype.is_floating:
                    continue
                if not bool(tf.reduce_all(tf.math.is_finite(value))):
                    raise self._owner.not_finite(path, save.step)

    def _write_part(self, save: _Save, server: int) -> None:
        own = [path for path, at in save.servers.items() if at == server]
        names = [save.layout.keys[path] for path in own]
        values = [save.snapshot.pop(path) for path in own]
        # Store the object graph in the first part, because it belongs to no variable.
        if save.parts[server] == 0:
            with run_on_server(server):
                names, values = [*names, GRAPH], [*values, tf.constant(save.layout.graph)]
        written = partial(
            tf.raw_ops.SaveV2,
            prefix=save.prefix(server),
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=values,
        )
        self.servers.retry(server, WRITE, save.prefix(server), written)

    def _publish(self, save: _Save) -> None:
        self._owner.prepare_publication()
        if not save.replies and storage.is_published(save.uri):
            # The existing checkpoint is invalid: the run would have resumed from a valid one.
            storage.delete(save.uri)
        side_by_side(save.parts, partial(self._publish_part, save))
        small = self._add_small(save)
        self._owner.prepare_publication()
        entries = [*small, *(each.entry for each in save.replies.values())]
        storage.commit(save.draft, save.uri, kind=KIND, files=entries, fields=save.fields)
        save.opened.close()
        self._owner.note_published(save.uri, save.step)

    def _publish_part(self, save: _Save, server: int) -> None:
        if server not in save.replies:
            name = contents.data_file(save.parts[server], len(save.parts))
            request = Request(
                action="publish", uri=save.draft, prefix=save.prefix(server), name=name
            )
            save.replies[server] = self.servers.ask(server, request)

    def _add_small(self, save: _Save) -> list[storage.FileEntry]:
        """Write the small files on this machine, and add them to the draft."""
        with (
            report_errors(f"save {save.uri}"),
            tempfile.TemporaryDirectory(dir=self._scratch) as name,
        ):
            folder = Path(name)
            for path, data in save.files.items():
                (folder / path).write_bytes(data)
            merge([save.replies[server] for server in save.parts], folder, self.servers)
            return [storage.add_file(save.draft, at, at.name) for at in folder.iterdir()]

    def _discard(self, save: _Save) -> None:
        """Remove the parts of a save, and the remaining parts of earlier saves."""
        self._unwanted.append(save)
        for each in list(self._unwanted):
            # If a server is unavailable, the save stays in the list. If another thread has removed
            # it from the list, `remove` raises ValueError.
            with suppress(UserError, ValueError):
                self._remove(each)
                self._unwanted.remove(each)

    def _remove(self, save: _Save) -> None:
        save.opened.close()
        if save.draft and not storage.local_path(save.draft):
            side_by_side(
                save.parts,
                lambda n: self.servers.ask(n, Request(action="discard", prefix=save.prefix(n))),
            )


def _copies(variables: Variables, servers: Mapping[str, int], server: int) -> dict[str, tf.Tensor]:
    with lost(server), run_on_server(server):
        own = (path for path, at in servers.items() if at == server)
        return {path: variables[path].read_value() for path in own}
