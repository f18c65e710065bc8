"""Tests images whose paths are stored in a table's cells."""

import os
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from flotilla.trainer import storage
from flotilla.trainer.config.data import ImageConfig
from flotilla.trainer.data.files import pictures
from flotilla.trainer.data.files.pictures import Pictures
from flotilla.trainer.data.images import UndecodableError
from flotilla.trainer.runtime.errors import TransientError
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.trainer.storage.places import BucketPlace

OUTSIDE = "outside the folder of the table"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Create a table's folder with images, and a secret file outside of it."""
    folder = tmp_path / "tables"
    for path in (folder / "photos" / "ä b" / "1.png", tmp_path / "secret.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3), (9, 8, 7)).save(path)
    (folder / "out").symlink_to(tmp_path)
    (folder / "out.png").symlink_to(tmp_path / "secret.png")
    (folder / "within.png").symlink_to(folder / "photos" / "ä b" / "1.png")
    (folder / "round").symlink_to(folder / "round")
    os.mkfifo(folder / "pipe.png")
    return folder


@pytest.mark.parametrize(
    "cell",
    ["photos/ä b/1.png", "./photos/ä b/1.png", r"photos\ä b\1.png", r".\photos\\ä b\1.png",
     " photos//ä b/./1.png ", "within.png"],
)  # fmt: skip
def test_a_cell_names_a_file_below_its_table(table: Path, cell: str) -> None:
    found = Pictures(ImageConfig(), storage.uri_of(table))
    with Image.open(BytesIO(found.data(cell))) as image:
        assert image.size == (4, 3)


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("s3://bucket/a.png?endpoint=127.0.0.1:1&disableSSL=true", OUTSIDE),
        ("http://host/a.png", OUTSIDE),
        ("file:///etc/hostname", OUTSIDE),
        ("file://localhost/etc/hostname", OUTSIDE),
        ("/etc/hostname", OUTSIDE),
        (r"C:\photos\1.png", OUTSIDE),
        (r"\\host\share\1.png", OUTSIDE),
        ("//host/share/1.png", OUTSIDE),
        ("../secret.png", OUTSIDE),
        (r"photos\..\..\secret.png", OUTSIDE),
        ("photos/../photos/ä b/1.png", OUTSIDE),
        ("out/secret.png", OUTSIDE),
        ("out.png", OUTSIDE),
        ("round/1.png", "cannot be read"),
        ("pipe.png", "not a file"),
        (".", OUTSIDE),
        ("photos", "it is a folder"),
        ("photos/ä b/1.png/2.png", "no such file"),
        ("photos/2.png", "no such file"),
        ("a\0b.png", "not a file path"),
        ("a\nb.png", "no such file"),
        ("n" * 300, "not a file path"),
        ("a/" * 3000, "not a file path"),
        ("%2e%2e/secret.png", "no such file"),
        ("1.png?endpoint=127.0.0.1:1", "no such file"),
        ("  ", OUTSIDE),
        ("", "the cell names no image"),
        (None, "the cell names no image"),
    ],
)
def test_a_cell_that_names_another_place_is_a_broken_row(table, cell, why):
    with pytest.raises(UndecodableError, match=why):
        Pictures(ImageConfig(), storage.uri_of(table)).data(cell)


def test_a_cell_next_to_a_table_in_a_bucket_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(pictures, "read_tagged", lambda uri, _: (asked.append(uri) or b"x", ""))
    found = Pictures(ImageConfig(), "s3://bucket/tables?endpoint=localhost:9")
    assert found.data(r"a\b?endpoint=evil.png") == b"x"
    assert asked == ["s3://bucket/tables/a/b%3Fendpoint=evil.png?endpoint=localhost:9"]
    for cell in ("s3://other/a.png", "../a.png", "/a.png", "a" * 2000):
        with pytest.raises(UndecodableError):
            found.data(cell)
    assert len(asked) == 1


def test_a_file_that_is_too_large_for_an_image_is_not_read(table: Path) -> None:
    with (table / "sparse.png").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(UndecodableError, match="limit of 256 MiB"):
        Pictures(ImageConfig(), storage.uri_of(table)).data("sparse.png")


@pytest.fixture(params=["gs", "s3"])
def place(request: pytest.FixtureRequest) -> BucketPlace:
    server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    return BucketPlace(server, f"{request.param}://{bucket_name()}")


def test_an_object_that_is_too_large_is_read_no_further(place, monkeypatch):
    monkeypatch.setattr(pictures, "_MOST_BYTES", 1 << 20)
    place.put(f"{place.root}/a.png", bytes(3 << 20))
    with pytest.raises(UndecodableError, match="limit of 1 MiB"):
        Pictures(ImageConfig(), place.root).data("a.png")


def test_an_object_that_is_denied_is_a_broken_row_and_a_store_that_is_gone_is_none(
    place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "1")
    found = Pictures(ImageConfig(), place.root)
    place.put(f"{place.root}/a.png", b"x")
    place.plan.add(Fault(403, method="GET", path="a.png"))
    with pytest.raises(UndecodableError, match="cannot be read: no permission"):
        found.data("a.png")
    place.plan.add(Fault("drop", method="GET", path="a.png", times=1000))
    with pytest.raises(TransientError):
        found.data("a.png")
