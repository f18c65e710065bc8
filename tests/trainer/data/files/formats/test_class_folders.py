"""Tests folders of images: which files are read, and which folders are splits or classes."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.data.files.sources import opened, picture, source

SIZE = (8, 6)


@pytest.mark.parametrize(
    ("ending", "form", "mode"),
    [
        (".webp", "WEBP", "RGB"), (".tif", "TIFF", "RGB"), (".TIFF", "TIFF", "CMYK"),
        (".jfif", "JPEG", "RGB"), (".jpe", "JPEG", "CMYK"), (".JPG", "JPEG", "L"),
        (".gif", "GIF", "P"), (".bmp", "BMP", "RGB"), (".Png", "PNG", "P"), (".png", "PNG", "1"),
        (".png", "PNG", "LA"), (".jpg", "PNG", "RGBA"), (".png", "JPEG", "RGB"),
        (".bmp", "WEBP", "RGBA"), (".ppm", "PPM", "RGB"), (".tga", "TGA", "RGBA"),
        (".avif", "AVIF", "RGB"), (".png", "PNG", "I;16"), (".tiff", "TIFF", "I;16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sized", [True, False])
def test_images_of_every_form_are_read(tmp_path, ending, form, mode, sized):
    for i in range(30):
        path = tmp_path / "ab"[i % 2] / f"{i}{ending}"
        grey = 5 + i * 7
        path.parent.mkdir(exist_ok=True)
        image = Image.new("RGB", SIZE, (grey, grey, grey))
        if mode == "I;16":
            image = Image.fromarray(np.full(SIZE[::-1], grey * 256 + 99, np.uint16))
        elif mode == "1":
            image = Image.new("1", SIZE, i % 2)
        else:
            image = image.quantize(4) if mode == "P" else image.convert(mode)
        image.save(path, form)
    keys = {"image": {"size": list(SIZE[::-1]), "channels": 3}} if sized else {}
    selection, found = opened(tmp_path, splits={"test": 0.3}, **keys)
    assert len(found["label"]) == 30
    if not sized:
        assert selection.specs["image"].shape[:2] == SIZE[::-1]
        value = found["image"][:, 3, 3, 0].astype(int)
        want = {round(255 * (i % 2)) if mode == "1" else 5 + i * 7 for i in range(30)}
        assert all(min(abs(each - other) for other in want) <= 2 for each in value.tolist())
        assert len(set(value.tolist())) == len(want)


def test_what_is_no_image_is_counted(tmp_path: Path) -> None:
    for i in range(30):
        picture(tmp_path / "ab"[i % 2] / f"{i}.png", i)
    for name in ("a/1.heic", "b/2.HEIC", "a/Thumbs.db", "notes.txt", "b/x"):
        (tmp_path / name).write_bytes(b"x")
    made = source(tmp_path)
    made.select()
    (said,) = made.notes()
    assert said.startswith("data.source: 5 of 35 files are ignored (2 .heic, ")
    assert said.endswith("), such as a/1.heic")
    counts = said.partition("(")[2].partition(")")[0].split(", ")
    assert {"1 .db", "1 .txt", "1 without an extension"} <= set(counts)


def test_a_table_next_to_images_is_asked_for(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png")
    (tmp_path / "labels.csv").write_text("image,label\na/1.png,x\n")
    with pytest.raises(ConfigError, match=r"csv \(labels\.csv\) and images \(a/1\.png\); set data"):
        source(tmp_path)


@pytest.mark.parametrize(
    "folders",
    [
        ("train", "val", "test"), ("Training", "Validation", "Testing"),
        ("seg_train/seg_train", "dev", "seg_test/seg_test"), ("train_set", "valid", "test-data1"),
        ("data/v2/train", "data/v2/val", "data/v2/test"),
    ],
)  # fmt: skip
def test_folders_above_those_of_classes_are_splits(tmp_path, folders):
    for i in range(60):
        folder = folders[0 if i < 40 else 1 if i < 48 else 2]
        picture(tmp_path / folder / "ab"[i % 2] / f"{i}.png", i)
    made = source(tmp_path)
    selection = made.select()
    assert selection.specs["label"].labels == ("a", "b")
    assert "folders above the class folders" in made.notes()[0]
    _, found = opened(tmp_path)
    value = found["image"][:, 3, 3, 0].astype(int)
    want = ["train" if each < 40 else "validation" if each < 48 else "test" for each in value]
    assert found["split"] == want
    assert 0 < found["label"][:20].sum() < 20


def test_without_a_folder_of_validation_it_is_drawn_from_training(tmp_path: Path) -> None:
    for i in range(90):
        picture(tmp_path / ("train" if i < 60 else "test") / "ab"[i % 2] / f"{i}.png", i)
    _, found = opened(tmp_path)
    is_drawn = found["image"][:, 3, 3, 0] < 60
    assert {*np.array(found["split"])[is_drawn]} == {"train", "validation"}
    assert {*np.array(found["split"])[~is_drawn]} == {"test"}


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        (["train/a/1.png", "test/a/2.png", "more/a/3.png"], "more/a/3.png is in none of them"),
        (["train/a/1.png", "test/a/2.png", "unknown/3.png"], "unknown/3.png is in none of them"),
        (["train/1.png", "test/2.png"], "in a split folder, but not in a class folder"),
        (
            ["a/train/1.png", "a/test/2.png", "b/train/3.png"],
            "split folder, but not in a class folder",
        ),
    ],
)
def test_folders_that_may_be_splits_are_asked_for(tmp_path, paths, why):
    for i, path in enumerate(paths):
        picture(tmp_path / path, i)
    with pytest.raises(UserError, match=why):
        source(tmp_path)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for i in range(60):
        picture(tmp_path / ("train", "bus")[i % 2] / f"{i}.png", i)
    selection, _ = opened(tmp_path)
    assert selection.specs["label"].labels == ("bus", "train")
