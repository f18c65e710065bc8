import ast

import pytest

from tests.house_rules.source import python_files, text, tree

FILE_LIMIT = 300
FUNCTION_LIMIT = 50


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_a_file_is_short(path):
    lines = len(text(path).splitlines())
    assert lines < FILE_LIMIT, f"{path} has {lines} lines; one concept a file, below {FILE_LIMIT}"


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_functions_are_short(path):
    long = {
        f"{path}:{node.lineno} {node.name}": lines
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) >= FUNCTION_LIMIT
    }
    assert not long, f"functions stay below {FUNCTION_LIMIT} lines: {long}"
