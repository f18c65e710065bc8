"""A room has a budget of lines, a function fits a screen, and a folder holds few files."""

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
FOLDER_LIMITS = {"components": 20}
# Lines that a room may have. A room that wants more says in its decision page what left it.
BUDGETS = {
    "components": 1997,
    "components/jobset": 301,
    "components/kubernetes": 4549,
    "components/records": 1187,
    "components/sweeps": 319,
    "components/tfjob": 218,
    "pipelines": 1845,
    "pipelines/cli": 2777,
    "pipelines/doctor": 2509,
    "pipelines/replay": 1037,
    "pipelines/retention": 963,
    "pipelines/runs": 3742,
    "pipelines/sweeps": 526,
    "trainer": 1963,
    "trainer/checkpoints": 3753,
    "trainer/cluster": 2903,
    "trainer/code": 600,
    "trainer/config": 2196,
    "trainer/data": 8781,
    "trainer/data_gate": 1594,
    "trainer/evaluation": 1336,
    "trainer/export": 978,
    "trainer/models": 2471,
    "trainer/monitoring": 523,
    "trainer/prediction": 1330,
    "trainer/promotion": 1306,
    "trainer/report": 1433,
    "trainer/signing": 268,
    "trainer/statistics": 902,
    "trainer/storage": 3622,
    "trainer/strategies": 6365,
    "trainer/sweeps": 862,
    "trainer/tasks": 3826,
    "trainer/tensorboard": 227,
    "trainer/tracking": 1009,
    "trainer/training": 3101,
}

# Small files with one importer, and why they are files.
ALONE = {
    "trainer/cluster/rejoin.py": "settings of gRPC, which have nothing to do with a role",
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
    """Return the lines of each room: a folder of a package, with the folders in it."""
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
        if count > FOLDER_LIMITS.get(folder, FOLDER_LIMIT):
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
