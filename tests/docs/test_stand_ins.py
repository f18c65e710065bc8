"""The tables of what the stand-ins do: each row names a test that is there."""

import ast
import re
from pathlib import Path

import pytest

FOLDERS = ("kfp_instance", "kubernetes")
TESTS = Path(__file__).parents[1]


def rows_of(folder):
    """Return the cells of each row of the tables, without their heads."""
    lines = (TESTS / folder / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [
        line
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("| ") and not after.startswith("|---")
    ]
    return [re.split(r"(?<!\\)\|", line.strip("| ")) for line in rows]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_row_names_a_test_of_the_stand_in(folder):
    rows = rows_of(folder)
    assert len(rows) > 10
    for cells in rows:
        assert len(cells) == 3, cells
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cells[2])
        assert named, cells
        for file, test in named:
            tree = ast.parse((TESTS / folder / file).read_text(encoding="utf-8"))
            functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert test in functions, f"{folder}/README.md names {file}::{test}, which is not there"
