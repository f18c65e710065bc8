"""A component file is read by KFP, and starts without TensorFlow."""

import ast
import sys

import pytest

from tests.house_rules.source import imports_on_load, python_files, tree
from tests.house_rules.test_tensorflow_free import is_free


def is_component(path):
    """Tell a file with a KFP component from plain code."""
    source = tree(path)
    decorators = [
        ast.unparse(decorator)
        for function in ast.walk(source)
        if isinstance(function, ast.FunctionDef)
        for decorator in function.decorator_list
    ]
    return any("component" in name for name in decorators)


COMPONENTS = [path for path in python_files("components") if is_component(path)]


def is_allowed(name):
    top = name.partition(".")[0]
    return top in {"kfp", "components", *sys.stdlib_module_names} or is_free(name)


@pytest.mark.parametrize("path", COMPONENTS, ids=str)
def test_a_component_file_imports_little_at_module_level(path):
    bad = [name for name in imports_on_load(tree(path)) if not is_allowed(name)]
    assert not bad, f"{path}: only kfp, the standard library and what is free of TensorFlow: {bad}"


@pytest.mark.parametrize("path", COMPONENTS, ids=str)
def test_annotations_are_real(path):
    # KFP reads the annotations of a component, and refuses them as text.
    assert "__future__.annotations" not in imports_on_load(tree(path))
