"""KFP copies the source of a component: what it needs has to be imported in its body."""

import ast
import sys

import pytest

from tests.house_rules.source import imports_on_load, python_files, tree


def is_component(path):
    """Tell a file with a KFP component, and the one that they import, from plain code beside it."""
    source = tree(path)
    decorators = [
        ast.unparse(decorator)
        for function in ast.walk(source)
        if isinstance(function, ast.FunctionDef)
        for decorator in function.decorator_list
    ]
    return path.name == "image.py" or any("component" in name for name in decorators)


COMPONENTS = [path for path in python_files("components") if is_component(path)]


def is_allowed(name):
    top = name.partition(".")[0]
    if top in {"kfp", *sys.stdlib_module_names}:
        return True
    return f"{name}.".startswith("components.image.")


@pytest.mark.parametrize("path", COMPONENTS, ids=str)
def test_a_component_file_imports_little_at_module_level(path):
    bad = [name for name in imports_on_load(tree(path)) if not is_allowed(name)]
    assert not bad, f"{path}: only kfp, the standard library and components.image: {bad}"


@pytest.mark.parametrize("path", COMPONENTS, ids=str)
def test_annotations_are_real(path):
    # KFP reads the annotations of a component, and refuses them as text.
    assert "__future__.annotations" not in imports_on_load(tree(path))
