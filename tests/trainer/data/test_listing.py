"""Tests which files a source has, and how their spans, splits and changes are detected."""

import os

import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.listing import (
    Listing,
    list_source,
    list_spans,
    publish,
    read_listing,
    select_spans,
)
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage import store
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.trainer.storage.places import BucketPlace

NEXT_PAGE = "continuation-token=|pageToken="


def listed(source, **keys):
    return list_source(DataConfig(source=str(source), **keys))


def paths(listing):
    return [file.path for file in listing.files]


@pytest.fixture
def folder(tmp_path):
    def fill(*names):
        for name in names:
            path = tmp_path / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        return tmp_path / "in"

    return fill


@pytest.fixture(params=["gs", "s3"])
def place(request):
    server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    return BucketPlace(server, f"{request.param}://{bucket_name()}")


def test_a_folder_is_all_below_it_but_for_what_is_hidden(folder):
    at = folder("b/c.csv", "a.csv", "_SUCCESS", ".a.csv.crc", "a.csv.crc", "_temporary/0/x.csv")
    # A link to a folder above is no loop.
    (at / "loop").symlink_to(at)
    (at / "dangling").symlink_to(at / "nowhere")
    found = listed(at)
    assert paths(found) == ["a.csv", "b/c.csv"]
    assert [storage.local_path(file.uri) for file in found.files] == [at / "a.csv", at / "b/c.csv"]
    assert Listing.from_json(found.to_json(), "here") == found
    for data in (b"", b"x", b"\x1f\x8b"):
        with pytest.raises(UserError, match="here is not a listing of this version"):
            Listing.from_json(data, "here")


def test_splits_have_files_of_their_own(folder):
    at = folder("train/a.csv", "held/a.csv", "2/a.csv")
    found = listed(at, splits={"train": "train", "test": "held/*.csv"})
    assert [(file.split, file.uri.rpartition("/in/")[2]) for file in found.files] == [
        ("test", "held/a.csv"),
        ("train", "train/a.csv"),
    ]


def test_the_digest_is_another_one_when_a_file_changes_or_is_renamed(folder):
    at = folder("a.csv", "b.csv")
    first = listed(at).digest
    assert listed(at / "*.csv").digest == first
    before = os.stat(at / "a.csv").st_mtime_ns
    (at / "a.csv").write_text("v.csx")
    os.utime(at / "a.csv", ns=(before + 1, before + 1))
    changed = listed(at).digest
    (at / "a.csv").rename(at / "c.csv")
    assert len({first, changed, listed(at).digest}) == len(("first", "changed", "renamed"))


def test_a_bucket_is_listed_page_by_page_and_a_lost_page_is_asked_again(place, monkeypatch):
    for number in range(5):
        place.put(f"{place.root}/s-{number}.csv", b"%d" % number)
    place.put(f"{place.root}/elsewhere", b"x")
    monkeypatch.setattr(store, "PAGE", 2)
    place.plan.add(Fault("drop", method="GET", path=NEXT_PAGE))
    found = listed(f"{place.root}/s-{{SPAN}}.csv")
    assert list(found.spans) == ["0", "1", "2", "3", "4"]
    assert all(file.size == 1 and file.tag for file in found.files)


def test_the_same_content_stored_again_is_the_same_file(place):
    uri = f"{place.root}/a.csv"
    place.put(uri, b"first")
    first = listed(uri)
    assert [file.uri for file in first.files] == [uri]
    place.put(uri, b"first")
    assert listed(uri).digest == first.digest
    place.put(uri, b"other")
    assert listed(uri).digest != first.digest


def test_no_permission_in_the_middle_of_a_listing_is_one_line(place, monkeypatch):
    for number in range(5):
        place.put(f"{place.root}/{number}.csv", b"x")
    monkeypatch.setattr(store, "PAGE", 2)
    place.plan.add(Fault(403, method="GET", path=NEXT_PAGE, times=10))
    with pytest.raises(UserError, match="no permission") as error:
        listed(place.root)
    assert str(error.value).startswith("cannot list data.source")
    assert "\n" not in str(error.value)


def test_a_missing_and_an_empty_bucket_are_two_things(place):
    scheme = place.root.partition("://")[0]
    with pytest.raises(UserError, match="there is no bucket"):
        listed(f"{scheme}://no-such-bucket/a")
    with pytest.raises(UserError, match=r"data\.source: there is no file at"):
        listed(storage.parent_of(place.root))
    with pytest.raises(UserError, match="there is nothing at"):
        listed(place.root)


def test_a_folder_without_permission_is_named(folder, monkeypatch):
    at = folder("a.csv", "closed/b.csv")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"closed: Permission denied; make it accessible"):
        listed(at)


def test_a_pattern_that_matches_nothing_says_what_is_there(folder):
    at = folder("a.csv", "b.csv", "c.csv", "d.csv")
    with pytest.raises(UserError) as error:
        listed(at / "*.parquet")
    assert "such as 'a.csv', 'b.csv', 'c.csv'; change" in str(error.value)
    with pytest.raises(UserError, match="there is nothing at"):
        listed(at / "nowhere")


def test_two_spellings_of_a_span_are_one_line(folder):
    at = folder("s-9/a.csv", "s-09/a.csv")
    with pytest.raises(UserError, match=r"are the same span 9; write all") as error:
        listed(at / "s-{SPAN}")
    assert "\n" not in str(error.value)
    at = folder("d/20261123.csv", "d/2026-11-23.csv")
    with pytest.raises(UserError, match="are the same span 2026-11-23"):
        listed(at / "d" / "{DATE}.csv")


@pytest.mark.parametrize("pattern", ["{SPAN}/{SPAN}.csv", "{SPAN}-{DATE}.csv"])
def test_a_span_is_written_once(folder, pattern):
    with pytest.raises(
        ConfigError, match=r"data\.source: .* contains more than one \{SPAN\} or \{DATE\}"
    ):
        listed(folder("a.csv") / pattern)


@pytest.mark.parametrize(
    ("spans", "taken"), [("newest", ["10"]), ("2", ["9", "10"]), ("9", ["2", "9", "10"])]
)
def test_spans_come_in_their_order_and_the_newest_are_taken(folder, spans, taken):
    at = folder("s-9.csv", "s-0010.csv", "s-2.csv")
    found = listed(at / "s-{SPAN}.csv")
    assert list(found.spans) == [file.span for file in found.files] == ["2", "9", "10"]
    assert list(select_spans(found, spans, {}).spans) == taken
    with pytest.raises(UserError, match=r"data\.spans: 3, but no file of data\.source has a span"):
        select_spans(listed(at), "3", {})


def test_a_listing_is_kept_and_follows_its_files_elsewhere(tmp_path, place):
    root = storage.uri_of(tmp_path / "root")
    kept = {}
    for name in ("here", "there"):
        place.put(f"{place.root}/{name}/s-1.csv", b"same")
        kept[name] = listed(f"{place.root}/{name}/s-{{SPAN}}.csv")
        publish(kept[name], root)
        publish(kept[name], root)
        assert read_listing(root, kept[name].digest) == kept[name]
    assert kept["here"].digest == kept["there"].digest
    assert list_spans(root, kept["here"].digest) == kept["here"].spans
    assert list_spans(root, "0" * 32) == {}
    with pytest.raises(UserError, match=r"data\.version: there is no listing 0{32} below"):
        read_listing(root, "0" * 32)
    with pytest.raises(UserError, match=r"data\.version: '1\.0' is not the digest of a listing"):
        read_listing(root, "1.0")
