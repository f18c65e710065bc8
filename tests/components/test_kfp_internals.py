"""Tests that each private name of the KFP SDK still exists and is used in only one file."""

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from flotilla.components import image, kfp_internals
from flotilla.components.train_model import train_model
from tests.house_rules.source import python_files, text, tree

# Modules that are documented at https://kubeflow-pipelines.readthedocs.io.
PUBLIC = {"kfp", "kfp.client", "kfp.compiler", "kfp.dsl", "kfp.kubernetes", "kfp.local"}
#: Undocumented names that Flotilla uses, each with the feature that would break without it.
PRIVATE = {
    "_KFP_RUNTIME": "the quick start of a local run, and the import of components by a step",
    "kfp.dsl.executor_main": "forked steps: how a step is told from another command",
    "kfp.dsl.executor": "forked steps: loaded before the fork",
    "kfp.dsl.kfp_config": "forked steps: loaded before the fork",
    "kfp.dsl.utils": "forked steps: loaded before the fork",
    "subprocess_task_handler": "forked steps: its `run_local_subprocess` starts a step",
    "run_local_subprocess": "forked steps",
    "--function_to_execute": "forked steps: which component a command runs",
    "--component_module_path": "forked steps: the file of the component",
    "component_spec": "the mark of the version that compiled a pipeline",
    "_load_config": "requests of the client with limits, retries and fresh tokens",
    "_load_context_setting_or_default": "a client that writes nothing into the home folder",
    "_context_setting": "the same",
    "_healthz_api": "the sender of the client's requests",
}
FILE = Path("components/kfp_internals.py")
# This file contains the log lines of KFP's executor that `flotilla logs` hides.
OF_LOGS = Path("pipelines/runs/log_view.py")


def used_in(path):
    # Look for the plain text first, because a regular expression takes much longer.
    found = (name for name in PRIVATE if name in text(path))
    return {name for name in found if re.search(rf"(?<![\w-]){re.escape(name)}\b", text(path))}


def test_the_names_are_in_one_file():
    others = set(python_files("trainer", "components", "pipelines")) - {OF_LOGS, FILE}
    assert {path: used for path in others if (used := used_in(path))} == {}
    assert used_in(FILE) == set(PRIVATE)


def test_elsewhere_kfp_is_imported_by_documented_names():
    for path in set(python_files("trainer", "components", "pipelines")) - {FILE}:
        for node in ast.walk(tree(path)) if "kfp" in text(path) else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kfp":
                names = {f"{node.module}.{each.name}" for each in node.names}
                assert names <= PUBLIC or node.module in PUBLIC - {"kfp"}, path
            elif isinstance(node, ast.Import):
                names = {each.name for each in node.names if each.name.split(".")[0] == "kfp"}
                assert names <= PUBLIC, path


def test_a_step_is_started_by_the_function_that_is_replaced():
    handler = import_module("kfp.local.subprocess_task_handler")
    assert list(inspect.signature(handler.run_local_subprocess).parameters) == [
        "full_command",
        "env_vars",
    ]
    assert "run_local_subprocess(" in inspect.getsource(handler.SubprocessTaskHandler.run)


def test_the_command_of_a_component_has_its_parts_where_they_are_looked_for():
    container = train_model.component_spec.implementation.container
    found = kfp_internals.parse_command([*container.command, *container.args])
    assert (found.name, "def train_model(" in found.source) == ("train_model", True)
    command = found.with_source(Path("/a/b.py"))
    assert command[2:5] == ["kfp.dsl.executor_main", "--component_module_path", "/a/b.py"]
    assert list(found.arguments) == command[5:]
    shell = next(each for each in container.command if "kfp.dsl.executor_main" in each)
    assert "--component_module_path" in shell
    assert kfp_internals.parse_command(["sh", "-c", "echo", "a", "b", "c"]) is None
    assert kfp_internals.parse_command(["sh"]) is None


def test_a_component_takes_more_arguments():
    taken = image.component(_step)
    before = list(taken.component_spec.implementation.container.args)
    kfp_internals.add_arguments(taken, ["--a", "b"])
    assert taken.component_spec.implementation.container.args == [*before, "--a", "b"]
    kfp_internals.add_arguments(_step, ["--a"])


def _step(number: int) -> None:
    """Do nothing."""


@pytest.mark.parametrize("module", kfp_internals.EXECUTOR_MODULES)
def test_the_modules_of_a_step_are_there(module):
    assert import_module(module)


def test_kfp_is_imported_without_its_client():
    program = (
        "import sys; from flotilla.components.kfp_internals import *; load_without_client();"
        "from kfp import dsl;"
        "print('kfp' in sys.modules, 'kfp.client' in sys.modules, 'kubernetes' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    environment = {k: v for k, v in os.environ.items() if k != kfp_internals.RUNTIME}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "True False False\n"


def test_a_running_step_gets_the_function():
    program = (
        "from flotilla.components.image import component\ndef f(): pass\nprint(component(f) is f)"
    )
    environment = {**os.environ, kfp_internals.RUNTIME: "true"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"


def test_the_client_has_the_methods_that_are_replaced(tmp_path, monkeypatch):
    kfp = import_module("kfp.client")
    for name in ("_load_config", "_load_context_setting_or_default", "set_user_namespace"):
        assert callable(getattr(kfp.Client, name)), name
    source = inspect.getsource(kfp.Client)
    assert "self._context_setting" in source
    assert "self._healthz_api" in source

    class Small(kfp_internals.make_client_type()):
        def make_configuration(self):
            return import_module("kfp_server_api").Configuration(host="http://127.0.0.1:9")

    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.warns() if _warns(kfp) else monkeypatch.context():
        client = Small(host="http://127.0.0.1:9")
    client.set_user_namespace("team-a")
    assert client.get_user_namespace() == "team-a"
    assert client.requests.configuration.host == "http://127.0.0.1:9"
    assert not list(tmp_path.iterdir())


def _warns(kfp):
    return "warnings.warn" in inspect.getsource(kfp.Client.__init__)
