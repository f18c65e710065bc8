"""Size and crc32c of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import google_crc32c

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Checksum:
    """Size in bytes, and crc32c as eight hexadecimal digits."""

    bytes: int
    crc32c: str


def checksum(path: Path) -> Checksum:
    """Read a local file and return its size and crc32c."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            crc = google_crc32c.extend(crc, chunk)
    return Checksum(size, f"{crc:08x}")


def checksum_of(data: bytes) -> Checksum:
    """Return size and crc32c of bytes in memory."""
    return Checksum(len(data), f"{google_crc32c.value(data):08x}")
