"""Tests that letters of scripts without spaces are distinguished from other letters."""

import re

import pytest

from flotilla.trainer.features.statistics.words import PUNCTUATION, is_letter


@pytest.mark.parametrize(
    ("text", "expected"), [("我", True), ("ดี", True), ("𠀀", True), ("좋", False), ("a我", False)]
)
def test_a_letter_begins_the_text(text, expected):
    assert is_letter(text) == expected


def test_punctuation_has_no_letter():
    assert re.sub(PUNCTUATION, "", "it's [a_b]-\\c。") == "its abc。"
