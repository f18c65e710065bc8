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

import base64
import logging
import os
import secrets
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import part_server
from flotilla.trainer.checkpoints.history import UploadQueue
from flotilla.trainer.checkpoints.index import (
    INDEX_FILE,
    KIND,
    PREFIX,
    StoredVariable,
    data_file,
    find_parts,
    is_data,
    read_field,
    to_field,
)
from flotilla.trainer.checkpoints.part_server import Reply, Request
from flotilla.trainer.checkpoints.tensor_bundle import (
    GRAPH,
    READ,
    WRITE,
    Layout,
    Variables,
    assign,
    make_layout,
    report_file_errors,
)
from flotilla.trainer.runtime.errors import ClusterLostError, UserError
from flotilla.trainer.runtime.json_records import parse_mapping
from flotilla.trainer.storage.errors import report_errors
from flotilla.trainer.storage.store import retry_until_deadline
from flotilla.trainer.strategies.placement import fetch_value, run_on_device, server_device

# First and longest pause between two polls for a reply, and interval of probes, in seconds.
FIRST_SECONDS, LAST_SECONDS, PROBE_SECONDS = 0.02, 0.5, 5.0
Result = TypeVar("Result")
log = logging.getLogger(__name__)


def find_server(variable: tf.Variable) -> int | None:
    """Return the number of the parameter server that holds a variable, or None if none does."""
    device = tf.DeviceSpec.from_string(variable.device)
    return device.task if device.job == "ps" else None


def count_bytes(variables: Variables) -> int:
    """Return the total size of variables in bytes."""
    return sum((each.shape.num_elements() or 0) * each.dtype.size for each in variables.values())


class PartServers:
    """The parameter servers of a cluster, which answer requests. Thread-safe."""

    def __init__(self, count: int, io_device: str | None) -> None:
        """Store the arguments. No request is sent yet. `io_device` is the device of the chief."""
        self.count = count
        self.io_device = io_device
        self._are_ready: bool | None = None
        self._folders: dict[int, str] = {}

    def are_ready(self) -> bool:
        """Return whether all servers answer. The first call removes files of an earlier chief."""
        if self._are_ready is None:
            answers = [self._ready(server) for server in range(self.count)]
            self._are_ready = all(
                each.get("task") == f"ps-{server}" for server, each in enumerate(answers)
            )
            self._folders = {n: str(each.get("folder", "")) for n, each in enumerate(answers)}
            if self._are_ready:
                side_by_side(
                    range(self.count), lambda server: self.ask(server, Request(action="begin"))
                )
            else:
                log.warning(
                    "the chief writes all variables, because not every server can write its own"
                )
        return self._are_ready

    def ask(self, server: int, request: Request) -> Reply:
        """Send a request, and return the reply. Raises `UserError` or `ClusterLostError`."""
        name = f"{secrets.token_hex(8)}{part_server.SUFFIX}"
        self._write(server, f"{part_server.REQUESTS}/{name}", request.to_json())
        pause, probed = FIRST_SECONDS, time.monotonic()
        while (data := self._read(server, f"{part_server.REPLIES}/{name}")) is None:
            if time.monotonic() - probed >= PROBE_SECONDS:
                # A server with a full disk cannot write an error reply, so probe its disk.
                self._write(server, part_server.PROBE, "")
                probed = time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, LAST_SECONDS)
        if data == request.to_json().encode():
            where = self.place(server, f"{part_server.REPLIES}/{name}")
            reason = "the disk is full or not writable; see the log of the server"
            raise storage.Unavailable(f"{where}: {part_server.UNWRITTEN}: {reason}")
        reply = Reply.from_json(data)
        if reply.error:
            raise (storage.Unavailable if reply.transient else UserError)(reply.error)
        return reply

    def place(self, server: int, path: str) -> str:
        """Return text that names the server and the folder of a file, for messages."""
        return f"ps-{server} ({os.path.dirname(os.path.join(self._folders.get(server, ''), path))})"

    def restore(self, uri: str, layout: Layout, wanted: Variables) -> None:
        """Assign the values of the checkpoint at `uri` on the servers that hold the variables."""
        own: dict[int, dict[str, tf.Variable]] = {}
        for path, each in wanted.items():
            own.setdefault(find_server(each) or 0, {})[path] = each
        side_by_side(own, lambda server: self._restore(server, uri, own[server], layout))

    def _restore(self, server: int, uri: str, own: Variables, layout: Layout) -> None:
        manifest = storage.read_manifest(uri)
        data = [each.path for each in manifest.files if is_data(each.path)]
        numbers = find_parts(read_field(manifest.fields), own)
        named = {data_file(each, len(data)) for each in numbers or ()}
        files = (INDEX_FILE, *(path for path in data if numbers is None or path in named))
        shared = storage.local_path(uri)
        fetched = f"{part_server.FOLDER}/restored-{secrets.token_hex(6)}"
        if not shared:
            self.ask(server, Request(action="fetch", uri=uri, prefix=fetched, files=files))
        prefix = f"{shared or fetched}/{PREFIX}"
        self.retry(server, READ, prefix, partial(assign, own, layout, prefix))
        if not shared:
            self.ask(server, Request(action="discard", prefix=fetched))

    def _ready(self, server: int) -> dict[str, Any]:
        """Return a server's description of itself (empty if it does not answer)."""
        with suppress(ValueError):
            return parse_mapping(self._read(server, part_server.READY) or b"")
        return {}

    def retry(self, server: int, action: str, path: str, work: Callable[[], Result]) -> Result:
        """Run `work`, which uses files of a server. Retry it while its error may be transient."""
        place = partial(self.place, server, path)
        return retry_until_deadline(place(), partial(_once, server, action, place, work))

    def _write(self, server: int, path: str, data: str) -> None:
        self.retry(server, WRITE, path, lambda: tf.io.write_file(path, data))

    def _read(self, server: int, path: str) -> bytes | None:
        """Return the content of a file in a server's folder, or None if it does not exist."""

        def read() -> bytes | None:
            # Reading a missing file would log an error on the server.
            if not len(tf.io.matching_files(path)):
                return None
            data: bytes = fetch_value(tf.io.read_file(path))
            return data

        return self.retry(server, READ, path, read)


# Define this at module level. Otherwise, an error would keep a closure and its tensors alive.
def _once(server: int, action: str, where: Callable[[], str], work: Callable[[], Result]) -> Result:
    with _run_on_server(server), report_file_errors(action, where):
        return work()


def side_by_side(servers: Iterable[int], work: Callable[[int], Result]) -> list[Result]:
    """Run `work` for all servers in parallel, and return the results. Errors hold no tensors."""

    def run(server: int) -> Result:
        try:
            return work(server)
        except BaseException as error:
            _drop_locals(error)
            raise

    wanted = list(servers)
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        return list(pool.map(run, wanted))


def _drop_locals(error: BaseException) -> None:
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


@contextmanager
def _run_on_server(server: int) -> Iterator[None]:
    """Run operations on a server, outside of the executor that all threads share.

    A TensorFlow error becomes `ClusterLostError`, because only a lost server causes one here.
    """
    try:
        with run_on_device(server_device(server)):
            yield
    except tf.errors.OpError as error:
        line, *_ = str(error.message).strip().splitlines() or [type(error).__name__]
        raise ClusterLostError(f"the cluster lost a task: ps-{server}: {line}") from error


def merge(parts: list[Reply], folder: Path, servers: PartServers) -> None:
    """Merge the indexes of the parts into one, without their data. Raises `UserError`."""
    prefixes = [str(folder / f"part-{number}") for number in range(len(parts))]
    for prefix, reply in zip(prefixes, parts, strict=True):
        Path(f"{prefix}{part_server.INDEX}").write_bytes(base64.b64decode(reply.index))
        Path(f"{prefix}{part_server.DATA}").touch()
    with report_file_errors(WRITE, lambda: folder), tf.device(servers.io_device):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes,
            destination_prefix=str(folder / PREFIX),
            delete_old_dirs=False,
        )
    for path in folder.iterdir():
        if is_data(path.name) or path.name.startswith("part-"):
            path.unlink()


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
            fields={**fields, "variables": to_field(stored)},
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
        """See `make_layout`."""
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
        with _run_on_server(server):
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
            with _run_on_server(server):
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
            name = data_file(save.parts[server], len(save.parts))
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
    with _run_on_server(server):
        own = (path for path, at in servers.items() if at == server)
        return {path: variables[path].read_value() for path in own}
