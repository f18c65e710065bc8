"""Images of a source, from files named in a table or a listing, or from bytes in a table."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer import storage
from flotilla.trainer.config.data import ImageConfig
from flotilla.trainer.data import images
from flotilla.trainer.data.columns import Column, make_texts
from flotilla.trainer.data.images import UndecodableError
from flotilla.trainer.data.listing import SourceFile, require_listed
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.errors import PASSING, StoreError, report_errors
from flotilla.trainer.storage.local import NotAFileError
from flotilla.trainer.storage.publishing import read_tagged
from flotilla.trainer.storage.store import TooLargeError, Trouble
from flotilla.trainer.storage.uri import check_path, local_path

_GREY = ("1", "L", "LA")
# Values of the EXIF orientation for which height and width are swapped.
_TURNED = (5, 6, 7, 8)
# Maximum size of an image file in bytes, enough for an uncompressed photo with the most pixels.
_MOST_BYTES = 256 << 20
# Errors that concern a single object. All others concern the store, and therefore every row.
_OF_A_FILE = ("DENIED", "OTHER")
_ABSOLUTE = re.compile("/|[A-Za-z]:/")
_ELSEWHERE = "its path leads outside the folder of the table; write paths below that folder"


@dataclass(frozen=True)
class Pictures:
    """Finds and decodes the images that are named in the rows of one file.

    Cells are untrusted: they may only name files below the folder of their table, and never a host,
    a scheme or another folder. `folder` is the URI of that folder. It is empty for a listing, whose
    files are `listed` by URI.
    """

    config: ImageConfig
    folder: str
    listed: Mapping[str, SourceFile] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int, int]:
        """The configured height, width and channels. Raises `ValueError` if no size is set."""
        height, width = self.config.size
        return height, width, self.config.channels

    def data(self, value: Any) -> bytes:
        """Return the bytes of an image, given as bytes or by name. Raises `UndecodableError`."""
        if isinstance(value, bytes):
            return value
        if not value:
            raise UndecodableError("the cell names no image")
        uri = self._below(str(value).strip()) if self.folder else str(value)
        path, root = local_path(uri), self.folder and local_path(self.folder)
        if path and root:
            _require_below(root, path)
        file = self.listed.get(uri)
        try:
            data, tag = read_tagged(uri, _MOST_BYTES)
        except (FileNotFoundError, NotADirectoryError, TooLargeError) as error:
            if file and file.size <= _MOST_BYTES:
                require_listed(file, file.size, "gone, or longer")
            said = str(error) if isinstance(error, TooLargeError) else "there is no such file"
            raise UndecodableError(said) from None
        except OSError as error:
            raise UndecodableError(_reason(uri, error)) from None
        if file:
            require_listed(file, len(data), tag)
        return data

    def measure(self, value: Any) -> tuple[int, int, int]:
        """Return the height, width and channel count of an image. Raises `UndecodableError`."""
        with images.open_image(self.data(value)) as image:
            width, height = image.size
            if image.getexif().get(images.ORIENTATION) in _TURNED:
                width, height = height, width
            return height, width, 1 if image.mode in _GREY or image.mode[0] == "I" else 3

    def decode_all(
        self, spec: FeatureSpec, values: Sequence[Any]
    ) -> tuple[Column, NDArray[np.bool_], list[str]]:
        """Return images in stored form, a mask of those that cannot be decoded, and the reasons."""
        is_encoded = spec.stored == "image"
        found: list[Any] = []
        reasons = []
        for value in values:
            try:
                data = images.stored_image(self.data(value), spec.sizes[-1])
                found.append(data if is_encoded else _pixels(data, spec))
                reasons.append("")
            except UndecodableError as error:
                found.append(b"" if is_encoded else np.zeros(spec.sizes, np.uint8))
                reasons.append(f"cannot be decoded: {error}")
        bad = np.array([bool(why) for why in reasons], np.bool_)
        return make_texts(found) if is_encoded else np.stack(found), bad, reasons

    def _below(self, value: str) -> str:
        path = value.replace("\\", "/")
        names = [name for name in path.split("/") if name not in ("", ".")]
        if _ABSOLUTE.match(path) or "://" in path or ".." in names or not names:
            raise UndecodableError(_ELSEWHERE)
        try:
            uri = storage.join(self.folder, *names)
            check_path(uri)
        except UserError:
            raise UndecodableError("it is not a file path") from None
        return uri


def _require_below(root: Path, path: Path) -> None:
    try:
        if not path.resolve().is_relative_to(root.resolve()):
            raise UndecodableError(_ELSEWHERE)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "its links form a loop"
        raise UndecodableError(f"it cannot be read: {reason}") from None


def _reason(uri: str, error: OSError) -> str:
    """Explain why a file cannot be read. Raises `UserError` if the store is the cause."""
    if isinstance(error, NotAFileError):
        return "it is a folder" if error.errno == errno.EISDIR else "it is not a file"
    trouble = getattr(error, "trouble", "")
    if trouble in _OF_A_FILE:
        return f"it cannot be read: {Trouble[trouble].value}"
    if isinstance(error, StoreError) or error.errno in PASSING:
        with report_errors(f"read {uri}"):
            raise error
    return f"it cannot be read: {error.strerror}"


def _pixels(data: bytes, spec: FeatureSpec) -> NDArray[np.uint8]:
    sizes = spec.sizes
    with images.open_image(data) as image:
        pixels = np.asarray(images.normalize_image(image, sizes[-1]))
    if pixels.shape[:2] != sizes[:2]:
        raise UndecodableError(f"its size is {list(pixels.shape[:2])}, not {list(sizes[:2])}")
    return pixels.reshape(sizes)
