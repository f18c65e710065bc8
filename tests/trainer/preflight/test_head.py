"""Tests that the head of a large file ends with a whole row, and that messages name the file."""

import gzip
import re

import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import listing
from flotilla.trainer.data.files import file_pieces
from flotilla.trainer.data.files.formats.delimited import CsvReader
from flotilla.trainer.data.files.formats.raw_rows import Piece
from flotilla.trainer.preflight import head
from flotilla.trainer.preflight.head import few_files
from flotilla.trainer.preflight.proposal import propose
from flotilla.trainer.preflight.sample import publish_sample
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.uri import local_path
from tests.stores.fixtures import bucket_name


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(head, "_HEAD", 4000)


def copied(source, scratch):
    config = DataConfig(source=str(source))
    few = few_files(config, listing.list_source(config), scratch)
    assert few.is_part
    path = local_path(few.listing.files[0].uri)
    assert path
    assert few.copies == {str(path): str(source)}
    return path


@pytest.mark.parametrize("opened", [open, gzip.open])
def test_a_head_ends_with_a_row(tmp_path, opened):
    path = tmp_path / "t.csv"
    with opened(path, "wt") as file:
        file.write("text,label\n" + '"a\nb, ""c""\n",yes\n' * 1000)
    copy = copied(path, tmp_path / "scratch")
    assert copy.stat().st_size <= 4000
    rows = list(CsvReader().rows(copy, Piece(0), ["text"], lambda *_: pytest.fail("broken")))
    texts = [text for each in rows for text in each.table["text"].to_pylist()]
    assert set(texts) == {'a\nb, "c"\n'}


def test_a_message_names_the_file_and_not_its_copy(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,a,label\n" + "1,2,3\n" * 1000)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(UserError) as refused:
        publish_sample(DataConfig(source=str(path)), tmp_path / "scratch")
    assert f"{path}, row 1 has two columns named 'a'" in str(refused.value)
    with pytest.raises(UserError, match=f"source: {re.escape(str(path))}, row 1 has two columns"):
        propose(path, ["label"])


def test_a_head_is_no_file_that_has_changed(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,label\n" + "1,2\n" * 2000)
    config = DataConfig(source=str(path))
    (few,) = few_files(config, listing.list_source(config), tmp_path / "scratch").listing.files
    with file_pieces.local(few, tmp_path) as copy:
        assert copy.stat().st_size <= 4000


def test_small_files_after_a_large_remote_one_are_read(s3, monkeypatch, tmp_path):
    monkeypatch.setattr(head, "_FETCHED", 100)
    s3.create_bucket(bucket := bucket_name())
    for name, rows in (("a", 2), ("b", 1000), ("c", 2)):
        storage.write_bytes(f"s3://{bucket}/t/{name}.csv", b"a,label\n" + b"1,2\n" * rows)
    config = DataConfig(source=f"s3://{bucket}/t")
    few = few_files(config, listing.list_source(config), tmp_path)
    assert [each.path for each in few.listing.files] == ["a.csv", "c.csv"]
    assert few.is_part
    assert "b.csv is large" in few.notes[0]
