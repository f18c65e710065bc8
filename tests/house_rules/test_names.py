"""Names describe things in the terms of the field."""

import ast
import re

from tests.house_rules.source import files, python_files, tree

# Words that names must not contain, and the terms to use instead.
BANNED = {
    "agreement": "consensus",
    "beside": "next to, or what it is compared with",
    "bystander": "a history that does not publish",
    "errand": "upload",
    "endings": "exit handling",
    "figure": "metric",
    "figures": "metrics",
    "happening": "event",
    "happenings": "events",
    "impatient": "retry",
    "keeping": "retention",
    "lies": "is",
    "life": "attempt",
    "lives": "attempts",
    "mend": "fix",
    "outbox": "upload queue",
    "patience": "retry",
    "patiently": "retry",
    "rival": "opponent",
    "settled": "pinned inputs",
    "shown": "UI artifacts, or displayed",
    "stands": "is",
    "tether": "shutdown connection",
    "told": "reported, or the answer",
    "whoever": "any",
}
# Keras's term, which is also the configuration key `training.patience`.
OF_KERAS = {"patience", "training_patience"}
SAYS_NOTHING = {"util", "utils", "helper", "helpers", "common", "misc"}
NUMBERED = re.compile(r"_v\d+$")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def says_nothing(name):
    return bool(NUMBERED.search(name) or SAYS_NOTHING & set(re.split(r"[_.-]", name)))


def nameless_files():
    for path in files():
        if any(map(says_nothing, path.with_suffix("").parts)):
            yield f"{path}: name it for what it holds"


def numbered_definitions():
    for path in python_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, DEFINITIONS) and NUMBERED.search(node.name.lower()):
                yield f"{path}:{node.lineno}: {node.name} is named by a version"


def identifiers(module):
    """Yield the line and the name of each definition and each use."""
    for node in ast.walk(module):
        for attribute in ("name", "arg", "id", "attr"):
            if isinstance(name := getattr(node, attribute, None), str):
                yield getattr(node, "lineno", 0), name


def words_of(name):
    """Return the words of a `snake_case` or `CamelCase` name."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def banned_words():
    for path in python_files():
        named = [(0, path.stem), *identifiers(tree(path))]
        for name, line in {name: line for line, name in reversed(named)}.items():
            if name in OF_KERAS:
                continue
            for word in sorted(words_of(name) & BANNED.keys()):
                yield f"{path}:{line}: {name}: not {word} but {BANNED[word]}"


def test_names_say_what_a_thing_is():
    assert all(map(says_nothing, ["utils", "file_utils", "common", "train_v2", "misc.old"]))
    assert not any(map(says_nothing, ["commonly", "utilisation", "mnist_v", "conv2d"]))
    assert words_of("_patienceOfLives") == {"", "patience", "of", "lives"}
    offenders = [*nameless_files(), *numbered_definitions(), *banned_words()]
    assert not offenders, "\n".join(offenders)
