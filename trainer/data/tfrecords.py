"""TFRecord files as bytes.

A record is its length (8 bytes, little-endian), the masked crc32c of the length, the data, and the
masked crc32c of the data (https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords
format details").
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, Any

import google_crc32c

_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")
_MASK = 0xA282EAD8
_LARGEST = 1 << 30


class DamagedError(ValueError):
    """A record is corrupted. The message states the number of the record and the reason."""


def frame_record(record: bytes) -> bytes:
    """Return a record in the format of a TFRecord file."""
    head = struct.pack("<Q", len(record))
    return b"".join((head, _FOOT.pack(_mask_crc(head)), record, _FOOT.pack(_mask_crc(record))))


def records(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the verified records of a file. Raises `DamagedError`."""
    number = 0
    while head := file.read(_HEAD.size):
        number += 1
        bad = f"record {number} cannot be read:"
        if len(head) < _HEAD.size:
            raise DamagedError(f"{bad} it is truncated")
        length, crc = _HEAD.unpack(head)
        if _mask_crc(head[:8]) != crc or length > _LARGEST:
            raise DamagedError(f"{bad} its length is corrupted, or the file is not a TFRecord file")
        data, foot = file.read(length), file.read(_FOOT.size)
        if len(data) < length or len(foot) < _FOOT.size:
            raise DamagedError(f"{bad} it is truncated")
        if _mask_crc(data) != _FOOT.unpack(foot)[0]:
            raise DamagedError(f"{bad} its checksum differs")
        yield data


def places(file: Any) -> list[int]:
    """Return the offset of each record, then the end of the last. Checksums are not verified."""
    found = [0]
    while head := file.read(_HEAD.size):
        found.append(found[-1] + _HEAD.size + _HEAD.unpack(head)[0] + _FOOT.size)
        file.seek(found[-1])
    return found


def _mask_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return int(((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)
