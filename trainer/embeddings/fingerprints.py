"""Fingerprints of strings in a graph, by which embedding tables and vocabularies identify them."""

from __future__ import annotations

import tensorflow as tf

#: The number of fingerprints: values of FarmHash and SipHash without their sign, which are equal on
#: every machine and in every version.
FINGERPRINTS = 2**63 - 1
# White space in Unicode, as in Arrow and Python: separators, and some control characters.
_SPACE = r"[\t-\r\x1c-\x20\x{85}\pZ]"


def strip_spaces(texts: tf.Tensor) -> tf.Tensor:
    """Return texts without surrounding white space, as file readers do."""
    return tf.strings.regex_replace(texts, rf"^{_SPACE}+|{_SPACE}+$", "")
