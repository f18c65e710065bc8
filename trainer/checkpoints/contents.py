"""The contents of a checkpoint according to its manifest: variables by path, and their parts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import newest_checkpoint, read_checkpoint
from flotilla.trainer.runtime.json_records import parse_record

PREFIX = "variables"
# The manifest field about servers that were lost since the previous checkpoint. For each server, it
# contains the paths of its variables and the global step to which their values were reset.
RECOVERED = "recovered"
INDEX_FILE = f"{PREFIX}.index"
# TensorFlow's escape sequences for paths in checkpoint keys.
_ESCAPED = {"..": ".", ".S": "/"}
_ROOT = "variables/"
_MOST_NUMBERS = 1 << 60


@dataclass(frozen=True, kw_only=True)
class StoredVariable:
    """A variable in a checkpoint: its TensorFlow dtype name, its shape, and its part."""

    dtype: str
    shape: tuple[int, ...]
    part: int = 0

    @classmethod
    def describe(cls, variable: Any, *, part: int = 0) -> StoredVariable:
        """Describe a TensorFlow variable."""
        return cls(dtype=variable.dtype.name, shape=tuple(variable.shape.as_list()), part=part)

    @property
    def rows(self) -> int:
        """The length of the first axis (1 for a scalar)."""
        return self.shape[0] if self.shape else 1

    @property
    def bytes(self) -> int:
        """The size of the values in bytes, or 0 if the size of the dtype is unknown."""
        # Use the first number in a name such as float8_e4m3fn, because only this one is a size.
        digits = re.search(r"[0-9]{1,3}", self.dtype)
        bits = 8 if self.dtype == "bool" else int(digits[0]) if digits else 0
        return math.prod(self.shape) * bits // 8

    @property
    def is_possible(self) -> bool:
        """Whether the shape and the part are valid."""
        return min((*self.shape, self.part)) >= 0 and math.prod(self.shape) < _MOST_NUMBERS


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of one checkpoint.

    Attributes:
        bytes: the total size of its files.
        parts: the size of each part's data, in bytes.
        variables: the variables by path. Empty if the manifest lists none.
    """

    uri: str
    global_step: int
    created: str
    bytes: int
    parts: tuple[int, ...]
    variables: Mapping[str, StoredVariable]


def data_file(part: int, of: int) -> str:
    """Return the path of a part's data file, as TensorFlow names it."""
    return f"{PREFIX}.data-{part:05d}-of-{of:05d}"


def is_data(path: str) -> bool:
    """Return whether a path in a checkpoint is a data file."""
    return path.startswith(f"{PREFIX}.data-")


def is_variable(key: str) -> bool:
    """Return whether a key in a TensorFlow checkpoint belongs to a variable."""
    return key.startswith(_ROOT)


def find_path(key: str) -> str:
    """Return the path of the variable with this key."""
    escaped = key.removeprefix(_ROOT).partition("/")[0]
    return re.sub(r"\.\.|\.S", lambda part: _ESCAPED[part[0]], escaped)


def to_field(variables: Mapping[str, StoredVariable]) -> dict[str, Any]:
    """Return the variables as the manifest field `variables`."""
    return {
        path: {"dtype": each.dtype, "shape": list(each.shape), "part": each.part}
        for path, each in variables.items()
    }


def read_field(fields: Mapping[str, Any]) -> dict[str, StoredVariable]:
    """Return the variables in a manifest's fields. Invalid entries are skipped."""
    tree = fields.get("variables")
    found = {
        path: parse_record(StoredVariable, each)
        for path, each in (tree.items() if isinstance(tree, dict) else ())
    }
    return {path: each for path, each in found.items() if each and each.is_possible}


def find_parts(variables: Mapping[str, StoredVariable], paths: Iterable[str]) -> set[int] | None:
    """Return the parts that contain these variables, or None if a path is unknown."""
    numbers = {variables[path].part if path in variables else None for path in paths}
    return None if None in numbers else {each for each in numbers if each is not None}


def contents(uri: str) -> Contents:
    """Read the checkpoint at `uri`, or the newest one below it. Raises `UserError`."""
    if not storage.is_published(uri):
        uri, _ = newest_checkpoint(uri)
    manifest = read_checkpoint(uri)
    return Contents(
        uri=uri,
        global_step=manifest.fields["global_step"],
        created=manifest.created,
        bytes=manifest.total_bytes,
        parts=tuple(each.bytes for each in manifest.files if is_data(each.path)),
        variables=read_field(manifest.fields),
    )
