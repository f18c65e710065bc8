"""The base of all readers: rows before types are known, and files as streams of bytes.

Compression and UTF-16 are detected by content, not by name. A file that exceeds the expansion
limit, or is not text, is rejected.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flotilla.trainer.runtime.errors import UserError

#: Called with the number of a broken record, and the reason.
Broken = Callable[[int, str], None]
END = -1
#: Maximum number of columns. Reading a table with this many takes a minute.
MOST_COLUMNS = 10_000
# With more than `_SOME` columns, at least the share `_FILLED` of the cells must have values.
_SOME, _FILLED = 1000, 0.02
#: Maximum size of the decompressed data of a file in memory, in bytes.
BLOCK_BYTES = 64 << 20
#: The values of a record by name, or the reason why it is broken, or None for an empty line.
Record = dict[str, Any] | str | None
OnOpen = Callable[[IO[bytes]], None]


@dataclass(frozen=True, order=True)
class Piece:
    """A range of a file: bytes of text, row groups of Parquet, or rows of npz.

    `END` is the end of the file. For a folder of images, a piece is a range of files, and `file` is
    the first one.
    """

    file: int
    start: int = 0
    stop: int = END


@dataclass(frozen=True)
class Rows:
    """Records of a piece, and their numbers within the piece.

    Columns in `mixed` had values of several types, which were converted to strings. `size` is the
    number of bytes that the records take in the file, or 0 if unknown.
    """

    table: pa.Table
    numbers: NDArray[np.int64]
    mixed: frozenset[str] = frozenset()
    size: int = 0


def require_few(count: int, where: str) -> None:
    """Raise `UserError` if there are more columns than allowed."""
    if count > MOST_COLUMNS:
        raise UserError(
            f"data.source: {where} has {count} columns, but at most {MOST_COLUMNS} can be read; "
            "keep the ones that matter, or write numbers that belong together as a list"
        )


class Reader(ABC):
    """A reader of one file format. It keeps no file open.

    Attributes:
        parsed: whether all values are strings, from which numbers must be parsed.
        varies: whether records may have different columns.
        lists: whether a single value is stored as a list of one.
        at_once: approximate number of records per block, or 0 if blocks are limited only by bytes.
    """

    parsed = False
    varies = False
    lists = False
    at_once = 0

    @abstractmethod
    def names(self, path: Path) -> tuple[str, ...]:
        """Return the columns of a file."""

    def notes(self, _path: Path) -> tuple[str, ...]:
        """Return remarks on how a file is read, without the file name."""
        return ()

    def index(self, _path: Path) -> tuple[str, ...]:
        """Return the columns that a file declares as an index."""
        return ()

    @abstractmethod
    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Return consecutive ranges of about `size` bytes that can be read independently."""

    @abstractmethod
    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records of a piece. Raises `UserError`."""

    def row(self, _path: Path, piece: Piece, number: int) -> int:
        """Return the row number of a record, counted from 1 as in an editor."""
        return piece.start + number + 1


class RecordReader(Reader):
    """Reads a format whose records are parsed one by one. A block has up to `at_once` records."""

    varies = True

    @abstractmethod
    def records(self, path: Path, piece: Piece, on_open: OnOpen) -> Iterator[Record]:
        """Yield the records of a piece. `on_open` is called with the open file."""

    @abstractmethod
    def array(self, path: Path, name: str, values: list[Any]) -> tuple[pa.Array, bool]:
        """Convert values to an array. Return whether values of several types became strings."""

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records, with all keys of each block if no columns are named."""
        files: list[Any] = []
        numbered = enumerate(self.records(path, piece, files.append))
        before, end = piece.start, path.stat().st_size if piece.stop == END else piece.stop
        for block in _blocks(numbered, self.at_once, lambda: bytes_read(files[0])):
            for number, record in block:
                if isinstance(record, str):
                    broken(number, record)
            kept = {number: each for number, each in block if isinstance(each, dict)}
            found = list(kept.values())
            arrays, mixed = {}, set()
            for name in columns or _list_keys(path, found):
                arrays[name], is_mixed = self.array(path, name, [each.get(name) for each in found])
                mixed |= {name} if is_mixed else set()
            table = pa.table(arrays) if arrays else pa.table({"": pa.nulls(len(found))})
            here = position(files[0]) or end
            yield Rows(table, np.array([*kept], np.int64), frozenset(mixed), size=here - before)
            before = here


def _blocks(
    records: Iterator[tuple[int, Record]], most: int, read: Callable[[], int]
) -> Iterator[list[tuple[int, Record]]]:
    """Yield lists of at most `most` records and about `BLOCK_BYTES`, as counted by `read`."""
    block: list[tuple[int, Record]] = []
    start = 0
    for record in records:
        block.append(record)
        if len(block) == most or read() - start > BLOCK_BYTES:
            yield block
            block, start = [], read()
    if block:
        yield block


def _list_keys(path: Path, records: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(chain.from_iterable(records)))
    require_few(len(names), str(path))
    if len(names) > _SOME and sum(map(len, records)) < _FILLED * len(names) * len(records):
        raise UserError(
            f"data.source: records of {path} have different keys: {len(records)} records have "
            f"{len(names)} keys in total, such as {names[-1]!r}; write records with the same keys, "
            "or put the varying part into a list of values"
        )
    return names


SUFFIXES = (".gz", ".bz2", ".zst", ".xz", ".zip")
#: Maximum expansion ratio. DEFLATE can reach 1,032. Tables of text stay below 100.
MOST_RATIO = 200
FREE_BYTES = 256 << 20
_SAMPLE = 512
_COMPRESSED = {
    "gzip": rb"\x1f\x8b\x08",
    "zlib": rb"x[\x9c\xda](?!.{6}\0\0\0\0)",
    "bz2": rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)",
    "zstd": rb"\x28\xb5\x2f\xfd",
    "xz": rb"\xfd7zXZ\0",
    "zip": rb"PK\x03\x04",
}
_WIDE = {
    "utf-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "utf-16": rb"\xff\xfe|\xfe\xff",
    "utf-16-le": rb"(?:[^\0]\0){4,}",
    "utf-16-be": rb"(?:\0[^\0]){4,}",
}
_DAMAGED = (zipfile.BadZipFile, lzma.LZMAError, EOFError, zlib.error, NotImplementedError)
_AS_CSV = "; write the table as CSV or Parquet"
_FOREIGN = {
    rb"PAR1[\0-\x1f]": "Parquet; set data.format: parquet",
    rb"\xd0\xcf\x11\xe0": "an Excel workbook (xls); save it as CSV",
    rb"SQLite format 3": f"an SQLite database{_AS_CSV}",
    rb"(?:ARROW1|FEA1)": f"an Arrow file{_AS_CSV}",
    rb"\x89HDF": f"HDF5{_AS_CSV}",
    rb"\x93NUMPY": f"a NumPy array{_AS_CSV}",
    rb"\x80[\x02-\x05]": f"a Python pickle{_AS_CSV}",
    rb"Obj\x01": f"Avro{_AS_CSV}",
    rb"%PDF-": f"a PDF{_AS_CSV}",
    rb"(?:\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP)": "an image; set data.format: images",
    rb"version https://git-lfs": "a Git LFS pointer, not the file; run git lfs pull",
    rb"(?i:\s*<(?:!doctype html|html))": "an HTML page; download the file itself, as CSV",
    rb"\s*<\?xml": f"XML{_AS_CSV}",
}


def bare_name(name: str) -> str:
    """Return a file name in lower case, without the suffix of a compression format."""
    low = name.lower()
    return next((low.removesuffix(each) for each in SUFFIXES if low.endswith(each)), low)


def is_whole(path: Path) -> bool:
    """Return whether a file can only be read from its beginning (compressed or UTF-16)."""
    head = _head(path)
    return bool(_kind(_COMPRESSED, head) or _kind(_WIDE, head))


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed."""
    return bool(_kind(_COMPRESSED, _head(path)))


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed. Raises `UserError`."""
    compression = _kind(_COMPRESSED, _head(path))
    try:
        with path.open("rb") as stored:
            if not compression:
                yield stored
                return
            with _decompress(stored, path, compression) as raw:
                yield io.BufferedReader(_Bounded(raw, path, stored.tell), 1 << 20)
    except (*_DAMAGED, OSError) as error:
        # An error of the disk has a number.
        if getattr(error, "errno", None) is not None:
            raise
        raise UserError(f"data.source: {path} cannot be decompressed: {error}") from error


@contextmanager
def open_text(path: Path) -> Iterator[IO[bytes]]:
    """Open a text file, decompressed and converted from UTF-16 to UTF-8. Raises `UserError`."""
    with open_file(path) as file:
        head = file.peek(_SAMPLE) if isinstance(file, io.BufferedReader) else b""
        for pattern, what in _FOREIGN.items():
            if re.match(pattern, head, re.DOTALL):
                raise UserError(f"data.source: {path} is {what}")
        encoding = _kind(_WIDE, head)
        if not encoding:
            yield file
            return
        try:
            yield io.BufferedReader(_Transcoded(file, encoding), 1 << 20)
        except UnicodeDecodeError as error:
            raise UserError(
                f"data.source: {path} is {encoding.upper()} and is damaged ({error.reason}); write "
                "it as UTF-8"
            ) from error


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_SAMPLE)


def _kind(patterns: dict[str, bytes], head: bytes) -> str:
    return next((kind for kind, each in patterns.items() if re.match(each, head, re.DOTALL)), "")


def position(file: Any) -> int:
    """Return the number of stored bytes read from a file of `open_file`, or 0 if it is closed."""
    try:
        return int(getattr(getattr(file, "raw", None), "position", file.tell)())
    except ValueError:
        return 0


def bytes_read(file: Any) -> int:
    """Return the number of decompressed bytes that were read from a file of `open_file`."""
    return int(getattr(getattr(file, "raw", None), "expanded", 0)) or position(file)


def _decompress(stored: IO[bytes], path: Path, compression: str) -> Any:
    opens: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    if compression in opens:
        return opens[compression](stored)
    if compression in ("zstd", "zlib"):
        # Arrow's gzip also reads zlib streams, which compressed TFRecord files may have.
        kind = compression.replace("zlib", "gzip")
        return pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), kind)
    return _only_member(stored, path)


@contextmanager
def _only_member(stored: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(stored) as archive:
        if "[Content_Types].xml" in archive.namelist():
            raise UserError(f"data.source: {path} is an Excel workbook; save it as CSV")
        members = [
            each
            for each in archive.infolist()
            if not each.is_dir() and not re.match(r"__MACOSX/|(.*/)?\.", each.filename)
        ]
        if len(members) != 1:
            raise UserError(
                f"data.source: {path} contains {len(members)} files, but only one can be read; "
                "unpack it"
            )
        if members[0].flag_bits & 1:
            raise UserError(f"data.source: {path} has a password; unpack it")
        with archive.open(members[0]) as file:
            yield file


class _Bounded(io.RawIOBase):
    def __init__(self, raw: Any, path: Path, position: Callable[[], int]) -> None:
        self._raw, self.position = raw, position
        self._path = path
        self._limit = max(FREE_BYTES, path.stat().st_size * MOST_RATIO)
        self.expanded = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        self.expanded += len(data)
        if self.expanded > self._limit:
            raise UserError(
                f"data.source: {self._path} expands to more than {MOST_RATIO} times its size; "
                "decompress it if this is intended"
            )
        buffer[: len(data)] = data
        return len(data)


class _Transcoded(io.RawIOBase):
    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._file, self.position = file, partial(position, file)
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            data = self._file.read(1 << 20)
            self._left = self._decoder.decode(data, final=not data).encode()
            if not data:
                break
        taken, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)
