from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer import storage
from trainer.errors import UserError

from .conftest import FILES, Make, content, left_over, path_of


def test_publish_and_read_back(make: Make, root: str) -> None:
    uri = storage.join(root, "datasets", "digits 1")
    manifest = storage.publish(make(), uri, kind="dataset", fields={"examples": 3})
    assert manifest.kind == "dataset"
    assert manifest.fields == {"examples": 3}
    assert [entry.path for entry in manifest.files] == sorted(FILES)
    assert storage.read_manifest(uri) == manifest
    assert storage.verify(uri) == manifest
    assert storage.is_published(uri)
    there = content(path_of(uri))
    assert json.loads(there.pop("MANIFEST.json"))["schema"] == 1
    assert there == FILES


def test_the_checksums_are_crc32c(make: Make, root: str) -> None:
    source = make(files={"check": b"123456789"})
    [entry] = storage.publish(source, storage.join(root, "a"), kind="x").files
    assert (entry.bytes, entry.crc32c) == (9, "e3069283")


def test_a_file_of_more_than_one_chunk(make: Make, root: str) -> None:
    source = make(files={"large": os.urandom(3 * 2**20 + 7)})
    uri = storage.join(root, "a")
    storage.publish(source, uri, kind="x")
    assert storage.verify(uri).total_bytes == 3 * 2**20 + 7


def test_the_source_is_left_alone(make: Make, root: str) -> None:
    source = make()
    storage.publish(source, storage.join(root, "a"), kind="x")
    assert content(source) == FILES


def test_the_same_again_is_a_no_op(make: Make, root: str) -> None:
    uri = storage.join(root, "a")
    first = storage.publish(make(), uri, kind="x", fields={"shape": (8, 8)})
    stamp = (path_of(uri) / "MANIFEST.json").stat()
    second = storage.publish(make("elsewhere"), uri, kind="x", fields={"shape": (8, 8)})
    assert second == first
    assert (path_of(uri) / "MANIFEST.json").stat() == stamp
    assert content(path_of(root)).keys() == {f"a/{name}" for name in [*FILES, "MANIFEST.json"]}


@pytest.mark.parametrize(
    ("files", "fields", "reason"),
    [
        ({**FILES, "b.txt": b"Second"}, {"n": 1}, "b.txt differs"),
        ({**FILES, "new": b""}, {"n": 1}, "new differs"),
        ({"b.txt": b"second"}, {"n": 1}, "a.bin differs, as 2 more do"),
        (FILES, {"n": 2, "m": 0}, "fields m, n"),
        (FILES, {}, "fields n"),
    ],
)
def test_other_content_is_a_conflict(
    make: Make, root: str, files: dict[str, bytes], fields: dict[str, int], reason: str
) -> None:
    uri = storage.join(root, "a")
    first = storage.publish(make(), uri, kind="x", fields={"n": 1})
    with pytest.raises(storage.Conflict) as error:
        storage.publish(make("other", files), uri, kind="x", fields=fields)
    assert str(error.value) == (
        f"{uri} is published already, with other content ({reason}): "
        "delete it first, or publish elsewhere"
    )
    assert storage.verify(uri) == first
    assert left_over(path_of(root)) == []


def test_another_kind_is_a_conflict(make: Make, root: str) -> None:
    uri = storage.join(root, "a")
    storage.publish(make(), uri, kind="x")
    with pytest.raises(storage.Conflict, match="kind x and not y"):
        storage.publish(make(), uri, kind="y")


def test_what_a_dead_writer_left_is_replaced(make: Make, root: str) -> None:
    uri = storage.join(root, "a")
    make(str(path_of(uri)), {"b.txt": b"half", "old": b"rubbish", "deep/old": b""})
    assert not storage.is_published(uri)
    manifest = storage.publish(make(), uri, kind="x")
    assert storage.verify(uri) == manifest
    assert content(path_of(uri)).keys() == {*FILES, "MANIFEST.json"}
    assert left_over(path_of(root)) == []


def test_a_parent_of_published_directories_is_not_replaced(make: Make, root: str) -> None:
    inner = storage.join(root, "runs", "one")
    storage.publish(make(), inner, kind="x")
    with pytest.raises(UserError, match="one is published below it"):
        storage.publish(make(), storage.join(root, "runs"), kind="x")
    assert storage.verify(inner)


def test_nothing_at_all_can_be_published(make: Make, root: str) -> None:
    uri = storage.join(root, "record")
    storage.publish(make(files={}), uri, kind="promotion", fields={"model": "a"})
    assert storage.verify(uri).fields == {"model": "a"}


def test_a_published_directory_can_be_published_elsewhere(make: Make, root: str) -> None:
    one, two = storage.join(root, "one"), storage.join(root, "two")
    first = storage.publish(make(), one, kind="x", fields={"n": 1})
    second = storage.publish(path_of(one), two, kind="x", fields={"n": 1})
    assert second.same_content(first)
    assert storage.verify(two) == second


def test_links_to_files_are_followed(make: Make, root: str, tmp_path: Path) -> None:
    (tmp_path / "behind").write_bytes(b"linked")
    source = make(files={"a": b""})
    (source / "link").symlink_to(tmp_path / "behind")
    uri = storage.join(root, "a")
    storage.publish(source, uri, kind="x")
    assert not (path_of(uri) / "link").is_symlink()
    assert (path_of(uri) / "link").read_bytes() == b"linked"


def test_what_is_no_file_is_refused_by_name(make: Make, root: str, tmp_path: Path) -> None:
    uri = storage.join(root, "a")
    folder = make("with_folder_link")
    (folder / "folder link").symlink_to(tmp_path)
    pipe = make("with_pipe")
    os.mkfifo(pipe / "a pipe")
    broken = make("with_broken")
    (broken / "broken").symlink_to("nowhere")
    for source, message in [
        (folder, "folder link: a link to a folder"),
        (pipe, "a pipe: neither a file nor a folder"),
        (broken, "broken: No such file"),
        (tmp_path / "absent", "absent: No such file"),
        (tmp_path / "with_pipe" / "b.txt", "b.txt: Not a directory"),
    ]:
        with pytest.raises(UserError, match=message):
            storage.publish(source, uri, kind="x")
    assert not path_of(root).exists()


def test_a_name_that_is_not_utf_8_is_refused_by_name(make: Make, root: str) -> None:
    source = make()
    (source / os.fsdecode(b"bad\xff")).write_bytes(b"")
    with pytest.raises(UserError, match=r"bad\\udcff.*its name is not UTF-8"):
        storage.publish(source, storage.join(root, "a"), kind="x")


def test_what_a_dead_fetch_left_is_not_published(make: Make, root: str) -> None:
    source = make(files={"a": b"", "sub/.shards.0123456789ab.part/half": b""})
    manifest = storage.publish(source, storage.join(root, "a"), kind="x")
    assert [entry.path for entry in manifest.files] == ["a"]


def test_a_missing_manifest_is_said(make: Make, root: str) -> None:
    uri = storage.join(root, "a b")
    make(str(path_of(uri)))
    for absent in (uri, storage.join(root, "nowhere"), storage.join(uri, "b.txt")):
        assert not storage.is_published(absent)
        for action in (storage.read_manifest, storage.verify):
            with pytest.raises(storage.NotPublished) as error:
                action(absent)
            assert str(error.value).startswith(f"{absent} is not published")


_flip = st.tuples(
    st.sampled_from(["a.bin", "b.txt", "ü/é"]), st.integers(0, 2**16), st.integers(0, 7)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_flip)
def test_one_flipped_bit_is_found_and_named(
    make: Make, root: str, flip: tuple[str, int, int]
) -> None:
    name, position, bit = flip
    uri = storage.join(root, "a")
    manifest = storage.publish(make(), uri, kind="x")
    path = path_of(uri) / name
    data = bytearray(FILES[name])
    data[position % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(
        storage.Corrupt, match=r"has crc32c [0-9a-f]{8} \(expected [0-9a-f]{8}\)"
    ) as e:
        storage.verify(uri)
    assert name in str(e.value)
    path.write_bytes(FILES[name])
    assert storage.verify(uri) == manifest


def test_damage_of_other_kinds_is_named(make: Make, root: str) -> None:
    uri = storage.join(root, "a")
    storage.publish(make(), uri, kind="x")
    file = path_of(uri) / "b.txt"
    file.write_bytes(b"secon")
    with pytest.raises(storage.Corrupt, match=r"b.txt has 5 bytes \(expected 6\); delete it"):
        storage.verify(uri)
    file.unlink()
    with pytest.raises(storage.Corrupt, match=r"b.txt is missing \(expected 6 bytes\)"):
        storage.verify(uri)
    file.mkdir()
    with pytest.raises(UserError, match="a folder stands where a file is needed"):
        storage.verify(uri)


def test_a_file_in_a_folders_place_counts_as_missing(make: Make, root: str) -> None:
    uri = storage.join(root, "a")
    storage.publish(make(files={"deep/file": b"1"}), uri, kind="x")
    (path_of(uri) / "deep" / "file").unlink()
    (path_of(uri) / "deep").rmdir()
    (path_of(uri) / "deep").write_bytes(b"")
    with pytest.raises(storage.Corrupt, match="deep/file is missing"):
        storage.verify(uri)


def test_one_file_is_read_and_checked(make: Make, root: str) -> None:
    uri = storage.join(root, "a")
    storage.publish(make(), uri, kind="x")
    for name, data in FILES.items():
        assert storage.read_file(uri, name) == data
    (path_of(uri) / "more").write_bytes(b"")
    with pytest.raises(storage.Missing, match="holds no more"):
        storage.read_file(uri, "more")
    with pytest.raises(storage.Missing, match=r"holds no b\.tx; did you mean 'b\.txt'\?"):
        storage.read_file(uri, "b.tx")
    (path_of(uri) / "b.txt").write_bytes(b"Second")
    with pytest.raises(storage.Corrupt, match=r"b\.txt has crc32c"):
        storage.read_file(uri, "b.txt")
    (path_of(uri) / "b.txt").unlink()
    with pytest.raises(storage.Corrupt, match=r"b\.txt is missing"):
        storage.read_file(uri, "b.txt")
    with pytest.raises(storage.NotPublished):
        storage.read_file(root, "b.txt")


def test_files_that_no_manifest_names_do_not_matter(make: Make, root: str) -> None:
    uri = storage.join(root, "a")
    manifest = storage.publish(make(), uri, kind="x")
    (path_of(uri) / "more").write_bytes(b"")
    assert storage.verify(uri) == manifest


def test_a_damaged_manifest_is_neither_absent_nor_replaced(make: Make, root: str) -> None:
    uri = storage.join(root, "a")
    storage.publish(make(), uri, kind="x")
    (path_of(uri) / "MANIFEST.json").write_bytes(b"{")
    assert storage.is_published(uri)
    for action in (storage.read_manifest, storage.verify):
        with pytest.raises(storage.Corrupt, match=r"MANIFEST\.json is damaged"):
            action(uri)
    with pytest.raises(storage.Corrupt):
        storage.publish(make(), uri, kind="x")
    storage.delete(uri)
    storage.publish(make(), uri, kind="x")
    storage.verify(uri)
