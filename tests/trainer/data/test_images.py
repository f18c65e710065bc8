"""Tests which encoded images keep their bytes, are converted, or cannot be decoded."""

import contextlib
import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from flotilla.trainer.data import images
from flotilla.trainer.features.feature_spec import FeatureSpec
from tests.trainer.data.test_blocks import decode, encode, there_and_back

HEIGHT, WIDTH = 16, 24
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def picture(mode="RGB"):
    """Return an image with smooth colors, which JPEG changes only slightly."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    pixels = np.stack([rows * 15, columns * 10, 255 - rows * 7 - columns * 4], -1).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(image, form, **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def sixteen(form):
    grey = np.asarray(picture("L")).astype(np.uint16)
    # Upper and lower bytes differ, so the test shows which of them is read.
    return saved(Image.fromarray(grey * 256 + 37), form)


def spec(channels, height=HEIGHT, width=WIDTH):
    return FeatureSpec(shape=(height, width, channels), dtype="uint8", stored="image")


def pixels_of(data, channels, **size):
    stored = images.stored_image(data, channels)
    return images.decode(spec(channels, **size), tf.constant([stored]))[0].numpy()


def expected(image, channels):
    return np.asarray(image.convert(MODES[channels])).reshape(HEIGHT, WIDTH, channels)


EXACT = {
    "png": lambda: (saved(picture(), "PNG"), picture()),
    "interlaced": lambda: (saved(picture(), "PNG", interlace=1), picture()),
    "grey": lambda: (saved(picture("L"), "PNG"), picture("L")),
    "grey-alpha": lambda: (saved(picture("LA"), "PNG"), picture("LA")),
    "alpha": lambda: (saved(picture("RGBA"), "PNG"), picture("RGBA")),
    "bits": lambda: (saved(picture("1"), "PNG"), picture("1")),
    "bmp": lambda: (saved(picture(), "BMP"), picture()),
    "webp": lambda: (saved(picture(), "WEBP", lossless=True), picture()),
    "16-bits": lambda: (sixteen("PNG"), picture("L")),
    "16-bits-tiff": lambda: (sixteen("TIFF"), picture("L")),
}
NEAR = {
    "palette": lambda: saved(picture().quantize(64), "PNG"),
    "jpeg": lambda: saved(picture(), "JPEG", quality=95, subsampling=0),
    "progressive": lambda: saved(picture(), "JPEG", quality=95, subsampling=0, progressive=True),
    "cmyk": lambda: saved(picture("CMYK"), "JPEG", quality=95),
    "gif": lambda: saved(picture().quantize(64), "GIF"),
}


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", EXACT)
def test_pixels_that_no_format_changes(name, channels):
    data, image = EXACT[name]()
    # Decoders round differently when they convert to grayscale.
    found = pixels_of(data, channels).astype(int)
    np.testing.assert_allclose(found, expected(image, channels), atol=channels == 1)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", NEAR)
def test_pixels_that_a_format_changes_a_little(name, channels):
    found = pixels_of(NEAR[name](), channels).astype(int)
    assert abs(found - expected(picture(), channels)).mean() < 12


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize("channels", [1, 3])
def test_plain_images_keep_their_bytes(form, channels):
    data = saved(picture(), form)
    assert images.stored_image(data, channels) is data


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_camera_is_followed(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    # For this orientation tag, the file stores the image transposed in this way.
    held = picture().transpose(turned[orientation]) if orientation > 1 else picture()
    data = saved(held, form, exif=exif, **({"quality": 95} if form == "JPEG" else {}))
    assert abs(pixels_of(data, 3).astype(int) - expected(picture(), 3)).mean() < 6
    # A photograph stays small.
    assert form == "PNG" or images.stored_image(data, 3)[:3] == b"\xff\xd8\xff"


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(form):
    second = Image.new("RGB", (WIDTH, HEIGHT), (255, 0, 0))
    data = saved(picture(), form, save_all=True, append_images=[second])
    assert abs(pixels_of(data, 3).astype(int) - expected(picture(), 3)).mean() < 12


def test_opacity_of_a_palette():
    image = picture().quantize(8)
    data = saved(image, "PNG", transparency=3)
    found = pixels_of(data, 4)[..., 3]
    assert (found == np.where(np.asarray(image) == 3, 0, 255)).all()


def test_another_size_blends_all_pixels():
    pixels = np.zeros((HEIGHT, WIDTH, 1), np.uint8)
    pixels[::2] = 200
    data = saved(Image.fromarray(pixels[..., 0]), "PNG")
    found = pixels_of(data, 1, height=HEIGHT // 4, width=WIDTH // 4)
    assert found.shape == (HEIGHT // 4, WIDTH // 4, 1)
    assert abs(found.astype(int) - 100).max() <= 25


def broken():
    good = saved(picture(), "PNG")
    return {
        "empty": (b"", "it is empty"),
        "text": (b"<html>not found</html>", "not an image of a known format"),
        "cut-png": (good[:-40], ""),
        "cut-jpeg": (saved(picture(), "JPEG")[:-60], ""),
        "changed": (good[:80] + bytes([good[80] ^ 255]) + good[81:], ""),
        "header-alone": (good[:33], ""),
    }


@pytest.mark.parametrize("name", broken())
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_what_does_not_decode_says_why_in_one_line(name, channels):
    data, reason = broken()[name]
    with pytest.raises(images.UndecodableError) as error:
        images.stored_image(data, channels)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_an_image_that_would_fill_the_memory(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", HEIGHT * WIDTH // 2 + 1)
    with pytest.raises(images.UndecodableError, match="exceeds limit"):
        images.stored_image(saved(picture(), "PNG"), 3)


def test_what_is_stored_always_decodes():
    """A file damaged at any position is either rejected or can be decoded in training."""
    draw = np.random.RandomState(0)
    stored = []
    for form in ("PNG", "JPEG", "GIF", "BMP"):
        good = saved(picture(), form)
        for place in draw.randint(0, len(good), 60):
            data = bytearray(good)
            data[place] ^= 1 << draw.randint(8)
            with contextlib.suppress(images.UndecodableError):
                stored.append(images.stored_image(bytes(data), 3))
    assert len(stored) > 60
    assert images.decode(spec(3), tf.constant(stored)).shape == (len(stored), HEIGHT, WIDTH, 3)


def test_records_hold_the_bytes_and_give_pixels():
    data = [saved(picture(), "JPEG"), saved(picture().resize((7, 5)), "PNG")]
    records = encode({"image": spec(3)}, {"image": data}, 1)
    example = tf.train.Example.FromString(records[0])
    assert example.features.feature["image"].bytes_list.value[:] == data[:1]
    read = decode({"image": spec(3)}, records)["image"]
    assert (read.shape, read.dtype) == ((2, HEIGHT, WIDTH, 3), tf.uint8)
    # Pixels can be written as well.
    for channels in MODES:
        pixels = np.random.RandomState(0).randint(0, 256, (2, HEIGHT, WIDTH, channels))
        given = {"image": pixels.astype(np.uint8)}
        np.testing.assert_array_equal(
            there_and_back({"image": spec(channels)}, given)["image"], pixels
        )
