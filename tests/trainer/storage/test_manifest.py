import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flotilla.trainer.storage import Corrupt, Manifest, UnknownSchema
from flotilla.trainer.storage.manifest import RESERVED, FileEntry

ENTRY = FileEntry("a", 1, "00000000")

_text = st.text(st.characters(exclude_categories=["Cs"]))
_finite = st.floats(allow_nan=False, allow_infinity=False)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | _finite | _text,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(_text, below, max_size=3),
    max_leaves=8,
)  # fmt: skip
_part = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)
_path = st.lists(_part.filter(lambda p: p not in (".", "..")), min_size=1, max_size=3)
_entry = st.builds(
    FileEntry,
    _path.map("/".join).filter(lambda p: p != "MANIFEST.json"),
    st.integers(0, 2**50),
    st.integers(0, 2**32 - 1).map("{:08x}".format),
)
_manifest = st.builds(
    Manifest,
    _text.filter(bool),
    st.lists(_entry, max_size=4, unique_by=lambda entry: entry.path).map(tuple),
    st.dictionaries(_text.filter(lambda name: name not in RESERVED), _json, max_size=4),
)


def tree(**changes):
    good = json.loads(Manifest("dataset", (ENTRY,), {"examples": 3}).to_json())
    merged = {**good, **changes}
    return json.dumps({name: value for name, value in merged.items() if value is not None})


@settings(max_examples=30)
@given(_manifest)
def test_it_reads_what_it_wrote(manifest):
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.same_content(manifest)
    assert again.digest == replace(manifest, created="later").digest
    assert again.to_json() == manifest.to_json()


@example(b"[" * 100_000)
@example(b"null")
@given(st.binary(max_size=200))
def test_whatever_bytes_are_read_end_in_an_error_that_names_them(data):
    with pytest.raises(Corrupt, match=r"^here is damaged \(.*\): delete it and create it again$"):
        Manifest.from_json(data, where="here")


@settings(max_examples=30)
@given(_manifest, st.data())
def test_a_torn_manifest_is_never_taken_for_a_whole_one(manifest, data):
    whole = manifest.to_json()
    end = data.draw(st.integers(0, len(whole) - 3))
    with pytest.raises(Corrupt):
        Manifest.from_json(whole[:end])


def test_the_layout():
    manifest = Manifest("dataset", (FileEntry("z", 2, "0000000a"), ENTRY), {"examples": 3})
    written = json.loads(manifest.to_json())
    assert written == {
        "schema": 1,
        "kind": "dataset",
        "created": manifest.created,
        "files": [
            {"path": "a", "bytes": 1, "crc32c": "00000000"},
            {"path": "z", "bytes": 2, "crc32c": "0000000a"},
        ],
        "examples": 3,
    }
    assert list(written)[:4] == ["schema", "kind", "created", "files"]
    assert manifest.total_bytes == 3


def test_created_is_now_in_utc():
    before = datetime.now(UTC).replace(microsecond=0)
    created = Manifest("dataset").created
    assert created.endswith("Z")
    assert before <= datetime.fromisoformat(created) <= datetime.now(UTC)


def test_tuples_are_the_lists_that_they_become():
    one = Manifest("a", (), {"shape": (8, 8), "by": {1: "x"}})
    assert one.fields == {"shape": [8, 8], "by": {"1": "x"}}
    assert one.same_content(Manifest.from_json(one.to_json()))


def test_what_differs_is_not_the_same():
    base = Manifest("a", (ENTRY,), {"x": 1})
    others = [
        Manifest("b", (ENTRY,), {"x": 1}),
        Manifest("a", (), {"x": 1}),
        Manifest("a", (FileEntry("a", 1, "00000001"),), {"x": 1}),
        Manifest("a", (ENTRY,), {"x": 2}),
        Manifest("a", (ENTRY,), {}),
    ]
    assert not any(base.same_content(other) for other in others)
    assert len({base.digest, *(other.digest for other in others)}) == len(others) + 1


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "..", "../x", "a/../../x", "a/./b", ".", "a//b", "a/", "a\0b",
     "MANIFEST.json", None, 3],
)  # fmt: skip
def test_a_path_that_leads_out_is_refused(path):
    with pytest.raises(ValueError, match="is not a path below the directory"):
        FileEntry(path, 1, "00000000")
    text = tree(files=[{"path": path, "bytes": 1, "crc32c": "00000000"}])
    with pytest.raises(Corrupt, match="is not a path below the directory"):
        Manifest.from_json(text)


@pytest.mark.parametrize("path", ["a", "..a", "a..", "...", "sub/MANIFEST.json", "a\\..\\b", " "])
def test_an_odd_path_that_stays_inside_is_fine(path):
    assert FileEntry(path, 1, "00000000").path == path


@pytest.mark.parametrize(
    ("size", "crc"),
    [(-1, "00000000"), (1.0, "00000000"), (True, "00000000"), ("1", "00000000"), (1, "0"),
     (1, "0000000G"), (1, "0000000A"), (1, 0), (1, None), (1, "00000000\n")],
)  # fmt: skip
def test_a_wrong_size_or_checksum_is_refused(size, crc):
    with pytest.raises(ValueError, match=r"^a: "):
        FileEntry("a", size, crc)


@pytest.mark.parametrize("schema", [0, 2, 99, -1])
def test_another_schema_is_named(schema):
    with pytest.raises(
        UnknownSchema, match=rf"^u has schema {schema}, but this version reads only schema 1"
    ):
        Manifest.from_json(tree(schema=schema, files=None, entries=[]), where="u")


@pytest.mark.parametrize(
    "changes",
    [{"schema": "1"}, {"schema": True}, {"schema": 1.0}, {"schema": None}, {"kind": None},
     {"kind": ""}, {"kind": 3}, {"created": None}, {"created": 5}, {"files": None}, {"files": 5},
     {"files": [1]}, {"files": {"a": 1}}, {"files": [{"path": "a"}]},
     {"files": [{"path": "a", "bytes": 1, "crc32c": "00000000", "more": 1}]},
     {"files": [{"path": "a", "bytes": 1, "crc32c": "00000000"}] * 2}],
)  # fmt: skip
def test_a_manifest_that_is_not_one(changes):
    with pytest.raises(Corrupt, match=r"MANIFEST\.json is damaged"):
        Manifest.from_json(tree(**changes))


@pytest.mark.parametrize("name", RESERVED)
def test_a_field_cannot_take_the_manifests_own_name(name):
    with pytest.raises(ValueError, match=f"reserves these field names: {name}"):
        Manifest("a", (), {name: 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", {1, 2}, object()])
def test_fields_have_to_be_json(value):
    with pytest.raises((ValueError, TypeError)):
        Manifest("a", (), {"x": value})
