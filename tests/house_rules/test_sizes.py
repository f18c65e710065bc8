"""Limits on the lines of each folder and function, and on the number of files in a folder."""

import ast
from collections import Counter

from tests.house_rules.source import (
    PACKAGES,
    importers,
    module_name,
    python_files,
    source_modules,
    text,
    tree,
)

FUNCTION_LIMIT = 50
SMALL_FILE = 60
FOLDER_LIMIT = 15
# Maximum number of lines per folder. The commit that raises a number says what was removed in
# return.
BUDGETS = {
    "components": 2007,
    "components/kubernetes": 5332,
    "components/records": 1319,
    "pipelines": 2349,
    "pipelines/cli": 3760,
    "pipelines/doctor": 1632,
    "pipelines/retention": 1011,
    "pipelines/runs": 5125,
    "pipelines/sweeps": 693,
    "trainer": 210,
    "trainer/baselines": 857,
    "trainer/checkpoints": 2732,
    "trainer/cluster": 2521,
    "trainer/code": 425,
    "trainer/config": 3345,
    "trainer/data": 10757,
    "trainer/data_gate": 1911,
    "trainer/embeddings": 1943,
    "trainer/evaluation": 2953,
    "trainer/events": 1140,
    "trainer/export": 909,
    "trainer/features": 1888,
    "trainer/models": 2169,
    "trainer/optimizers": 535,
    "trainer/prediction": 1172,
    "trainer/preflight": 1053,
    "trainer/program": 2237,
    "trainer/promotion": 1542,
    "trainer/report": 1981,
    "trainer/runtime": 1527,
    "trainer/signing": 316,
    "trainer/storage": 3373,
    "trainer/strategies": 3645,
    "trainer/sweeps": 1079,
    "trainer/tasks": 5190,
    "trainer/telemetry": 644,
    "trainer/tracking": 1856,
    "trainer/training": 2623,
}

# Small files that only one module imports, with the reason for each.
ALONE = {
    "trainer/export/smoke_request.py": "a program that imports nothing of this project",
}


def long_functions():
    for path in python_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines >= FUNCTION_LIMIT:
                    yield f"{path}:{node.lineno}: {node.name} has {lines} lines"


def rooms():
    """Return the number of lines in each folder of a package, including its subfolders."""
    lines = Counter[str]()
    for path in python_files(*PACKAGES):
        lines["/".join(path.parts[:2] if len(path.parts) > 2 else path.parts[:1])] += len(
            text(path).splitlines()
        )
    return lines


def over_budget():
    lines = rooms()
    for room in sorted(lines.keys() | BUDGETS.keys()):
        if room not in lines or room not in BUDGETS:
            yield f"BUDGETS: {room} is a room without a budget, or a budget without a room"
        elif lines[room] > BUDGETS[room]:
            yield f"{room}: {lines[room]} lines, at most {BUDGETS[room]}: what can go?"


def full_folders():
    for folder, count in Counter(str(path.parent) for path in source_modules()).items():
        if count > FOLDER_LIMIT:
            yield f"{folder}: {count} modules"


def crumbs():
    importers_of = importers()
    small = {
        str(path)
        for path in source_modules()
        if len(text(path).splitlines()) < SMALL_FILE and len(importers_of[module_name(path)]) <= 1
    }
    for path in sorted(small - ALONE.keys()):
        yield f"{path}: below {SMALL_FILE} lines with one importer: merge them, or say why in ALONE"
    for path in sorted(ALONE.keys() - small):
        yield f"ALONE: {path} is no small file with one importer any more"


def test_rooms_functions_and_folders_are_small():
    offenders = [
        *long_functions(),
        *full_folders(),
        *over_budget(),
        *crumbs(),
    ]
    assert not offenders, "\n".join(offenders)
