"""Tests that words and pairs of words are counted once per text."""

import re

import numpy as np
import pyarrow as pa
import pytest

from flotilla.trainer.features.statistics import words
from flotilla.trainer.features.statistics.words import (
    PUNCTUATION,
    count_words,
    is_letter,
    split_words,
)


def texts(*values):
    return pa.array(list(values), pa.large_binary())


def counted(given, counts):
    found = ({}, {})
    for part in count_words(given, np.array(counts)):
        for total, (names, numbers) in zip(found, part, strict=True):
            for name, number in zip(names.to_pylist(), numbers.tolist(), strict=True):
                total[name.decode()] = total.get(name.decode(), 0) + number
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it's GOOD", ["its", "good"]),
        (" a\tb\n", ["a", "b"]),
        ("我用iPad。", ["我", "用", "ipad。"]),
        ("ดี", ["ด", "ี"]),
        ("좋은 책", ["좋은", "책"]),
        ("...", []),
    ],
)
def test_letters_of_scripts_without_spaces_are_words(text, expected):
    found = [each for each in split_words(texts(text.encode()))[0].as_py() if each]
    assert found == expected


@pytest.mark.parametrize("part", [1, 10, 1 << 22])
def test_a_text_counts_once_for_each_of_its_words(monkeypatch, part):
    monkeypatch.setattr(words, "_PART", part)
    given = texts(b"the cat, the cat", b"", b"dog", b"the dog")
    found, pairs = counted(given, [3, 5, 2, 1])
    assert found == {"the": 4, "cat": 3, "dog": 3}
    assert pairs == {"the cat": 3, "cat the": 3, "the dog": 1}


def test_no_text_has_no_words():
    assert counted(texts(), []) == ({}, {})
    assert counted(texts(b"", b"..."), [1, 1]) == ({}, {})
    # Bytes that are no text leave the other words.
    assert counted(texts(b"\xff\xe4 a", b"a b"), [1, 1])[0] == {"a": 2, "b": 1}
    assert re.sub(PUNCTUATION, "", "it's [a_b]-\\c。") == "its abc。"


@pytest.mark.parametrize(
    ("text", "expected"), [("我", True), ("ดี", True), ("𠀀", True), ("좋", False), ("a我", False)]
)
def test_a_letter_begins_the_text(text, expected):
    assert is_letter(text) == expected
