"""Technical names for columns and outputs.

A column may have any name, such as `Sepal Length (cm)`, `user/age`, or an empty one. Keras layers,
TensorFlow scopes, checkpoint variables and signature arguments allow few characters, so they get
their names from these functions. A name that is valid everywhere, such as `age`, is unchanged.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Sequence

_OF_LAYERS = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.-]{0,99}")
# Suffix of generated names. A column that already has such a suffix also gets a generated name.
_MADE = re.compile(r".*[._][0-9a-f]{16}", re.DOTALL)
_LONGEST = 40
_OF_CURVES, _LONGEST_CURVE = re.compile(r"[\w\-. :/]+"), 250


def layer_name(name: str) -> str:
    """Return a layer name for a column or an output. The layer's variables are named after it.

    The result depends only on the given name, so that a checkpoint fits even if other columns
    change. Different names give different results.
    """
    if _OF_LAYERS.fullmatch(name) and not _MADE.fullmatch(name):
        return name
    readable = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
    return f"{readable[:_LONGEST] or 'column'}.{_digest(name)}"


def argument_names(features: Sequence[str]) -> dict[str, str]:
    """Return the argument name of each feature in a signature, in the order of `features`.

    TensorFlow accepts names of letters, digits and `_` that begin with a letter, are not Python
    keywords, and differ in more than case.
    """
    words = {name: _argument(name) for name in features}
    found: dict[str, str] = {}
    taken: set[str] = set()
    # Process the valid names first, so that they are kept.
    for name in sorted(features, key=lambda name: (name != words[name], name)):
        word = words[name]
        if word.lower() in taken or _MADE.fullmatch(name):
            word = f"{word[:_LONGEST]}_{_digest(name)}"
        taken.add(word.lower())
        found[name] = word
    return {name: found[name] for name in features}


def curve_name(name: str) -> str:
    """Return the name of a metric or parameter in a tracker. The name is valid in MLflow."""
    is_path = not {"", ".", ".."} & {*name.split("/")}
    if is_path and len(name) <= _LONGEST_CURVE and _OF_CURVES.fullmatch(name):
        return name
    readable = re.sub(r"[^\w-]+", "_", name)
    return f"{readable[:_LONGEST]}.{_digest(name)}"


def _argument(name: str) -> str:
    word = re.sub(r"[^A-Za-z0-9_]", "_", name)
    is_word = re.match("[A-Za-z]", word) and not keyword.iskeyword(word) and word != "self"
    return word if is_word else f"input_{word}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]


def length_name(feature: str) -> str:
    """Return the name of the feature that contains the lengths of a variable-length feature."""
    return f"{feature}_length"
