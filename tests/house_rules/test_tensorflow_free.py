"""Modules that must load in milliseconds do not import TensorFlow, even indirectly."""

import json
import subprocess
import sys

from tests.house_rules.source import (
    PACKAGES,
    ROOT,
    all_imports,
    is_within,
    module_name,
    python_files,
    tensorflow_free,
    tree,
)

HEAVY = {"tensorflow", "keras", "tensorflow_datasets", "sklearn", "matplotlib"}
# The import contract cannot cover these modules, because they import heavy modules when called.
ENTRIES = ("flotilla.trainer.__main__", "flotilla.trainer.training.task")
LOAD = """
import importlib, json, sys
heavy, names = json.load(sys.stdin)
found, seen = [], set()
for name in names:
    importlib.import_module(name)
    new = {each for each in heavy if each in sys.modules} - seen
    seen |= new
    found += [f"{name}: loads {each}" for each in sorted(new)]
print(json.dumps(found))
"""


def heavy_loads(names):
    """Load modules in one process; name the first one that loads each heavy package."""
    result = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=ROOT,
        input=json.dumps([sorted(HEAVY), names]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def trainer_of_pipelines():
    for path in python_files("pipelines"):
        for name in all_imports(tree(path)):
            if is_within(name, "flotilla.trainer") and not is_within(
                name, *tensorflow_free(), *ENTRIES
            ):
                yield f"{path}: imports {name}, which is in no room free of TensorFlow"


def test_what_starts_in_milliseconds_loads_no_tensorflow():
    free = ("flotilla.components", "flotilla.pipelines", *tensorflow_free(), *ENTRIES)
    names = [name for name in map(module_name, python_files(*PACKAGES)) if is_within(name, *free)]
    unknown = [room for room in free if not any(is_within(name, room) for name in names)]
    assert not unknown, f"pyproject.toml names rooms that are not there: {unknown}"
    offenders = [*heavy_loads(names), *trainer_of_pipelines()]
    assert not offenders, "\n".join(offenders)
