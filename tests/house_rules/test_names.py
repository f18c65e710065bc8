import ast
import re

import pytest

from tests.house_rules.source import files, python_files, tree

SAYS_NOTHING = {"util", "utils", "helper", "helpers", "common", "misc"}
NUMBERED = re.compile(r"_v\d+$")


def says_nothing(name):
    return bool(NUMBERED.search(name) or SAYS_NOTHING & set(re.split(r"[_.-]", name)))


def test_files_and_folders_are_named_for_what_they_hold():
    bad = [str(path) for path in files() if any(map(says_nothing, path.with_suffix("").parts))]
    assert not bad


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_nothing_is_named_by_a_version(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    named = [node.name for node in ast.walk(tree(path)) if isinstance(node, kinds)]
    assert not [name for name in named if NUMBERED.search(name.lower())]


@pytest.mark.parametrize("name", ["utils", "file_utils", "common", "train_v2", "misc.old"])
def test_the_rule_sees(name):
    assert says_nothing(name)


@pytest.mark.parametrize("name", ["commonly", "utilisation", "mnist_v", "conv2d"])
def test_the_rule_lets_pass(name):
    assert not says_nothing(name)
