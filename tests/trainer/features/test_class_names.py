"""Tests which spellings are the same class, which only look similar, and how a class is named."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.trainer.features.class_names import (
    ClassIndex,
    Spellings,
    are_same,
    lookalikes,
    normalize_number,
)


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["True", "TRUE", "false", "False "], ("false", "true")),
        (["True", "False"], ("false", "true")),
        (["Yes", "No"], ("No", "Yes")),
        (["Yes", "YES", "no"], ("no", "yes")),
        (["Y", "N"], ("N", "Y")),
        (["t", "F"], ("F", "t")),
        (["On", "off"], ("off", "On")),
        (["1", "0"], ("0", "1")),
        (["1.0", "0.0", "1"], ("0", "1")),
        (["true", "1", "0"], ("false", "true")),
        (["yes", "Y", "no", "n", "0", "1"], ("no", "yes")),
        (["TRUE"], ("true",)),
        (["2", "10", "1"], ("1", "2", "10")),
        (["+1", "-1"], ("-1", "1")),
        (["01", "02", "10"], ("01", "02", "10")),
        (["01", "1", "2"], ("1", "2")),
        (["9.0", "10.0", "1e1"], ("9", "10")),
        (["0.50", "0.5", "-0.0"], ("0", "0.5")),
        (["t", "f", "n", "y"], ("f", "n", "t", "y")),
        (["T", "t", "x"], ("T", "t", "x")),
        (["true", "True", "unsure"], ("true", "unsure")),
        (["No", "no", "Perhaps"], ("Perhaps", "no")),
        (["New York", " New\u00a0York ", "New  York", "Rome"], ("New York", "Rome")),
        (["na\u00efve", unicodedata.normalize("NFD", "na\u00efve")], ("na\u00efve",)),
        (["a\u200b", "a", "\ufeffb"], ("a", "b")),
        (["A", "a"], ("A", "a")),
        (["1", "A1"], ("1", "A1")),
    ],
)
def test_spellings_of_a_class_are_one(texts, names):
    spellings = Spellings(texts)
    assert spellings.names() == names
    assert spellings.count == len(names)
    index = ClassIndex(names)
    assert {index.number(each) for each in texts} == set(range(len(names)))


@pytest.mark.parametrize(
    ("texts", "merged"),
    [
        (["t", "1"], [["1", "t"]]), (["0", "N"], [["0", "n"]]),
        (["yes", "Y", "no", "n"], [["n", "no"], ["y", "yes"]]), (["1", "1.0", "0"], []),
        (["T", "t", "F"], []), (["False", "FALSE", "true"], []), (["on", "off"], []),
        (["1", "01", "2"], [["01", "1"]]), (["True", "TRUE", "no"], []),
        (["Yes", "yes", "perhaps"], []),
    ],
)  # fmt: skip
def test_two_words_that_mean_yes_are_said(texts, merged):
    assert Spellings(texts).list_merged() == merged


@pytest.mark.parametrize(
    "names",
    [
        ("Cat", "cat"), ("<=5", "<=5."), ("low risk", "low-risk"), ("low_risk", "low risk"),
        ("A", "\uff21"), ("stra\u00dfe", "STRASSE"), ("'a'", "a"), ("yes", "true"), ("1", "\uff11"),
        ("'yes'", "yes"), ("no.", "No"), ("\"1\"", "1"),
    ],
)  # fmt: skip
def test_classes_that_look_alike_are_found(names):
    assert lookalikes([*names, "other"]) == [list(names)]


@pytest.mark.parametrize(
    "names", [("-1", "1"), ("+", "-"), ("C", "C++"), ("a", "\u00e4"), ("1", "10"), ("1e-5", "1e5")]
)
def test_others_do_not_look_alike(names):
    assert not lookalikes(names)


def test_those_of_an_earlier_model_are_found():
    # Classes that were kept apart are found as they are written.
    apart = ClassIndex(("YES", "Yes", "no"))
    assert [apart.number(each) for each in ("YES", "Yes", "no", "yes", "")] == [0, 1, 2, -1, -1]
    index = ClassIndex(("False", "True"))
    assert [index.number(each) for each in ("False", "true", "1", "x")] == [0, 1, 1, -1]
    assert are_same(("False", "True"), ("false", "true"))
    assert not are_same(("false", "true"), ("true", "false"))
    assert not are_same(("a", "b"), ("a", "B"))
    assert not are_same(("a",), ("a", "b"))


@given(st.lists(st.text(max_size=8), min_size=1, max_size=6))
def test_any_text_finds_its_class(texts):
    names = Spellings(texts).names()
    assert len(set(names)) == len(names)
    index = ClassIndex(names)
    assert all(index.number(each) >= 0 for each in texts)
    assert [index.number(each) for each in names] == list(range(len(names)))


@given(st.integers(-(10**6), 10**6))
def test_a_whole_number_has_one_spelling(number):
    texts = [str(number), f"{number}.0", f"{number:+d}", f"{number}.", f"{number}e0"]
    assert {normalize_number(each) for each in texts} == {str(number)}
