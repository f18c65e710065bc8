"""Records in JSON: whatever is read can be compared, printed and written again."""

import json
from dataclasses import dataclass

import pytest

from trainer.json_records import from_tree, parse, parse_mapping


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


@pytest.mark.parametrize(
    ("tree", "record"),
    [
        ({"count": 1, "more": 2}, Record(count=1)),
        ({"count": 1, "share": 2, "words": ["a"]}, Record(count=1, share=2.0, words=("a",))),
        ({"count": True}, None),
        ({"count": 1.5}, None),
        ({"count": 1, "share": float("inf")}, None),
        ({"count": 1, "share": True}, None),
        ({"count": 1, "words": "a"}, None),
        ({"count": 1, "words": [1]}, None),
        ({}, None),
        ([], None),
        (None, None),
    ],
)
def test_each_field_is_checked(tree, record):
    assert from_tree(Record, tree) == record
