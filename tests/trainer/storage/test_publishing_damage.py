"""Published directories that were damaged afterwards: each damage is found and named."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer import storage
from trainer.errors import UserError

from .conftest import FILES, Make, path_of
from .places import Place


@pytest.fixture
def uri(place: Place) -> str:
    """Where to publish."""
    return storage.join(place.root, "a b")


_flip = st.tuples(
    st.sampled_from(["a.bin", "b.txt", "ü/é"]), st.integers(0, 2**16), st.integers(0, 7)
)


@pytest.mark.slow
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=30,
)
@given(_flip)
def test_one_flipped_bit_is_found_and_named(
    make: Make, place: Place, uri: str, flip: tuple[str, int, int]
) -> None:
    name, position, bit = flip
    manifest = storage.publish(make(), uri, kind="x")
    data = bytearray(FILES[name])
    data[position % len(data)] ^= 1 << bit
    place.put(storage.join(uri, name), bytes(data))
    with pytest.raises(
        storage.Corrupt, match=r"has crc32c [0-9a-f]{8} \(expected [0-9a-f]{8}\)"
    ) as e:
        storage.verify(uri)
    assert name in str(e.value)
    place.put(storage.join(uri, name), FILES[name])
    assert storage.verify(uri) == manifest


def test_damage_of_other_kinds_is_named(make: Make, place: Place, uri: str) -> None:
    storage.publish(make(), uri, kind="x")
    file = storage.join(uri, "b.txt")
    place.put(file, b"secon")
    with pytest.raises(storage.Corrupt, match=r"b.txt has 5 bytes \(expected 6\); delete it"):
        storage.verify(uri)
    place.remove(file)
    with pytest.raises(storage.Corrupt, match=r"b.txt is missing \(expected 6 bytes\)"):
        storage.verify(uri)


def test_folders_and_files_in_each_others_place(make: Make, root: str) -> None:
    uri = storage.join(root, "a")
    storage.publish(make(files={"b.txt": b"1", "deep/file": b"1"}), uri, kind="x")
    (path_of(uri) / "deep" / "file").unlink()
    (path_of(uri) / "deep").rmdir()
    (path_of(uri) / "deep").write_bytes(b"")
    with pytest.raises(storage.Corrupt, match="deep/file is missing"):
        storage.verify(uri)
    (path_of(uri) / "b.txt").unlink()
    (path_of(uri) / "b.txt").mkdir()
    with pytest.raises(UserError, match="there is a folder where a file is needed"):
        storage.verify(uri)


def test_one_file_is_read_and_checked(make: Make, place: Place, uri: str) -> None:
    storage.publish(make(), uri, kind="x")
    for name, data in FILES.items():
        assert storage.read_file(uri, name) == data
    place.put(storage.join(uri, "more"), b"")
    with pytest.raises(storage.Missing, match="holds no more"):
        storage.read_file(uri, "more")
    with pytest.raises(storage.Missing, match=r"holds no b\.tx; did you mean 'b\.txt'\?"):
        storage.read_file(uri, "b.tx")
    place.put(storage.join(uri, "b.txt"), b"Second")
    with pytest.raises(storage.Corrupt, match=r"b\.txt has crc32c"):
        storage.read_file(uri, "b.txt")
    place.remove(storage.join(uri, "b.txt"))
    with pytest.raises(storage.Corrupt, match=r"b\.txt is missing"):
        storage.read_file(uri, "b.txt")
    with pytest.raises(storage.NotPublished):
        storage.read_file(place.root, "b.txt")


def test_files_that_no_manifest_names_do_not_matter(make: Make, place: Place, uri: str) -> None:
    manifest = storage.publish(make(), uri, kind="x")
    place.put(storage.join(uri, "more"), b"")
    assert storage.verify(uri) == manifest


def test_a_damaged_manifest_is_neither_absent_nor_replaced(
    make: Make, place: Place, uri: str
) -> None:
    storage.publish(make(), uri, kind="x")
    place.put(storage.join(uri, "MANIFEST.json"), b"{")
    assert storage.is_published(uri)
    for action in (storage.read_manifest, storage.verify):
        with pytest.raises(storage.Corrupt, match=r"MANIFEST\.json is damaged"):
            action(uri)
    with pytest.raises(storage.Corrupt):
        storage.publish(make(), uri, kind="x")
    storage.delete(uri)
    storage.publish(make(), uri, kind="x")
    storage.verify(uri)
