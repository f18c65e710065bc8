"""Names of ours in place of what people call their columns and outputs.

A column may be called anything: `Sepal Length (cm)`, `user/age`, `class`, nothing at all. Layers of
Keras, scopes of TensorFlow, variables of a checkpoint and arguments of a signature take few signs
only. So none of them is called as a column is; these functions say what it is called instead. A
name that all of them take, such as `age`, stays as it is.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Sequence

_OF_LAYERS = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.-]{0,99}")
# How a name ends that was made here, and that no column may take.
_MADE = re.compile(r".*[._][0-9a-f]{16}", re.DOTALL)
_LONGEST = 40
_OF_CURVES, _LONGEST_CURVE = re.compile(r"[\w\-. :/]+"), 250


def layer_name(name: str) -> str:
    """Return what a layer, and so a variable and a scope, is called for a column or an output.

    It depends on the name alone, so that a checkpoint fits whatever else a table has. What differs
    in the name differs here.
    """
    if _OF_LAYERS.fullmatch(name) and not _MADE.fullmatch(name):
        return name
    readable = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
    return f"{readable[:_LONGEST] or 'column'}.{_digest(name)}"


def argument_names(features: Sequence[str]) -> dict[str, str]:
    """Return what the arguments of a signature are called, by feature, in the same order.

    TensorFlow takes words of letters, digits and `_`, which begin with a letter, are no word of
    Python, and differ in more than upper and lower case.
    """
    words = {name: _argument(name) for name in features}
    found: dict[str, str] = {}
    taken: set[str] = set()
    # One that is called so itself goes first.
    for name in sorted(features, key=lambda name: (name != words[name], name)):
        word = words[name]
        if word.lower() in taken or _MADE.fullmatch(name):
            word = f"{word[:_LONGEST]}_{_digest(name)}"
        taken.add(word.lower())
        found[name] = word
    return {name: found[name] for name in features}


def curve_name(name: str) -> str:
    """Return what a tracker calls a metric or a parameter: MLflow takes words and paths."""
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
    """Return the feature that holds the lengths of a feature whose first size varies."""
    return f"{feature}_length"
