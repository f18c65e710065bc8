"""The chief's side of checkpoints by parts: requests to parameter servers."""

from __future__ import annotations

import base64
import logging
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import contents, part_server
from flotilla.trainer.checkpoints.contents import INDEX_FILE, PREFIX
from flotilla.trainer.checkpoints.part_server import Reply, Request
from flotilla.trainer.checkpoints.tensor_bundle import (
    READ,
    WRITE,
    Layout,
    Variables,
    assign,
    report_file_errors,
)
from flotilla.trainer.runtime.errors import ClusterLostError, UserError
from flotilla.trainer.runtime.json_records import parse_mapping
from flotilla.trainer.storage.retry import retry_until_deadline
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
        places = {path: find_server(each) or 0 for path, each in wanted.items()}

        def restore_own(server: int) -> None:
            own = {path: each for path, each in wanted.items() if places[path] == server}
            self._restore(server, uri, own, layout)

        side_by_side(sorted(set(places.values())), restore_own)

    def _restore(self, server: int, uri: str, own: Variables, layout: Layout) -> None:
        manifest = storage.read_manifest(uri)
        data = [each.path for each in manifest.files if contents.is_data(each.path)]
        numbers = contents.find_parts(contents.read_field(manifest.fields), own)
        named = {contents.data_file(each, len(data)) for each in numbers or ()}
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
        data = self._read(server, part_server.READY)
        try:
            return parse_mapping(data) if data else {}
        except ValueError:
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
    with lost(server), run_on_server(server), report_file_errors(action, where):
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
    """Clear the local variables in the tracebacks of an error and its causes."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def run_on_server(server: int) -> AbstractContextManager[None]:
    """Run operations on a server, outside of the executor that all threads share."""
    return run_on_device(server_device(server))


@contextmanager
def lost(server: int) -> Iterator[None]:
    """Convert a TensorFlow error to `ClusterLostError`. Only a lost server causes one here."""
    try:
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
        if contents.is_data(path.name) or path.name.startswith("part-"):
            path.unlink()
