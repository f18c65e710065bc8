"""The parameter servers, as far as they write and read parts of checkpoints: the chief's side.

An operation that is placed on a server reads and writes files in the server's working folder. What
needs more than an operation is asked for; see `trainer.checkpoints.part_server`.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context, executor

from trainer import storage
from trainer.checkpoints import bases, contents, differences, part_server
from trainer.checkpoints.contents import INDEX_FILE, PREFIX
from trainer.checkpoints.part_server import Reply, Request
from trainer.errors import ClusterLostError, UserError
from trainer.json_records import parse
from trainer.models.embedding_table import may_lack
from trainer.strategies.placement import server_device

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
# Between two looks for an answer: first and last.
FIRST_SECONDS, LAST_SECONDS = 0.02, 0.5
# A full disk, a folder that may not be written, a file over the limit of its size.
UNWRITABLE = (
    tf.errors.ResourceExhaustedError,
    tf.errors.PermissionDeniedError,
    tf.errors.OutOfRangeError,
)
Result = TypeVar("Result")
Variables = Mapping[str, tf.Variable]
log = logging.getLogger(__name__)


def server_of(variable: tf.Variable) -> int | None:
    """Return the number of the parameter server that holds a variable; None elsewhere."""
    device = tf.DeviceSpec.from_string(variable.device)
    return device.task if device.job == "ps" else None


class PartServers:
    """The parameter servers of a cluster, and what they are asked for; thread-safe."""

    def __init__(self, count: int, io_device: str | None) -> None:
        """Describe them; `io_device` is the chief's. Nothing is asked for yet."""
        self.count = count
        self.io_device = io_device
        self._are_ready: bool | None = None

    def are_ready(self) -> bool:
        """Say whether each server answers in a folder of its own; asked for once.

        Servers outlive a chief: what another one has left with them is removed then.
        """
        if self._are_ready is None:
            answers = [self._read(server, part_server.READY) for server in range(self.count)]
            self._are_ready = all(
                data is not None and parse(data) == {"task": f"ps-{server}"}
                for server, data in enumerate(answers)
            )
            if self._are_ready:
                side_by_side(
                    range(self.count), lambda server: self.ask(server, Request(action="begin"))
                )
            else:
                log.warning("servers that are not ours: the chief writes their variables")
        return self._are_ready

    def ask(self, server: int, request: Request) -> Reply:
        """Return the answer of a server.

        Raises:
            UserError: it cannot do what was asked for; `storage.Unavailable` where it may later.
            ClusterLostError: it is gone.
        """
        name = f"{secrets.token_hex(8)}{part_server.SUFFIX}"
        with lost(server), operating_on(server):
            try:
                tf.io.write_file(f"{part_server.REQUESTS}/{name}", request.to_json())
            except UNWRITABLE as error:
                raise unwritable(error, f"ps-{server}") from None
        pause = FIRST_SECONDS
        while (data := self._read(server, f"{part_server.REPLIES}/{name}")) is None:
            time.sleep(pause)
            pause = min(2 * pause, LAST_SECONDS)
        if data == request.to_json().encode():
            reason = "its disk is full, or cannot be written; see its log"
            raise storage.Unavailable(f"ps-{server}: {part_server.UNWRITTEN}: {reason}")
        reply = Reply.from_json(data)
        if reply.error:
            raise (storage.Unavailable if reply.transient else UserError)(reply.error)
        return reply

    def restore(self, folder: Path, uri: str, fields: Mapping[str, Any], wanted: Variables) -> None:
        """Assign values of the checkpoint at `uri`, whose index is in `folder`, on the servers.

        Raises:
            ValueError: it lacks a variable, or has it in another shape or type.
            UserError: a server cannot fetch a part.
        """
        layout = Layout.of_checkpoint(folder, fields)
        layout.require(wanted)
        places = {path: server_of(each) or 0 for path, each in wanted.items()}

        def of_server(server: int) -> None:
            own = {path: each for path, each in wanted.items() if places[path] == server}
            if below := {path: each for path, each in own.items() if path in layout.changed}:
                base = bases.uri_of(uri, fields)
                self._restore(server, base, below, replace(layout, changed=frozenset()))
            self._restore(server, uri, own, layout)

        side_by_side(sorted(set(places.values())), of_server)

    def _restore(self, server: int, uri: str, own: Variables, layout: Layout) -> None:
        manifest = storage.read_manifest(uri)
        data = [each.path for each in manifest.files if contents.is_data(each.path)]
        numbers = contents.parts_of(contents.of_field(manifest.fields), own)
        named = {contents.data_file(each, len(data)) for each in numbers or ()}
        files = (INDEX_FILE, *(path for path in data if numbers is None or path in named))
        shared = storage.local_path(uri)
        fetched = f"{part_server.FOLDER}/restored-{secrets.token_hex(6)}"
        if not shared:
            self.ask(server, Request(action="fetch", uri=uri, prefix=fetched, files=files))
        prefix = f"{shared or fetched}/{PREFIX}"
        with lost(server), operating_on(server):
            # One after the other: no more than one value is there twice.
            for path, variable in own.items():
                if path in layout.changed:
                    differences.assign(variable, prefix, layout.keys[path])
                    continue
                (value,) = tf.raw_ops.RestoreV2(
                    prefix=prefix,
                    tensor_names=[layout.keys[path]],
                    shape_and_slices=[""],
                    dtypes=[variable.dtype],
                )
                with tf.device(variable.device):
                    variable.assign(value)
        if not shared:
            self.ask(server, Request(action="discard", prefix=fetched))

    def _read(self, server: int, path: str) -> bytes | None:
        """Return the content of a file in the folder of a server; None where there is none."""
        with lost(server), operating_on(server):
            # To read what is not there would log an error on the server.
            if not len(tf.io.matching_files(path)):
                return None
            data: bytes = tf.io.read_file(path).numpy()
            return data


def side_by_side(servers: Iterable[int], work: Callable[[int], Result]) -> list[Result]:
    """Return what `work` returns for each of these servers."""
    wanted = list(servers)
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        return list(pool.map(work, wanted))


def unwritable(error: tf.errors.OpError, where: object) -> UserError:
    """Return the error of a checkpoint that TensorFlow cannot write."""
    # The line after the stack of the graph is "PATH; REASON".
    last = error.message.strip().split("\n\n")[-1].splitlines()[0]
    return UserError(f"cannot write a checkpoint to {where}: {last.rpartition('; ')[2]}")


@contextmanager
def operating_on(server: int) -> Iterator[None]:
    """Run operations on a server, not in line with those of other threads."""
    own = executor.new_executor(enable_async=False, enable_streaming_enqueue=False)
    with context.executor_scope(own), tf.device(server_device(server)):
        yield


@contextmanager
def lost(server: int) -> Iterator[None]:
    """Turn an error of an operation that cannot fail otherwise into that of a lost server."""
    try:
        yield
    except tf.errors.OpError as error:
        line = str(error.message).strip().splitlines()[0]
        raise ClusterLostError(f"a task of the cluster is gone: ps-{server}: {line}") from error


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The keys by which a checkpoint of TensorFlow has variables, and its graph of objects.

    Of the variables in `changed` it has rows alone; the others are whole.
    """

    keys: Mapping[str, str]
    shapes: Mapping[str, list[int]]
    types: Mapping[str, tf.DType]
    graph: bytes = b""
    changed: frozenset[str] = frozenset()

    @classmethod
    def of_checkpoint(cls, folder: Path, fields: Mapping[str, Any]) -> Layout:
        """Read the indexes of a checkpoint, and of its base where the fields name one."""
        own = cls.read(folder / PREFIX)
        if not fields.get(bases.FIELD):
            return own
        base = cls.read(folder / bases.FOLDER / PREFIX)
        below = own.changed & base.keys.keys()
        return replace(
            own,
            keys={**{path: base.keys[path] for path in below}, **own.keys},
            shapes={**{path: base.shapes[path] for path in below}, **own.shapes},
            types={**{path: base.types[path] for path in below}, **own.types},
        )

    @classmethod
    def read(cls, prefix: Path) -> Layout:
        """Read the index of a checkpoint, whose data may be absent."""
        reader = tf.train.load_checkpoint(str(prefix))
        shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        keys = {contents.path_of(key): key for key in shapes if contents.is_variable(key)}
        return cls(
            keys=keys,
            shapes={path: shapes[key] for path, key in keys.items()},
            types={path: types[key] for path, key in keys.items()},
            changed=frozenset(
                contents.path_of(key.removeprefix(differences.ROWS))
                for key in shapes
                if key.startswith(differences.ROWS)
            ),
        )

    @classmethod
    def of(cls, paths: tuple[str, ...], io_device: str | None, scratch: Path) -> Layout:
        """Return that of variables with these paths: TensorFlow's own, of scalars.

        Raises:
            UserError: it cannot be written.
        """
        with tempfile.TemporaryDirectory(dir=scratch) as folder, tf.device(io_device):
            options = tf.train.CheckpointOptions(experimental_io_device=io_device)
            scalars = {path: tf.Variable(0.0, trainable=False) for path in paths}
            prefix = Path(folder, PREFIX)
            try:
                tf.train.Checkpoint(variables=scalars).write(str(prefix), options)
            except UNWRITABLE as error:
                raise unwritable(error, scratch) from None
            graph: bytes = tf.train.load_checkpoint(str(prefix)).get_tensor(GRAPH)
            found = cls.read(prefix)
            return cls(keys=found.keys, shapes=found.shapes, types=found.types, graph=graph)

    def without_lacking(self, wanted: Variables) -> Variables:
        """Return variables without those that a checkpoint may lack, and this one does."""
        return {
            path: each for path, each in wanted.items() if path in self.shapes or not may_lack(path)
        }

    def require(self, wanted: Variables) -> None:
        """Raise `ValueError` where the checkpoint has not each variable in its shape and type."""
        for path, variable in wanted.items():
            if path not in self.keys:
                raise ValueError(f"it has no {path}")
            shape = variable.shape.as_list()
            if self.shapes[path] != shape or self.types[path] != variable.dtype:
                there = f"{self.types[path].name} {self.shapes[path]}"
                raise ValueError(f"{path} is {there} there and {variable.dtype.name} {shape} here")
