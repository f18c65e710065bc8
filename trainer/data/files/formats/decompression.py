"""Files as a stream of bytes, compressed or not; what expands beyond all measure is refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from trainer.errors import UserError

SUFFIXES = (".gz", ".bz2", ".zst", ".xz", ".zip")
# DEFLATE cannot exceed 1,032 to 1 in one layer; texts of tables stay below 100.
_MOST_RATIO = 200
_FREE_BYTES = 256 << 20


def bare_name(name: str) -> str:
    """Return a file name in lower case without the ending of a compression."""
    low = name.lower()
    return next((low.removesuffix(each) for each in SUFFIXES if low.endswith(each)), low)


def is_compressed(path: Path) -> bool:
    """Say whether a file is compressed, by its name."""
    return path.name.lower().endswith(SUFFIXES)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed.

    Raises:
        UserError: it is damaged, or expands beyond all measure.
    """
    try:
        with _raw(path) as raw:
            yield io.BufferedReader(_Bounded(raw, path), 1 << 20) if is_compressed(path) else raw
    except (zipfile.BadZipFile, lzma.LZMAError, EOFError, zlib.error, NotImplementedError) as error:
        raise UserError(f"data.source: {path} cannot be decompressed: {error}") from error
    except OSError as error:
        if error.errno is None:
            raise UserError(f"data.source: {path} cannot be decompressed: {error}") from error
        raise


def _raw(path: Path) -> Any:
    low = path.name.lower()
    if low.endswith(".gz"):
        return gzip.open(path)
    if low.endswith(".bz2"):
        return bz2.open(path)
    if low.endswith(".xz"):
        return lzma.open(path)
    if low.endswith(".zst"):
        return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
    if low.endswith(".zip"):
        return _only_member(path)
    return path.open("rb")


@contextmanager
def _only_member(path: Path) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(path) as archive:
        members = [each for each in archive.infolist() if not each.is_dir()]
        if len(members) != 1:
            raise UserError(
                f"data.source: {path} holds {len(members)} files, and one is read; unpack it"
            )
        if members[0].flag_bits & 1:
            raise UserError(f"data.source: {path} has a password; unpack it")
        with archive.open(members[0]) as file:
            yield file


class _Bounded(io.RawIOBase):
    def __init__(self, raw: Any, path: Path) -> None:
        self._raw = raw
        self._path = path
        self._limit = max(_FREE_BYTES, path.stat().st_size * _MOST_RATIO)
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        self._read += len(data)
        if self._read > self._limit:
            raise UserError(
                f"data.source: {self._path} expands to more than {_MOST_RATIO} times its size; "
                "unpack it if that is right"
            )
        buffer[: len(data)] = data
        return len(data)
