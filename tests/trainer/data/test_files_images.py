from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.trainer.data.files.sources import opened, read, sizes, source
from trainer.errors import UserError


def picture(path: Path, value: int, size: tuple[int, int] = (8, 6), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 3), value % 256, np.uint8)
    pixels[0, 0] = (value // 256, value % 7, 9)
    Image.fromarray(pixels).convert(mode).save(path)


def folder(root: Path, count: int = 60) -> Path:
    for i in range(count):
        picture(root / "ab"[i % 2] / f"{i}.png", i * 3)
    return root


def test_a_folder_by_class(tmp_path: Path) -> None:
    selection, found = opened(folder(tmp_path))
    assert selection.inputs == ("image",)
    assert selection.specs["image"].shape == (6, 8, 1)
    assert selection.specs["image"].stored == "raw"
    assert selection.specs["label"].labels == ("a", "b")
    values = found["image"][:, 3, 3, 0].astype(int)
    assert sorted(values.tolist()) == sorted(i * 3 for i in range(60))
    assert (values // 3 % 2 == found["label"]).all()
    assert len(sizes(found)) == 3
    # Not one class after the other.
    assert 0 < found["label"][:30].sum() < 30


def test_images_of_several_sizes_need_one(tmp_path: Path) -> None:
    picture(folder(tmp_path) / "b" / "x.png", 9, (20, 10))
    with pytest.raises(UserError, match=r"several sizes, such as \[6, 8\] and \[10, 20\]"):
        opened(tmp_path)
    selection, found = opened(tmp_path, image={"size": [10, 12], "channels": 1})
    assert selection.specs["image"].stored == "image"
    assert found["image"][0].startswith(b"\x89PNG")


def test_a_corrupt_image_is_named(tmp_path: Path) -> None:
    folder(tmp_path)
    whole = (tmp_path / "a" / "0.png").read_bytes()
    (tmp_path / "a" / "0.png").write_bytes(whole[:50])
    (tmp_path / "b" / "7.png").write_text("no image")
    with pytest.raises(UserError, match=r"2 of 60 rows are broken.*b/7\.png: 'image' does not dec"):
        opened(tmp_path)
    made = source(tmp_path, bad_rows=0.05)
    selection = made.select()
    assert len(read(made, selection)["label"]) == 58
    sized = source(tmp_path, image={"size": [6, 8]})
    with pytest.raises(UserError, match=r"rows are broken.*png: 'image' does not decode"):
        read(sized, sized.select())


def test_an_image_without_a_class_is_refused(tmp_path: Path) -> None:
    picture(folder(tmp_path) / "x.png", 9)
    with pytest.raises(UserError, match=r"the image x\.png is in no folder of a class"):
        opened(tmp_path)


def test_a_table_of_paths(tmp_path: Path) -> None:
    folder(tmp_path / "img")
    rows = [f"img/{'ab'[i % 2]}/{i}.png,{i / 4}\n" for i in range(60)]
    rows[5] = "img/none.png,3\n"
    (tmp_path / "t.csv").write_text("file,label\n" + "".join(rows))
    with pytest.raises(UserError, match=r"t\.csv, row 7: 'file' does not decode: there is no such"):
        opened(tmp_path, format="csv", types={"file": "image"})
    selection, found = opened(
        tmp_path, format="csv", types={"file": "image", "label": "float"}, bad_rows=0.1
    )
    assert selection.specs["file"].shape == (6, 8, 1)
    assert found["file"].shape == (59, 6, 8, 1)
