"""Fingerprints of strings, which identify them in embedding tables and vocabularies."""

from __future__ import annotations

import tensorflow as tf

#: Number of different fingerprints. A fingerprint is a FarmHash or SipHash value modulo this
#: number. Both hashes are the same on every machine and in every version.
FINGERPRINTS = 2**63 - 1
# Unicode white space as in Arrow and Python: separators and some control characters.
_SPACE = r"[\t-\r\x1c-\x20\x{85}\pZ]"


def strip_spaces(texts: tf.Tensor) -> tf.Tensor:
    """Strip surrounding white space from each string, as file readers do."""
    return tf.strings.regex_replace(texts, rf"^{_SPACE}+|{_SPACE}+$", "")
