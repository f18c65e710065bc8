"""Count words and pairs of consecutive words, each once per text, in Arrow arrays.

Models share the patterns that split texts into words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flotilla.trainer.features.statistics.one_pass import Counted

_NOT_UTF8 = re.compile(r"\S*\ufffd\S*")
# Size of the parts into which the texts are divided, in bytes.
_PART = 1 << 22


def count_words(texts: pa.Array, counts: NDArray[np.int64]) -> Iterator[tuple[Counted, Counted]]:
    """Yield words and pairs of words, as large_binary, each with its number of examples.

    Args:
        texts: distinct texts, as large_binary.
        counts: the number of examples with each text.
    """
    if not len(texts):
        return
    parts = np.cumsum(pc.binary_length(texts).to_numpy()) // _PART
    bounds = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(texts)]
    for begin, end in pairwise(bounds):
        yield _count_part(texts[begin:end], counts[begin:end])


def split_words(texts: pa.Array) -> pa.Array:
    """Return a list of the words of each text. The first and last word may be empty."""
    try:
        plain = texts.cast(pa.large_string())
    except pa.ArrowInvalid:
        # Drop words with invalid UTF-8.
        found = [each.decode(errors="replace") for each in texts.to_pylist()]
        plain = pa.array([_NOT_UTF8.sub(" ", each) for each in found], pa.large_string())
    plain = pc.replace_substring_regex(pc.ascii_lower(plain), PUNCTUATION, "")
    if not pc.all(pc.string_is_ascii(plain)).as_py():
        plain = pc.replace_substring_regex(plain, LETTER, r" \1 ")
    return pc.ascii_split_whitespace(plain)


def _count_part(texts: pa.Array, counts: NDArray[np.int64]) -> tuple[Counted, Counted]:
    lists = split_words(texts)
    rows, flat = pc.list_parent_indices(lists), lists.flatten().cast(pa.large_binary())
    there = pc.not_equal(flat, b"")
    coded = flat.filter(there).dictionary_encode()
    rows, ids = rows.filter(there).to_numpy(), coded.indices.to_numpy().astype(np.int64)
    words, number = coded.dictionary, max(1, len(coded.dictionary))
    same = rows[1:] == rows[:-1]
    pairs, places = np.unique((ids[:-1] * number + ids[1:])[same], return_inverse=True)
    joined = pc.binary_join_element_wise(
        words.take(pa.array(pairs // number)),
        words.take(pa.array(pairs % number)),
        pa.scalar(b" ", pa.large_binary()),
    )
    of_words = _count_rows(rows, ids, len(words), counts)
    return (words, of_words), (joined, _count_rows(rows[1:][same], places, len(pairs), counts))


def _count_rows(
    rows: NDArray[np.int64], ids: NDArray[np.int64], number: int, counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the number of examples that contain each of `number` items."""
    found = np.unique(rows * max(1, number) + ids)
    weights = counts[found // max(1, number)]
    return np.bincount(found % max(1, number), weights, number).astype(np.int64)


#: Punctuation that Keras's TextVectorization strips by default.
PUNCTUATION = r"[!\"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~']"
#: Letters of scripts without spaces: Thai, Lao, Burmese, Khmer, kana, Chinese.
LETTERS = (
    ("\u0e00", "\u0eff"), ("\u1000", "\u109f"), ("\u1780", "\u17ff"), ("\u3040", "\u30ff"),
    ("\u3400", "\u9fff"), ("\uf900", "\ufaff"), ("\U00020000", "\U0003ffff"),
)  # fmt: skip
LETTER = f"([{''.join(f'{first}-{last}' for first, last in LETTERS)}])"


def is_letter(text: str) -> bool:
    """Return whether a text begins with a letter of a script without spaces."""
    return bool(re.match(LETTER, text))
