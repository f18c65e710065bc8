"""The user's folder is the last place that is looked into, in this process and in its children."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from trainer import user_code
from trainer.errors import ConfigError

LOADED = """
import json, sys
from trainer import user_code
module = user_code.import_module(sys.argv[1])
import components, queue
print(json.dumps([module.NAME, components.__file__, queue.__file__]))
"""


@pytest.fixture
def own(tmp_path):
    """A folder of the user's that has modules of Flotilla's and of Python's names."""
    for name in ("components", "trainer", "pipelines"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('{name} of the user')")
    for name in ("json", "queue"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} of the user')")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "models.py").write_text("from sibling import NAME")
    (tmp_path / "sibling.py").write_text("NAME = 'found'")
    return tmp_path


def loaded(name, folder, cwd, *python):
    environment = {**os.environ, user_code.FOLDER_VARIABLE: str(folder), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *python, "-c", LOADED, name]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["sibling", "package.models"])
def test_a_module_is_found_and_hides_nothing(own, name):
    process = loaded(name, own, own)
    assert process.returncode == 0, process.stderr
    found, *others = json.loads(process.stdout)
    assert found == "found"
    assert not any(path.startswith(str(own)) for path in others)


def test_it_is_found_from_another_working_directory(own, tmp_path_factory):
    process = loaded("sibling", own, tmp_path_factory.mktemp("elsewhere"))
    assert json.loads(process.stdout)[0] == "found", process.stderr


def test_a_module_that_is_nowhere(own):
    process = loaded("nowhere.models", own, own)
    assert "No module named 'nowhere'" in process.stderr


def test_without_a_variable_it_is_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.delenv(user_code.FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert user_code.folder() == str(tmp_path)
    assert user_code.environment()[user_code.FOLDER_VARIABLE] == str(tmp_path)


def test_a_child_of_a_child_keeps_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, "/where/the/command/was/given")
    monkeypatch.chdir(tmp_path)
    assert user_code.environment()[user_code.FOLDER_VARIABLE] == "/where/the/command/was/given"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("components.models", "components is a name of Flotilla itself; rename yours"),
        ("queue", "queue is a name of Python itself; rename yours"),
        ("blocks", "it has to be in /own or on PYTHONPATH"),
    ],
)
def test_what_to_do_about_a_module_that_is_not_found(monkeypatch, name, expected):
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, "/own")
    error = ModuleNotFoundError("not found", name=name)
    monkeypatch.setattr(user_code, "import_module", Mock(side_effect=error))
    with pytest.raises(ConfigError) as caught:
        user_code.import_for("model x", "models")
    assert str(caught.value) == (
        f"model x: cannot import models: ModuleNotFoundError: not found; {expected}"
    )


def test_a_module_that_was_found_and_failed_is_not_sought_elsewhere(monkeypatch):
    error = ImportError("cannot import name 'block' from 'blocks'")
    monkeypatch.setattr(user_code, "import_module", Mock(side_effect=error))
    with pytest.raises(ConfigError) as caught:
        user_code.import_for("model x", "models")
    assert str(caught.value).endswith("ImportError: cannot import name 'block' from 'blocks'")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([str(Path(sys.executable).with_name("flotilla")), "--version"], "flotilla 0"),
        ([sys.executable, "-m", "pipelines.cli", "--version"], "flotilla 0"),
        ([sys.executable, "-m", "trainer", "--help"], "python -m trainer"),
        ([sys.executable, "-m", "components.kubernetes.pods.guard"], "guard: usage"),
        ([sys.executable, "-P", "-m", "kfp.dsl.executor_main", "--help"], "executor_input"),
    ],
)
def test_the_working_folder_shadows_nothing(tmp_path, command, said):
    modules = ["json", "yaml", "logging", "kfp", "tensorflow", "sitecustomize", "usercustomize"]
    for name in [*modules, "queue", "types", "typer", "pydantic", "signal"]:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} of the user')")
    for name in ("numpy", "google", "keras"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('{name} of the user')")
    (tmp_path / ".env").write_text("PYTHONPATH=.\n")
    (tmp_path / "pyproject.toml").write_text("[broken")
    hidden = ("PYTHONPATH", "PYTHONSAFEPATH")
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in done.stdout + done.stderr
    assert "of the user" not in done.stderr
