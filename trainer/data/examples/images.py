"""Images that are stored as they came, in PNG or JPEG, and decoded when they are read.

Whatever TensorFlow decodes by itself to the pixels that are meant keeps its bytes. All else is
decoded once by Pillow, at preparation, and encoded again: JPEG where it was JPEG, else PNG.

- EXIF orientation: the pixels are turned.
- An animation (GIF, WebP, PNG): its first frame.
- 16 bits a channel: the upper eight.
- CMYK: as RGB. A palette: as its colours.
- Opacity: left out, but with four channels; images without it are opaque then.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from flotilla.trainer.features.feature_spec import FeatureSpec

#: Pillow's mode by the number of channels.
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# Of files of a format the modes whose pixels TensorFlow gives as Pillow does, by the channels.
_GREY, _COLOURS = ("L", "LA", "I;16"), ("RGB", "RGBA")
_ALIKE: dict[str, dict[int, tuple[str, ...]]] = {
    "JPEG": dict.fromkeys((1, 3), ("L", "RGB")),
    "PNG": {1: (*_GREY, *_COLOURS), 3: (*_GREY, *_COLOURS, "P"), 4: (*_GREY, *_COLOURS)},
}
ORIENTATION, _UPRIGHT = 0x0112, (None, 0, 1)
# Of what was compressed with losses before.
_QUALITY = 95


class UndecodableError(ValueError):
    """It is no image that can be decoded; the message is the reason alone."""


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """Open an encoded image; whatever goes wrong meanwhile is an `UndecodableError`.

    One with more pixels than Pillow takes as harmless is refused.
    """
    if not data:
        raise UndecodableError("it is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # Other warnings are of what is odd in a file, and still decoded.
            warnings.simplefilter("ignore", UserWarning)
            with Image.open(io.BytesIO(data)) as image:
                yield image
    except UndecodableError:
        raise
    except UnidentifiedImageError:
        raise UndecodableError("it is no image of a known format") from None
    # Pillow's decoders raise whatever a damaged file leads them to.
    except Exception as error:
        raise UndecodableError(str(error).splitlines()[0] or type(error).__name__) from error


def stored_image(data: bytes, channels: int) -> bytes:
    """Return an encoded image as it is stored: the same bytes where `decode` understands them.

    Raises:
        UndecodableError: it does not decode.
    """
    with opened(data) as image:
        if not _is_plain(image, channels):
            return _encoded_again(image, channels)
        if not _decodes(data, channels):
            image.load()
            raise UndecodableError("its data is damaged")
        return data


def decode(feature: FeatureSpec, encoded: tf.Tensor) -> tf.Tensor:
    """Return the pixels, (batch, height, width, channels) of uint8, of images as they are stored.

    One of another size is resized, blending all its pixels (bilinear, with antialiasing).
    """
    height, width, channels = feature.sizes

    def one(data: tf.Tensor) -> tf.Tensor:
        pixels = tf.io.decode_image(data, channels, expand_animations=False)
        fits = tf.reduce_all(tf.equal(tf.shape(pixels)[:2], (height, width)))
        sized = tf.cond(fits, lambda: pixels, lambda: resized(pixels, height, width))
        return tf.ensure_shape(sized, feature.shape)

    return tf.map_fn(one, encoded, fn_output_signature=tf.TensorSpec(feature.shape, tf.uint8))


def resized(pixels: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Return images in another size; axes before the height stay as they are."""
    # With `antialias` every pixel counts where the image becomes smaller.
    blended = tf.image.resize(pixels, (height, width), antialias=True)
    if pixels.dtype.is_integer:
        blended = tf.clip_by_value(tf.round(blended), pixels.dtype.min, pixels.dtype.max)
    return tf.cast(blended, pixels.dtype)


def encode(image: NDArray[np.uint8]) -> bytes:
    """Return pixels of shape (height, width, channels) as PNG, for what comes decoded."""
    return _saved(Image.fromarray(np.squeeze(image, 2) if image.shape[2] == 1 else image), "PNG")


def _is_plain(image: Image.Image, channels: int) -> bool:
    modes = _ALIKE.get(image.format or "", {}).get(channels, ())
    upright = image.getexif().get(ORIENTATION) in _UPRIGHT
    return image.mode in modes and upright


def _decodes(data: bytes, channels: int) -> bool:
    try:
        tf.io.decode_image(data, channels, expand_animations=False)
    except tf.errors.OpError:
        return False
    return True


def as_seen(image: Image.Image, channels: int) -> Image.Image:
    """Return an image as it is meant, turned and with 8 bits a channel; raises `UndecodableError`.

    It may be damaged, which whatever Pillow raises says.
    """
    turned: Any = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):
        # Pillow would cut off what is above 255.
        wide = np.asarray(turned).astype(np.int64)
        turned = Image.fromarray((np.clip(wide, 0, 0xFFFF) >> 8).astype(np.uint8))
    if turned.mode == "F":
        raise UndecodableError("its pixels have no known range; save them with 8 or 16 bits")
    if turned.mode in ("P", "PA"):
        turned = turned.convert("RGBA" if "transparency" in turned.info else "RGB")
    seen: Image.Image = turned.convert(MODES[channels])
    return seen


def _encoded_again(image: Image.Image, channels: int) -> bytes:
    lossy = image.format == "JPEG" and channels != len("RGBA")
    return _saved(as_seen(image, channels), "JPEG" if lossy else "PNG")


def _saved(image: Image.Image, form: str) -> bytes:
    out = io.BytesIO()
    # Without what came along, such as the orientation, which the pixels have now.
    image.info = {}
    image.save(out, form, **({"quality": _QUALITY, "subsampling": 0} if form == "JPEG" else {}))
    return out.getvalue()
