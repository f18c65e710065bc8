"""KFP copies only the source of a component, so its body must import everything it needs."""

import ast
import sys

from tests.house_rules.source import (
    imports_on_load,
    is_within,
    python_files,
    tensorflow_free,
    tree,
)


def is_component(path):
    decorators = [
        ast.unparse(decorator)
        for function in ast.walk(tree(path))
        if isinstance(function, ast.FunctionDef)
        for decorator in function.decorator_list
    ]
    return any("component" in name for name in decorators)


def is_light(name):
    top = name.partition(".")[0]
    if top in {"kfp", *sys.stdlib_module_names}:
        return True
    return is_within(name, "flotilla.components", *tensorflow_free())


def test_a_component_imports_little_on_load_and_has_real_annotations():
    components = [path for path in python_files("components") if is_component(path)]
    assert components
    offenders = [
        f"{path}: imports {name} at module level; only kfp, the standard library, components "
        "and rooms free of TensorFlow"
        for path in components
        for name in imports_on_load(tree(path))
        if not is_light(name)
    ]
    offenders += [
        f"{path}: KFP refuses annotations as text: remove `from __future__ import annotations`"
        for path in components
        if "__future__.annotations" in imports_on_load(tree(path))
    ]
    assert not offenders, "\n".join(offenders)
