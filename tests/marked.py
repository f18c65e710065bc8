"""Finds the test files that may have tests for `-m` from their source, without importing them."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, combinations

from _pytest.mark.expression import Expression

_MARK = re.compile(r"\bmark\.(\w+)")


def may_match(text: str, expression: str) -> bool:
    """Return whether a file has a test that `-m` may select.

    A marker of a parameter or in a variable may belong to any test of the file.
    """
    asked = set(re.findall(r"\w+", expression))
    if not asked.intersection(_MARK.findall(text)):
        return _holds(expression, set())
    tree = ast.parse(text)
    tests = list(_tests(tree))
    placed = {id(node): _name(node) for _, nodes in tests for node in nodes}
    loose = asked.intersection(Counter(_MARK.findall(text)) - Counter(placed.values()))
    subsets = [*chain(*(combinations(sorted(loose), size) for size in range(len(loose) + 1)))]
    return any(_holds(expression, own.union(more)) for own, _ in tests for more in subsets)


def _holds(expression: str, marks: set[str]) -> bool:
    return not expression or Expression.compile(expression).evaluate(
        lambda name, **_: name in marks
    )


def _tests(
    tree: ast.Module | ast.ClassDef, outer: tuple[ast.expr, ...] = ()
) -> Iterator[tuple[set[str], tuple[ast.expr, ...]]]:
    """Yield the markers of each test, as names and as nodes."""
    own = (*outer, *_assigned(tree))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _tests(node, (*own, *_given(node.decorator_list)))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            nodes = (*own, *_given(node.decorator_list))
            yield {_name(each) for each in nodes}, nodes


def _assigned(tree: ast.Module | ast.ClassDef) -> list[ast.expr]:
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name) and target.id == "pytestmark":
            return _given(value.elts if isinstance(value, ast.List | ast.Tuple) else [value])
    return []


def _given(marks: list[ast.expr]) -> list[ast.expr]:
    found = [each.func if isinstance(each, ast.Call) else each for each in marks]
    return [each for each in found if _name(each)]


def _name(node: ast.AST) -> str:
    """Return the name of `pytest.mark.NAME`, or an empty string for any other node."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
        return node.attr if node.value.attr == "mark" else ""
    return ""
