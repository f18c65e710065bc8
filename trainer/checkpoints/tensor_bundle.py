"""Values of variables in TensorFlow's checkpoint files (tensor bundles).

`BundleWriter` writes the same variables many times with one graph. TensorFlow's own `Checkpoint`
traces a new graph for each save, while training waits.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import PREFIX, find_path, is_variable
from flotilla.trainer.embeddings.embedding_table import may_lack
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.errors import PASSING
from flotilla.trainer.storage.store import retry_until_deadline

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
# Errors for a full disk, a folder without permission, and a file above a size limit.
_UNWRITABLE = (
    tf.errors.ResourceExhaustedError,
    tf.errors.PermissionDeniedError,
    tf.errors.OutOfRangeError,
)
# The operating system's messages. They appear in errors of any type, because TensorFlow has no
# type for a disk failure. A missing file is excluded, because it means a restarted server.
_REASONS = {os.strerror(number) for number in errno.errorcode if number != errno.ENOENT}
_REMEDIES = {
    **{os.strerror(number): "check whether the file system responds" for number in PASSING},
    os.strerror(errno.EIO): "look for disk errors in the system log of that machine",
    os.strerror(errno.ESTALE): "mount the file system again",
}
_PASSING = {os.strerror(number) for number in PASSING}
WRITE, READ = "write a checkpoint to", "read a checkpoint from"
_OTHERWISE = {WRITE: "free some space there, or make it writable", READ: "make it readable"}
Variables = Mapping[str, tf.Variable]


@contextmanager
def report_file_errors(action: str, where: Callable[[], object]) -> Iterator[None]:
    """Convert a file error of TensorFlow to a `UserError`. Other errors are unchanged.

    `action` is `WRITE` or `READ`. `where` returns the folder for the message. A transient error
    becomes `storage.Unavailable`.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if not (reason := _reason(error, action)):
            raise
        remedy = _REMEDIES.get(reason, _OTHERWISE[action])
        kind = storage.Unavailable if reason in _PASSING else UserError
        raise kind(f"cannot {action} {where()}: {reason}; {remedy}") from None


def _reason(error: tf.errors.OpError, action: str) -> str:
    """Return the operating system's error message (empty for other errors)."""
    # The last line, after the stack trace of the graph, is "PATH; REASON".
    last, *_ = error.message.strip().split("\n\n")[-1].splitlines() or [""]
    path, _, reason = last.partition(" [Op:")[0].rpartition("; ")
    is_written = action == WRITE and isinstance(error, _UNWRITABLE)
    return reason if is_written or (path and reason in _REASONS) else ""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The keys of variables in a TensorFlow checkpoint, and its object graph."""

    keys: Mapping[str, str]
    shapes: Mapping[str, list[int]]
    types: Mapping[str, tf.DType]
    graph: bytes = b""

    @classmethod
    def read(cls, prefix: Path) -> Layout:
        """Read the index of a checkpoint. The data may be missing."""
        reader = tf.train.load_checkpoint(str(prefix))
        shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        keys = {find_path(key): key for key in shapes if is_variable(key)}
        return cls(
            keys=keys,
            shapes={path: shapes[key] for path, key in keys.items()},
            types={path: types[key] for path, key in keys.items()},
        )

    def fitting(self, wanted: Variables) -> Variables:
        """Return `wanted` without missing optional variables. Raises `ValueError` on a mismatch."""
        there = {
            path: each for path, each in wanted.items() if path in self.shapes or not may_lack(path)
        }
        for path, variable in there.items():
            if path not in self.keys:
                raise ValueError(f"it has no {path}")
            shape = variable.shape.as_list()
            if self.shapes[path] != shape or self.types[path] != variable.dtype:
                other = f"{self.types[path].name} {self.shapes[path]}"
                raise ValueError(
                    f"{path} is {other} in the checkpoint, not {variable.dtype.name} {shape}"
                )
        return there


def assign(variables: Variables, layout: Layout, prefix: str, io_device: str | None = None) -> None:
    """Assign the values of a bundle, one at a time. The device `io_device` reads the bundle."""
    for path, variable in variables.items():
        with tf.device(io_device) if io_device else nullcontext():
            (value,) = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=[layout.keys[path]],
                shape_and_slices=[""],
                dtypes=[variable.dtype],
            )
        with tf.device(variable.device):
            variable.assign(value)


def write(variables: Variables, prefix: Path, io_device: str | None) -> None:
    """Write a bundle of variables for a single save. Raises `UserError`."""
    retry_until_deadline(
        str(prefix.parent), partial(_write, variables, prefix, io_device, place=prefix.parent)
    )


def _write(variables: Variables, prefix: Path, io_device: str | None, *, place: Path) -> None:
    options = tf.train.CheckpointOptions(experimental_io_device=io_device)
    with report_file_errors(WRITE, lambda: place), tf.device(io_device):
        tf.train.Checkpoint(variables=dict(variables)).write(str(prefix), options)


def make_layout(variables: Iterable[str], io_device: str | None, scratch: Path) -> Layout:
    """Return the (cached) layout for saving these variables. Raises `UserError`."""
    scratch.mkdir(parents=True, exist_ok=True)
    make = partial(_read_layout, tuple(sorted(variables)), io_device, scratch)
    return retry_until_deadline(str(scratch), make)


@cache
def _read_layout(paths: tuple[str, ...], io_device: str | None, scratch: Path) -> Layout:
    """Save a scalar under each path with TensorFlow, and read the layout of that checkpoint."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        prefix = Path(folder, PREFIX)
        with tf.device(io_device):
            scalars = {path: tf.Variable(0.0, trainable=False) for path in paths}
        _write(scalars, prefix, io_device, place=scratch)
        graph: bytes = tf.train.load_checkpoint(str(prefix)).get_tensor(GRAPH)
        return replace(Layout.read(prefix), graph=graph)


class BundleWriter:
    """A writer of bundles on this machine, which uses one graph for all saves."""

    def __init__(self, scratch: Path) -> None:
        """Keep temporary files in the folder `scratch`."""
        self._scratch = scratch
        self._reader: _Reader | None = None

    def prepare(self, variables: Variables, io_device: str | None) -> None:
        """Trace the graph and create the layout. Raises `UserError`."""
        self._get_reader(variables, io_device)
        make_layout(variables, io_device, self._scratch)

    def read(self, variables: Variables, io_device: str | None) -> Values:
        """Read the values. Do not change the variables until the values are written."""
        return self._get_reader(variables, io_device)()

    def write(self, values: Values, prefix: Path, io_device: str | None) -> None:
        """Write a bundle. Raises `UserError`."""
        layout = make_layout(values.by_path, io_device, self._scratch)
        names = [*(layout.keys[path] for path in values.by_path), GRAPH]

        def write_once() -> None:
            with report_file_errors(WRITE, lambda: prefix.parent), tf.device(io_device):
                tf.raw_ops.SaveV2(
                    prefix=str(prefix),
                    tensor_names=names,
                    shape_and_slices=[""] * len(names),
                    tensors=[*values.by_path.values(), tf.constant(layout.graph)],
                )

        retry_until_deadline(str(prefix.parent), write_once)

    def _get_reader(self, variables: Variables, io_device: str | None) -> _Reader:
        if self._reader is None or not self._reader.reads(variables, io_device):
            self._reader = _Reader(variables, io_device)
        return self._reader


@dataclass(frozen=True, kw_only=True)
class Values:
    """The values of variables by path, and the paths of values that are not finite."""

    by_path: Mapping[str, tf.Tensor]
    not_finite: Sequence[str]


class _Reader:
    """A graph that reads variables on several tasks in one call."""

    def __init__(self, variables: Variables, io_device: str | None) -> None:
        self._variables, self._io_device = dict(variables), io_device
        self._paths: dict[str, list[str]] = {}
        for path, each in variables.items():
            self._paths.setdefault(each.device, []).append(path)
        self._read = tf.function(self._build_reads, autograph=False).get_concrete_function()

    def reads(self, variables: Variables, io_device: str | None) -> bool:
        """Return whether the graph reads these variables, in this order."""
        same = [*variables] == [*self._variables] and io_device == self._io_device
        return same and all(self._variables[path] is each for path, each in variables.items())

    def __call__(self) -> Values:
        values, finite = self._read()
        paths = [path for of_device in self._paths.values() for path in of_device]
        flags = dict(zip(paths, np.concatenate([each.numpy() for each in finite]), strict=True))
        return Values(
            by_path={path: values[path] for path in self._variables},
            not_finite=[path for path in self._variables if not flags[path]],
        )

    def _build_reads(self) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
        values: dict[str, tf.Tensor] = {}
        finite = []
        for device, paths in self._paths.items():
            with tf.device(device):
                own = {path: _value(self._variables[path]) for path in paths}
                finite.append(tf.stack([_is_finite(each) for each in own.values()]))
            values |= own
        # Name the CPU. Otherwise, a task with a GPU would copy all values to the GPU.
        with tf.device(self._io_device), tf.device("/device:CPU:0"):
            here = {path: tf.identity(each) for path, each in values.items()}
            return here, [tf.identity(each) for each in finite]


def _value(variable: tf.Variable) -> tf.Tensor:
    # If a variable has sparse updates, any other way to read it copies the value.
    if isinstance(variable, BaseResourceVariable):
        return variable.read_value_no_copy()
    return tf.convert_to_tensor(variable)


def _is_finite(value: tf.Tensor) -> tf.Tensor:
    if not value.dtype.is_floating:
        return tf.constant(True)
    return tf.reduce_all(tf.math.is_finite(value))
