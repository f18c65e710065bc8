"""Names say what a thing is, in the words of the field."""

import ast
import re

from tests.house_rules.source import files, python_files, tree

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


def test_names_say_what_a_thing_is():
    assert all(map(says_nothing, ["utils", "file_utils", "common", "train_v2", "misc.old"]))
    assert not any(map(says_nothing, ["commonly", "utilisation", "mnist_v", "conv2d"]))
    offenders = [*nameless_files(), *numbered_definitions()]
    assert not offenders, "\n".join(offenders)
