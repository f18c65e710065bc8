"""Tests that JSON records can be compared, printed and written again after they were read."""

import json
import math
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.runtime.json_records import (
    make_time,
    parse,
    parse_mapping,
    parse_number,
    parse_record,
    parse_time,
)


@dataclass(frozen=True, kw_only=True)
class Record:
    count: int
    share: float = 0.0
    words: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", b"\xff\xfe", b"\0\0", "[" * 100_000, "[" * 300 + "]" * 300,
     '{"a":' * 300 + "1" + "}" * 300, "1" * 10_000 + "x", b'\xef\xbb\xbf{}',
     r'{"\ud800": 1}'],
    ids=range(11),
)  # fmt: skip
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        parse(text)


@pytest.mark.parametrize("text", ["[]", "1", "null", '"text"', "[[1, 2]]"])
def test_what_is_no_object_is_a_value_error(text):
    with pytest.raises(ValueError, match="not a JSON object"):
        parse_mapping(text)


def test_integers_past_64_bits_are_floats():
    assert parse("[1234567890123456789, 1e3]") == [1234567890123456789, 1000.0]
    assert parse("9" * 400) == float("inf")
    assert type(parse("1" * 20)) is float


def test_much_that_is_not_deep_is_let_through():
    assert parse(json.dumps([[number] for number in range(1000)]))[999] == [999]


def test_each_field_is_checked():
    read = parse_record(Record, {"count": 1, "share": 2, "words": ["a"], "more": 2})
    assert read == Record(count=1, share=2.0, words=("a",))
    assert parse_record(Record, {"count": 1}) == Record(count=1)
    wrong_fields = [{"count": 1.5}, {"share": math.inf}, {"share": True}, {"words": [1]}]
    wrong_fields += [{"count": True}, {"words": "a"}]
    for wrong in (*({"count": 1, **each} for each in wrong_fields), {}, [], None):
        assert parse_record(Record, wrong) is None, wrong


ODD_NUMBERS = ["²3", "٣", "\uff11", "-1", "+1", "1_0", " 1", "1\n", "", "0x1", "1.0", "9" * 5000]
ODD_TIMES = [
    "", "now", "2026", "2026-13-01", "2026-01-01T25:00", "0001-01-01T00:00:00+14:00", "²026-01-01",
    "9999-12-31T23:59:59-14:00", "2026-01-01T00:00:00+99:00", None, 3, True, [], "\0", "-1-1-1",
]  # fmt: skip
ODD_SECONDS = [math.nan, math.inf, -math.inf, 1e300, -1e300, 2**63, 10**400, True, None, "1", []]


def test_what_is_no_number_or_time_is_none():
    assert [text for text in ODD_NUMBERS if parse_number(text) is not None] == []
    assert [seconds for seconds in ODD_SECONDS if make_time(seconds) is not None] == []
    for text in ODD_TIMES:
        found = parse_time(text)
        assert found is None or found.tzinfo, text


@pytest.mark.parametrize("zone", ["UTC-14", "UTC+12"])
@pytest.mark.parametrize("seconds", [253402300799, 253402214400, -62135596800, -62135510400, 1e11])
def test_each_time_has_a_local_time(monkeypatch, zone, seconds):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        found = make_time(seconds)
        assert found is None or found.astimezone()
    finally:
        monkeypatch.undo()
        time.tzset()


def test_numbers_and_times_are_read():
    assert [parse_number(text) for text in ("0", "000003", "123456789012345678")] == [
        0, 3, 123456789012345678,
    ]  # fmt: skip
    assert parse_time("2026-11-29T03:00:00.5Z").timestamp() == 1795921200.5
    assert (
        parse_time("2026-11-29") == make_time(1795910400) == parse_time("2026-11-29T02:00:00+02:00")
    )


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(text=st.text(max_size=30), seconds=st.floats() | st.integers())
def test_any_text_and_number_is_read(text, seconds):
    assert parse_number(text) in (None, *([int(text)] if text.isdecimal() else []))
    for found in (parse_time(text), make_time(seconds)):
        assert found is None or found.isoformat().endswith("+00:00")
