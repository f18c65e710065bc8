"""Names of classes: equal spellings, similar names, and canonical names.

All code that reads, counts, weights or compares classes uses this module. Two spellings name the
same class if they differ only in spaces or Unicode form, in the case of a boolean word, or in the
notation of a number.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal

_PAIRS = (("false", "true"), ("no", "yes"), ("off", "on"), ("f", "t"), ("n", "y"), ("0", "1"))
_SENSES = {word: number for pair in _PAIRS for number, word in enumerate(pair)}
# Single letters are excluded, because `T` and `t` may be different classes in a column that also
# has other classes.
_WORDS = {word for pair in _PAIRS[:3] for word in pair}
_LETTERS = ({"f", "t"}, {"n", "y"})
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_CODE = re.compile(r"0\d+", re.ASCII)
_UNSEEN = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"))
_QUOTES = "'\""
_END = ".,;:! '\""
_JOINS = re.compile(r"(?<=\w)[\s_-]+(?=\w)")


def normalize_text(text: str) -> str:
    """Return a string in Unicode form NFC, without invisible characters or redundant whitespace."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(_UNSEEN))
    return " ".join(text.split())


def normalize_number(text: str) -> str:
    """Return the canonical spelling of a number, such as `1` for `+1.0`, or "" for other text."""
    if not _NUMBER.fullmatch(text):
        return ""
    found = format(Decimal(text).normalize(), "f")
    return "0" if found == "-0" else found


def class_key(text: str) -> str:
    """Return a key that all spellings of a class share, regardless of the other classes."""
    short = normalize_text(text)
    word = short.lower()
    return word if word in _WORDS else normalize_number(short) or short


def is_truth(keys: Iterable[str]) -> bool:
    """Return whether all keys are spellings of true or false."""
    found = {key.lower() for key in keys}
    letters = [bool(found & pair) for pair in _LETTERS]
    return found <= _SENSES.keys() and not (all(letters) and not found & _WORDS)


class Spellings:
    """The spellings of a column's classes, grouped by class."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Group the strings of a column, which must not contain missing values."""
        self.by_key: dict[str, list[str]] = {}
        for text in sorted({normalize_text(each) for each in texts}):
            self.by_key.setdefault(class_key(text), []).append(text)
        self.is_truth = is_truth(self.by_key)
        #: Whether all classes are numbers, and whether all of them are integers.
        self.are_numbers = all(map(_NUMBER.fullmatch, self.by_key))
        self.are_whole = self.are_numbers and not any("." in key for key in self.by_key)

    @property
    def count(self) -> int:
        """The number of classes."""
        return len({_SENSES[key.lower()] for key in self.by_key} if self.is_truth else self.by_key)

    def names(self) -> tuple[str, ...]:
        """Return the sorted class names: false before true, numbers by value, others by name."""
        if self.is_truth:
            return self._name_bools()
        if self.are_numbers:
            return tuple(self._name(key) for key in sorted(self.by_key, key=Decimal))
        return tuple(sorted(self._name(key) for key in self.by_key))

    def _name_bools(self) -> tuple[str, ...]:
        texts: list[list[str]] = [[], []]
        for key, each in self.by_key.items():
            texts[_SENSES[key.lower()]] += each
        pairs = [pair for pair in _PAIRS if any(key.lower() in pair for key in self.by_key)]
        # Keep the spelling of words such as `Yes` and `No`. Use canonical names for `true` and 1,
        # because some file formats have booleans and others numbers.
        as_written = len(pairs) == 1 and pairs[0] not in (_PAIRS[0], _PAIRS[-1])
        words = list(pairs[0])
        for number, each in enumerate(texts):
            if as_written and max(map(len, texts)) == 1 and each:
                words[number] = each[0]
        return tuple(word for word, each in zip(words, texts, strict=True) if each)

    def _name(self, key: str) -> str:
        texts = self.by_key[key]
        # Keep the leading zeros of a code. Other numbers get a canonical name, such as `1`, because
        # file formats write them differently.
        plain = len(texts) == 1 and (_CODE.fullmatch(texts[0]) or not _NUMBER.fullmatch(key))
        return texts[0] if plain and key not in _PAIRS[0] else key

    def list_merged(self) -> list[list[str]]:
        """Return the spellings of each class that has several. The case of booleans is ignored."""
        if self.is_truth:
            words: list[set[str]] = [set(), set()]
            for key in self.by_key:
                words[_SENSES[key.lower()]].add(key.lower())
            return [sorted(each) for each in words if len(each) > 1]
        return [texts for key, texts in self.by_key.items() if len(texts) > 1 and key not in _WORDS]


def lookalikes(names: Iterable[str]) -> list[list[str]]:
    """Return groups of names that are easily confused: they differ only in case or punctuation."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_fold(name), []).append(name)
    return [each for each in found.values() if len(each) > 1]


def _fold(name: str) -> str:
    folded = unicodedata.normalize("NFKC", normalize_text(name)).casefold()
    plain = folded.lstrip(_QUOTES).rstrip(_END) or folded
    # Join words last, because 1e-5 is a number.
    key = class_key(plain)
    return str(bool(_SENSES[key])) if key in _WORDS else _JOINS.sub(" ", key)


class ClassIndex:
    """Maps every spelling of a class to the class index."""

    def __init__(self, names: Sequence[str]) -> None:
        """Index the names of classes, for example of a prepared dataset or a model."""
        self._exact = {name: number for number, name in enumerate(names)}
        keys = [class_key(name) for name in names]
        senses = [_SENSES.get(key.lower(), -1) for key in keys]
        self._is_truth = is_truth(keys) and len(set(senses)) == len(senses)
        own: Sequence[str | int] = senses if self._is_truth else keys
        counts = Counter(own)
        # Classes with equal keys were kept apart on request, so only their exact names match.
        self._known = {key: number for number, key in enumerate(own) if counts[key] == 1}

    def number(self, text: str) -> int:
        """Return the index of a class, or -1 if the string is unknown."""
        if text in self._exact:
            return self._exact[text]
        key = class_key(text)
        return self._known.get(_SENSES.get(key.lower(), -1) if self._is_truth else key, -1)


def are_same(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two lists name the same classes in the same order, in any spelling."""
    if len(one) != len(other):
        return False
    known = ClassIndex(one)
    return all(known.number(name) == number for number, name in enumerate(other))
