"""Images of a source: from files that a table or a listing names, or from bytes within a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer import storage
from trainer.config.data import ImageConfig
from trainer.data.examples.images import MODES, ORIENTATION, UndecodableError, opened, stored_image
from trainer.data.features import image_spec
from trainer.data.spec import FeatureSpec
from trainer.errors import UserError
from trainer.storage.uri import is_uri

_GREY = ("1", "L", "LA", "I", "I;16", "F")
# Of the EXIF orientation.
_TURNED = (5, 6, 7, 8)


@dataclass(frozen=True)
class Pictures:
    """Finds and decodes the images that the rows of one file name."""

    config: ImageConfig
    folder: str

    @property
    def size(self) -> tuple[int, int, int]:
        """Height, width and channels as configured; raises `ValueError` where they are not."""
        height, width = self.config.size
        return height, width, self.config.channels

    def data(self, value: Any) -> bytes:
        """Return the bytes of an image; raises `UndecodableError` where there are none."""
        if isinstance(value, bytes):
            return value
        if not value:
            raise UndecodableError("no image is named")
        try:
            return storage.read_bytes(self._uri(str(value)))
        except storage.Missing:
            raise UndecodableError("there is no such file") from None
        except storage.Corrupt:
            raise UndecodableError("it is a folder") from None

    def measured(self, value: Any) -> tuple[int, int, int]:
        """Return height, width and channels of an image; raises `UndecodableError`."""
        with opened(self.data(value)) as image:
            width, height = image.size
            if image.getexif().get(ORIENTATION) in _TURNED:
                width, height = height, width
            return height, width, 1 if image.mode in _GREY else 3

    def decoded(
        self, spec: FeatureSpec, values: Sequence[Any]
    ) -> tuple[NDArray[Any], NDArray[np.bool_], list[str]]:
        """Return images as they are stored, which of them are broken, and why."""
        found: list[Any] = []
        reasons = []
        for value in values:
            try:
                data = stored_image(self.data(value), spec.sizes[-1])
                found.append(data if spec.stored == "image" else _pixels(data, spec))
                reasons.append("")
            except UndecodableError as error:
                found.append(b"" if spec.stored == "image" else np.zeros(spec.sizes, np.uint8))
                reasons.append(f"does not decode: {error}")
        bad = np.array([bool(why) for why in reasons], np.bool_)
        if spec.stored != "image":
            return np.stack(found), bad, reasons
        encoded = np.empty(len(found), object)
        encoded[:] = found
        return encoded, bad, reasons

    def _uri(self, value: str) -> str:
        if is_uri(value):
            return value
        if value.startswith("/"):
            return storage.uri_of(value)
        return storage.join(self.folder, value.removeprefix("./"))


def spec_for(name: str, config: ImageConfig, sizes: set[tuple[int, ...]]) -> FeatureSpec:
    """Return how images are stored: encoded where a size is configured, else as pixels.

    Raises:
        UserError: they are of several sizes, and none is configured.
    """
    if config.size:
        return image_spec(config)
    if len({each[:2] for each in sizes}) > 1:
        low, high = min(sizes)[:2], max(sizes)[:2]
        raise UserError(
            f"data.image: the images of {name!r} have several sizes, such as {list(low)} and "
            f"{list(high)}; set data.image: {{size: [HEIGHT, WIDTH]}}"
        )
    height, width, channels = max(sizes, default=(1, 1, 1))
    # The default is that of colours; images without colours need one channel.
    if config.channels != ImageConfig().channels:
        channels = config.channels
    return FeatureSpec(shape=(height, width, channels), dtype="uint8", stored="raw")


def _pixels(data: bytes, spec: FeatureSpec) -> NDArray[np.uint8]:
    sizes = spec.sizes
    with opened(data) as image:
        pixels = np.asarray(image.convert(MODES[sizes[-1]]))
    if pixels.shape[:2] != sizes[:2]:
        raise UndecodableError(f"its size is {list(pixels.shape[:2])}, not {list(sizes[:2])}")
    return pixels.reshape(sizes)
