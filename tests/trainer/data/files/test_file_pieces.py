"""Tests that a file is read only if it has not changed since it was listed."""

import os
import shutil

import numpy as np
import pytest
from PIL import Image

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import listing
from flotilla.trainer.data.files.file_pieces import local
from flotilla.trainer.data.files.file_source import FileSource
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.runtime.errors import UserError
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.trainer.data.files.sources import read
from tests.trainer.storage.places import BucketPlace, FilePlace

CHANGED = "has changed since it was listed"


@pytest.fixture(params=["file", "gs", "s3"])
def place(request, tmp_path):
    if request.param == "file":
        return FilePlace(tmp_path)
    server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    return BucketPlace(server, f"{request.param}://{bucket_name()}")


def listed(uri, **keys):
    return listing.list_source(DataConfig(source=uri, **keys))


def table(flip=0, rows=400):
    lines = (f"{i / 7:.4f},{'ab'[(i + flip) % 2]}" for i in range(rows))
    return "\n".join(["x,label", *lines]).encode()


def later(path, seconds=5):
    """Set the file's time explicitly, because the file system's clock may be coarse."""
    now = path.stat().st_mtime + seconds
    os.utime(path, (now, now))


def test_a_copy_is_what_was_listed(place, tmp_path):
    uri = storage.join(place.root, "a.csv")
    place.put(uri, table())
    (file,) = listed(uri).files
    with local(file, tmp_path) as path:
        assert path.read_bytes() == table()
    place.put(uri, table(flip=1))
    if path := storage.local_path(uri):
        later(path)
    with pytest.raises(UserError, match=CHANGED), local(file, tmp_path):
        pass


def test_an_object_that_is_replaced_while_it_is_copied(s3, tmp_path):
    """The connection drops halfway, and the download resumes from a different object."""
    place = BucketPlace(s3, f"s3://{bucket_name()}")
    uri = storage.join(place.root, "a.csv")
    place.put(uri, table(rows=20_000))
    (file,) = listed(uri).files
    place.plan.add(Fault("truncate", method="GET", path="a.csv"))
    asked = []

    def before(request):
        asked.append(request)
        if len(asked) == 2:
            place.put(uri, table(flip=1, rows=20_000))

    place.plan.before = before
    with pytest.raises(UserError, match=CHANGED), local(file, tmp_path):
        pass
    assert len(asked) > 1


def test_a_file_that_changes_while_it_is_read_in_place(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(table())
    (file,) = listed(str(path)).files
    before = path.stat()

    def read_and_change():
        with local(file, tmp_path):
            path.write_bytes(table(flip=1))
            # The change must be noticed even if the modification time is reset.
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(UserError, match=CHANGED):
        read_and_change()


def test_a_pinned_version_is_never_other_data(tmp_path):
    path, root = tmp_path / "a.csv", storage.uri_of(tmp_path / "root")
    path.write_bytes(table())
    config = DataConfig(source=str(path))
    found = listing.list_source(config)
    listing.publish(found, root)
    pinned = DataConfig(source=str(path), version=found.digest)
    first = prepare(pinned, root, tmp_path / "scratch")
    shutil.rmtree(storage.local_path(first.uri))
    path.write_bytes(table(flip=1))
    later(path)
    with pytest.raises(UserError, match=CHANGED):
        prepare(pinned, root, tmp_path / "scratch")
    assert not storage.is_published(first.uri)


def test_a_damaged_dataset_is_made_again_of_the_same_data_only(tmp_path):
    path, root = tmp_path / "a.csv", storage.uri_of(tmp_path / "root")
    path.write_bytes(table())
    config, before = DataConfig(source=str(path)), path.stat()
    first = prepare(config, root, tmp_path / "scratch")
    (storage.local_path(first.uri) / first.manifest.files[0].path).write_bytes(b"damaged")
    path.write_bytes(table(flip=1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(
        UserError, match=r"its examples differ from those of the damaged dataset a\.csv-\w+; rest"
    ):
        prepare(config, root, tmp_path / "scratch")
    assert storage.read_manifest(first.uri).fields == first.manifest.fields
    path.write_bytes(table())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert prepare(config, root, tmp_path / "scratch").manifest.files == first.manifest.files


@pytest.mark.parametrize("harm", ["other", "gone"])
def test_a_changed_image_is_no_broken_row(place, tmp_path, harm):
    uris = [storage.join(place.root, "ab"[i % 2], f"{i}.bmp") for i in range(24)]
    for number, uri in enumerate(uris):
        place.put(uri, bitmap(tmp_path, number))
    config = DataConfig(source=place.root, image={"size": [4, 4]}, bad_rows=0.9)
    made = FileSource(config, listed(place.root), tmp_path)
    selection = made.select()
    assert len(read(made, selection)["image"]) == len(uris)
    if harm == "gone":
        place.remove(uris[3])
    else:
        place.put(uris[3], bitmap(tmp_path, 77))
        if path := storage.local_path(uris[3]):
            later(path)
    with pytest.raises(UserError, match=rf"3\.bmp {CHANGED}"):
        read(made, selection)


def bitmap(folder, value):
    path = folder / "one.bmp"
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(path)
    return path.read_bytes()
