"""Images that are stored encoded, as PNG or JPEG, and decoded when they are read.

An image that TensorFlow decodes correctly is stored unchanged. Any other image is decoded by Pillow
during preparation and encoded again: as JPEG if it was a JPEG, otherwise as PNG.

- EXIF orientation: the pixels are rotated.
- Animations (GIF, WebP, PNG): the first frame is used.
- 16 bits per channel: the upper 8 bits are kept.
- CMYK and palettes: converted to RGB.
- Alpha channel: dropped, unless four channels are configured. If the image has none, it is made
  opaque.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from flotilla.trainer.features.feature_spec import FeatureSpec

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# Pillow modes that TensorFlow decodes to the same pixels, by file format and channel count.
_GREY, _COLOURS = ("L", "LA", "I;16"), ("RGB", "RGBA")
_ALIKE: dict[str, dict[int, tuple[str, ...]]] = {
    "JPEG": dict.fromkeys((1, 3), ("L", "RGB")),
    "PNG": {1: (*_GREY, *_COLOURS), 3: (*_GREY, *_COLOURS, "P"), 4: (*_GREY, *_COLOURS)},
}
ORIENTATION, _UPRIGHT = 0x0112, (None, 0, 1)
# JPEG quality for images that were already stored in a lossy format.
_QUALITY = 95
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# PNG color types (gray, RGB, RGBA) by number of channels.
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
_BITS = 8


class UndecodableError(ValueError):
    """An image cannot be decoded. The message contains only the reason."""


@contextmanager
def open_image(data: bytes) -> Iterator[Image.Image]:
    """Open an encoded image. Any exception in the `with` block becomes an `UndecodableError`."""
    if not data:
        raise UndecodableError("it is empty")
    try:
        with warnings.catch_warnings():
            # Reject images with more pixels than Pillow's safety limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # Other warnings are about oddities of a file that Pillow can decode anyway.
            warnings.simplefilter("ignore", UserWarning)
            with Image.open(io.BytesIO(data)) as image:
                yield image
    except UndecodableError:
        raise
    except UnidentifiedImageError:
        raise UndecodableError("it is not an image of a known format") from None
    # Catch everything, because Pillow may raise any exception for a corrupted file.
    except Exception as error:
        raise UndecodableError(str(error).splitlines()[0] or type(error).__name__) from error


def stored_image(data: bytes, channels: int) -> bytes:
    """Return an image as it is stored, encoded again if needed. Raises `UndecodableError`."""
    with open_image(data) as image:
        modes = _ALIKE.get(image.format or "", {}).get(channels, ())
        if image.mode not in modes or image.getexif().get(ORIENTATION) not in _UPRIGHT:
            return _encode_again(image, channels)
        try:
            tf.io.decode_image(data, channels, expand_animations=False)
        except tf.errors.OpError:
            image.load()
            raise UndecodableError("its data is damaged") from None
        return data


def decode(feature: FeatureSpec, encoded: tf.Tensor) -> tf.Tensor:
    """Return the pixels of stored images, as uint8 of shape (batch, height, width, channels).

    Images of another size are resized by bilinear interpolation with antialiasing.
    """
    height, width, channels = feature.sizes

    def one(data: tf.Tensor) -> tf.Tensor:
        pixels = tf.io.decode_image(data, channels, expand_animations=False)
        fits = tf.reduce_all(tf.equal(tf.shape(pixels)[:2], (height, width)))
        sized = tf.cond(fits, lambda: pixels, lambda: resize(pixels, height, width))
        return tf.ensure_shape(sized, feature.shape)

    return tf.map_fn(one, encoded, fn_output_signature=tf.TensorSpec(feature.shape, tf.uint8))


def resize(pixels: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Resize images. Axes before the height are unchanged."""
    # Without `antialias`, most pixels would be ignored when an image shrinks.
    blended = tf.image.resize(pixels, (height, width), antialias=True)
    if pixels.dtype.is_integer:
        blended = tf.clip_by_value(tf.round(blended), pixels.dtype.min, pixels.dtype.max)
    return tf.cast(blended, pixels.dtype)


def normalize_image(image: Image.Image, channels: int) -> Image.Image:
    """Rotate an image upright and convert it to 8 bits per channel. Raises `UndecodableError`.

    Pillow may raise other errors if the image is corrupted.
    """
    turned: Any = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):
        # Convert 16-bit and 32-bit pixels here, because Pillow would clip values above 255.
        wide = np.asarray(turned).astype(np.int64)
        turned = Image.fromarray((np.clip(wide, 0, 0xFFFF) >> 8).astype(np.uint8))
    if turned.mode == "F":
        raise UndecodableError("its pixels are floats; save them as integers of 8 or 16 bits")
    if turned.mode in ("P", "PA"):
        turned = turned.convert("RGBA" if "transparency" in turned.info else "RGB")
    seen: Image.Image = turned.convert(MODES[channels])
    return seen


def _encode_again(image: Image.Image, channels: int) -> bytes:
    out, found = io.BytesIO(), normalize_image(image, channels)
    # Drop metadata such as the orientation, which has already been applied to the pixels.
    found.info = {}
    if image.format == "JPEG" and channels != len("RGBA"):
        found.save(out, "JPEG", quality=_QUALITY, subsampling=0)
    else:
        found.save(out, "PNG")
    return out.getvalue()


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """Return an image of shape (height, width, channels) as PNG (ISO/IEC 15948).

    This is faster than TensorFlow and Pillow, because most images are small, and their files exist
    only for minutes.
    """
    height, width, channels = image.shape
    # Each row begins with its filter type. 0 means no filter.
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = image.reshape(height, -1)
    colour = _COLOUR_TYPES[channels]
    header = struct.pack(">IIBBBBB", width, height, _BITS, colour, 0, 0, 0)
    pixels = zlib.compress(rows.tobytes(), zlib.Z_BEST_SPEED)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", pixels), _chunk(b"IEND", b""))
    return b"".join((_SIGNATURE, *parts))


def _chunk(kind: bytes, data: bytes) -> bytes:
    crc = zlib.crc32(kind + data)
    return b"".join((struct.pack(">I", len(data)), kind, data, struct.pack(">I", crc)))
