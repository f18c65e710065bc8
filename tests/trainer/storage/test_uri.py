import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage.uri import FORMS, SCHEMES, check_path, find_scheme, is_uri, speaks_s3

_names = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20
).filter(lambda name: name not in (".", ".."))


@given(st.lists(_names, min_size=1, max_size=4), _names)
def test_a_path_survives_the_way_to_a_uri_and_back(names, last):
    path = Path("/", *names)
    uri = storage.uri_of(path)
    assert storage.local_path(uri) == path
    assert storage.local_path(storage.join(uri, last)) == path / last
    assert uri.isascii()
    assert " " not in uri


@given(st.binary(min_size=1).filter(lambda b: not {0, 47} & set(b) and b not in (b".", b"..")))
def test_a_name_that_is_not_utf_8_survives(name):
    path = Path("/", os.fsdecode(name))
    assert storage.local_path(storage.uri_of(path)) == path


def test_uri_of_makes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage.local_path(storage.uri_of("a/../b")) == tmp_path / "b"
    assert storage.uri_of("//a") == "file:///a"
    (tmp_path / "link").symlink_to("real")
    assert storage.uri_of(tmp_path / "link").endswith("/link")


@pytest.mark.parametrize(
    ("uri", "parts", "expected"),
    [
        ("file:///a", ("b", "c"), "file:///a/b/c"),
        ("file:///a/", ("b/c",), "file:///a/b/c"),
        ("file:///", ("a b",), "file:///a%20b"),
        ("file:///a", (), "file:///a"),
        ("gs://bucket", ("ä b",), "gs://bucket/ä b"),
        ("gs://bucket/", ("x",), "gs://bucket/x"),
        ("minio://b/p?endpoint=h:9&disableSSL=true", ("x",), "minio://b/p/x?endpoint=h:9&disableSSL=true"),
    ],
)  # fmt: skip
def test_join(uri, parts, expected):
    assert storage.join(uri, *parts) == expected


@pytest.mark.parametrize(
    "uri",
    ["file:///a", "file:///a%20b", "gs://bucket", "gs://bucket/k",
     "minio://bucket?endpoint=a:1", "minio://bucket/p?endpoint=http://h:9&disableSSL=true"],
)  # fmt: skip
def test_the_parent_is_what_a_name_was_joined_to(uri):
    for name in ("x", "a b", "ü é", "what?", "?endpoint=x", "100%", "100%25", "%3F", "#"):
        below = storage.join(uri, name)
        assert (storage.parent_of(below), storage.name_of(below)) == (uri, name)


@pytest.mark.parametrize("part", ["", "/a", "a/", "a//b", "..", "a/../b", "."])
def test_join_does_not_climb(part):
    with pytest.raises(UserError, match="is not a plain name"):
        storage.join("file:///a", part)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///a/b%20c", "/a/b c"),
        ("file://localhost/a", "/a"),
        ("file:///typed by hand?#", "/typed by hand?#"),
        ("file:///100%", "/100%"),
        ("gs://b/x", ""),
        ("s3://b/x", ""),
        ("minio://b/x", ""),
    ],
)
def test_local_path(uri, path):
    assert storage.local_path(uri) == (Path(path) if path else None)


@pytest.mark.parametrize(
    "uri", ["", "runs/a", "/runs/a", "file://", "http://h/x", "file:/a", "://x", "FILE:///a"]
)
def test_what_is_no_uri(uri):
    with pytest.raises(UserError, match="is not a storage URI; write it as file:///path"):
        find_scheme(uri)


@pytest.mark.parametrize("uri", ["file://host/a", "file://a", "file:///a%00b"])
def test_what_is_no_file_uri(uri):
    with pytest.raises(UserError, match="write it as file:///absolute/path"):
        storage.local_path(uri)


@pytest.mark.parametrize(
    ("text", "is_one", "is_s3"),
    [
        ("file:///a", True, False),
        ("gs://b/k", True, False),
        ("s3://b", True, True),
        ("minio://b?endpoint=a:1", True, True),
        ("file://a", False, False),
        ("gs:///b", False, False),
        ("http://b", False, False),
        ("runs", False, False),
        ("s3", False, False),
        ("", False, False),
    ],
)
def test_the_form_of_a_uri_and_the_protocol_of_its_store(text, is_one, is_s3):
    assert (is_uri(text), speaks_s3(text)) == (is_one, is_s3)


def test_a_message_lists_every_scheme():
    assert FORMS == "file:///path, gs://, s3:// or minio://"
    assert all(f"{scheme}://" in FORMS for scheme in SCHEMES)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("file:///a/../..", "empty part, '.' or '..'"),
        ("file:///a/%2e%2E/b", "empty part, '.' or '..'"),
        ("file:///a%2F..%2Fb", "empty part, '.' or '..'"),
        ("file:///a/./b", "empty part, '.' or '..'"),
        ("file:///a\\..\\b", "contains a backslash; use /"),
        ("file:///a\nb", "control character"),
        ("file:///a/\x1b[31m", "control character"),
        ("s3://bucket/a\x7f", "control character"),
        ("gs://bucket/a\rb", "control character"),
        ("s3://bucket/a/../b", "empty part, '.' or '..'"),
        ("file:///" + "x" * 256, "too long"),
        ("file:///" + "x/" * 2100, "too long"),
        ("gs://bucket/" + "é" * 513, "too long"),
    ],
)
def test_a_path_that_climbs_or_hides_is_refused_wherever_a_uri_is_read(uri, reason):
    for act in (storage.read_bytes, storage.names, storage.is_published, check_path):
        with pytest.raises(UserError, match=f"is not a storage URI: .*{reason}") as error:
            act(uri)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 400
    with pytest.raises(ConfigError, match=r"^storage\.root: .*is not a storage URI"):
        parse_config({"storage": {"root": uri}})
