"""One concept, one file, in a folder that one look takes in."""

import ast
from collections import Counter, defaultdict

from tests.house_rules.source import (
    importers,
    module_name,
    python_files,
    source_modules,
    text,
    tree,
)

FILE_LIMIT = 450
FUNCTION_LIMIT = 50
SMALL_FILE = 60
MODULE_LIMIT = 397
FOLDER_LIMIT = 15
FOLDER_LIMITS = {"components": 20}

# The role that all modules of one name play.
SAME_ROLE = {
    "child.py": "what a process of its own does for the command line",
    "plan.py": "what is going to be done, as a value, before anything is",
    "base.py": "what the other modules of its room are made of",
    "__main__.py": "what `python -m` runs",
    "engine.py": "one kind of jobs; that of all engines is their interface",
    "errors.py": "the errors of its package",
    "launcher.py": "starts a job and waits for its end; the trainer's is the local contract",
    "local.py": "the implementation on this machine of what its room does",
    "manifest.py": "the document that describes the whole",
    "models.py": "the command, and what it calls",
    "predict.py": "the command, its process, and what that calls",
    "registry.py": "what each name means",
    "retry.py": "which failures of its API are tried again",
    "spec.py": "the frozen description that its room works from",
    "supervisor.py": "watches a cluster and decides about restarts",
}
# Small files with one importer, and why they are files.
ALONE = {
    "pipelines/doctor/fit.py": "the one check that takes seconds, which tests replace",
    "trainer/cluster/rejoin.py": "settings of gRPC, which have nothing to do with a role",
    "trainer/export/smoke_request.py": "a program that imports nothing of this project",
    "trainer/data/embedded/digits.py": "a TFDS builder, which TFDS imports by name",
}


def long_files():
    for path in python_files():
        lines = len(text(path).splitlines())
        if lines >= FILE_LIMIT:
            yield f"{path}: {lines} lines; below {FILE_LIMIT}"


def long_functions():
    for path in python_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines >= FUNCTION_LIMIT:
                    yield f"{path}:{node.lineno}: {node.name} has {lines} lines"


def full_folders():
    modules = source_modules()
    if len(modules) > MODULE_LIMIT:
        yield f"{len(modules)} source modules; at most {MODULE_LIMIT}"
    for folder, count in Counter(str(path.parent) for path in modules).items():
        if count > FOLDER_LIMITS.get(folder, FOLDER_LIMIT):
            yield f"{folder}: {count} modules"


def names_for_two_things():
    named = defaultdict(list)
    for path in source_modules():
        named[path.name].append(str(path))
    several = {name: paths for name, paths in named.items() if len(paths) > 1}
    for name in several.keys() - SAME_ROLE.keys():
        yield f"{' and '.join(several[name])}: one name for two things"
    for name in SAME_ROLE.keys() - several.keys():
        yield f"SAME_ROLE: {name} is the name of one module now"


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


def test_files_functions_and_folders_are_small():
    offenders = [
        *long_files(),
        *long_functions(),
        *full_folders(),
        *names_for_two_things(),
        *crumbs(),
    ]
    assert not offenders, "\n".join(offenders)
