"""Fingerprints of texts in a graph: tables of embeddings and vocabularies know a text by them."""

from __future__ import annotations

import tensorflow as tf

#: How many fingerprints there are: FarmHash and SipHash without their sign, which are the same on
#: every machine and in every version.
FINGERPRINTS = 2**63 - 1
# Of Unicode, as Arrow and Python have it: separators, and control characters of white space.
_SPACE = r"[\t-\r\x1c-\x20\x{85}\pZ]"


def strip_spaces(texts: tf.Tensor) -> tf.Tensor:
    """Return texts without spaces around them, as those of files are when they are read."""
    return tf.strings.regex_replace(texts, rf"^{_SPACE}+|{_SPACE}+$", "")
