"""What has to start in milliseconds loads no TensorFlow, not even through others."""

import json
import subprocess
import sys

import pytest

from tests.house_rules.source import (
    ROOT,
    all_imports,
    imports_on_load,
    module_name,
    project,
    python_files,
    tree,
)

HEAVY = {"tensorflow", "keras", "tensorflow_datasets", "sklearn", "matplotlib"}
FREE = (
    "trainer.promotion.consensus",
    "trainer.checkpoints.index",
    "trainer.training.task",
    "trainer.topology",
    "trainer.config.schema",
    "trainer.config.schema",
    "trainer.config.load",
    "trainer.cluster.process",
    "trainer.data.key",
    "trainer.errors",
    "trainer.cluster.supervisor",
    "trainer.events",
    "trainer.promotion.gate",
    "trainer.config.schema",
    "trainer.cluster.process",
    "trainer.cluster.liveness",
    "trainer.cluster.signals",
    "trainer.checkpoints.index",
    "trainer.promotion.kserve",
    "trainer.config.kubernetes",
    "trainer.cluster.termination",
    "trainer.cluster.launcher",
    "trainer.promotion.lineage",
    "trainer.cluster.local",
    "trainer.cluster.local",
    "trainer.cluster.lease",
    "trainer.cluster.lease",
    "trainer.cluster.lease",
    "trainer.config.run_parameters",
    "trainer.cluster.signals",
    "trainer.cluster.liveness",
    "trainer.promotion.registration",
    "trainer.promotion.registry",
    "trainer.report.report",
    "trainer.report.views",
    "trainer.promotion.registry",
    "trainer.config.schedule",
    "trainer.config.base",
    "trainer.cluster.supervisor",
    "trainer.storage",
    "trainer.report.summary",
    "trainer.cluster.supervisor",
    "trainer.cluster.process",
    "trainer.topology",
    "trainer.checkpoints.index",
)
CONTRACT = "What starts in milliseconds is free of TensorFlow"
LIST_LOADED = (
    "import importlib, json, sys; importlib.import_module(sys.argv[1]); "
    "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
)


def is_free(name):
    return any(f"{name}.".startswith(f"{free}.") for free in FREE)


PATHS = [path for path in python_files("trainer") if is_free(module_name(path))]
MODULES = [module_name(path) for path in PATHS]
PIPELINES = python_files("pipelines")
COMMAND_LINE = [name for name in map(module_name, PIPELINES) if name == "pipelines.cli.__main__"]


@pytest.mark.parametrize("path", [*PATHS, *PIPELINES, *python_files("components")], ids=str)
def test_no_heavy_import_at_module_level(path):
    assert not HEAVY & {name.partition(".")[0] for name in imports_on_load(tree(path))}


@pytest.mark.parametrize("name", [*MODULES, *COMMAND_LINE])
def test_loading_it_loads_nothing_heavy(name):
    command = [sys.executable, "-c", LIST_LOADED, name]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert not HEAVY & set(json.loads(result.stdout))


@pytest.mark.parametrize("path", PIPELINES, ids=str)
def test_pipelines_import_only_free_modules_of_the_trainer(path):
    names = [name for name in all_imports(tree(path)) if name.startswith("trainer.")]
    assert not [name for name in names if not is_free(name)]


def test_the_import_contract_lists_every_free_module():
    contracts = project()["tool"]["importlinter"]["contracts"]
    listed = next(c["source_modules"] for c in contracts if c["name"] == CONTRACT)
    present = [name for name in FREE if name in MODULES]
    assert sorted(listed) == present, f"pyproject.toml, contract {CONTRACT!r}"
