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
FOLDER_LIMITS = {"components": 20}
# Maximum number of lines per folder. The commit that raises a number says what was removed in
# return.
BUDGETS = {
    "components": 1788,
    "components/jobset": 283,
    "components/kubernetes": 5187,
    "components/records": 1340,
    "components/sweeps": 282,
    "components/tfjob": 231,
    "pipelines": 2185,
    "pipelines/cli": 4309,
    "pipelines/doctor": 1712,
    "pipelines/replay": 577,
    "pipelines/retention": 1011,
    "pipelines/runs": 4914,
    "pipelines/sweeps": 706,
    "trainer": 211,
    "trainer/baselines": 930,
    "trainer/checkpoints": 2828,
    "trainer/cluster": 2565,
    "trainer/code": 454,
    "trainer/config": 3491,
    "trainer/data": 10942,
    "trainer/data_gate": 2002,
    "trainer/embeddings": 2068,
    "trainer/evaluation": 3172,
    "trainer/events": 1175,
    "trainer/export": 1009,
    "trainer/features": 1944,
    "trainer/models": 2259,
    "trainer/optimizers": 583,
    "trainer/prediction": 1265,
    "trainer/preflight": 1042,
    "trainer/program": 2328,
    "trainer/promotion": 1593,
    "trainer/report": 2064,
    "trainer/runtime": 1553,
    "trainer/signing": 332,
    "trainer/storage": 3578,
    "trainer/strategies": 3730,
    "trainer/sweeps": 1107,
    "trainer/tasks": 5405,
    "trainer/telemetry": 690,
    "trainer/tracking": 1915,
    "trainer/training": 2684,
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
