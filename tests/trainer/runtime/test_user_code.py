"""Tests how the user's modules are found, and how their errors are described."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.runtime.user_code import find_place, find_traceback, format_error

LOADED = """
import json, sys
from flotilla.trainer.runtime import user_code
found = [user_code.import_module(name).NAME for name in sys.argv[1:]]
import queue
print(json.dumps([found, json.__file__, queue.__file__]))
"""


@pytest.fixture
def own(tmp_path):
    """Create a folder with modules named like Python's and folders named like Flotilla's."""
    for name in ("components", "trainer", "pipelines"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "models.py").write_text("from sibling import NAME")
    for name in ("json", "queue"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} of the user')")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "models.py").write_text("from sibling import NAME")
    (tmp_path / "sibling.py").write_text("NAME = 'found'")
    return tmp_path


@pytest.mark.parametrize("elsewhere", [False, True])
def test_modules_are_found_and_hide_nothing(own, elsewhere, tmp_path_factory):
    environment = {**os.environ, user_code.FOLDER_VARIABLE: str(own), "PYTHONSAFEPATH": "1"}
    names = ["package.models", "trainer.models", "components.models", "sibling"]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *names],
        cwd=tmp_path_factory.mktemp("elsewhere") if elsewhere else own,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, *others = json.loads(done.stdout)
    assert found == ["found"] * len(names)
    assert not any(path.startswith(str(own)) for path in others)


@pytest.mark.parametrize("given", ["", "/where/the/command/was/given"])
def test_a_child_of_a_child_keeps_the_folder_and_else_has_the_working_directory(
    monkeypatch, tmp_path, given
):
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, given)
    monkeypatch.chdir(tmp_path)
    assert user_code.folder() == (given or str(tmp_path))
    assert user_code.environment()[user_code.FOLDER_VARIABLE] == (given or str(tmp_path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flotilla.models", "Flotilla has a module with the name flotilla; rename your module"),
        ("queue", "Python has a module with the name queue; rename your module"),
        ("models", "put it in /own or on PYTHONPATH"),
        ("blocks", "install it, or put it in /own or on PYTHONPATH"),
    ],
)
def test_what_to_do_about_a_module_that_is_not_found(monkeypatch, name, expected):
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, "/own")
    error = ModuleNotFoundError("not found", name=name)
    monkeypatch.setattr(user_code, "import_module", Mock(side_effect=error))
    with pytest.raises(ConfigError) as caught:
        user_code.import_named("model x", "models")
    assert str(caught.value) == (
        f"model x: cannot import models: ModuleNotFoundError: not found; {expected}"
    )


def test_a_module_that_was_found_and_failed_is_not_sought_elsewhere(monkeypatch):
    error = ImportError("cannot import name 'block' from 'blocks'")
    monkeypatch.setattr(user_code, "import_module", Mock(side_effect=error))
    with pytest.raises(ConfigError) as caught:
        user_code.import_named("model x", "models")
    assert str(caught.value).endswith("ImportError: cannot import name 'block' from 'blocks'")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([str(Path(sys.executable).with_name("flotilla")), "--version"], "flotilla 0"),
        ([sys.executable, "-m", "flotilla.trainer", "--help"], "python -m flotilla.trainer"),
        ([sys.executable, "-m", "flotilla.components.kubernetes.pods.guard"], "guard: usage"),
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


MODULE = """
import json
import keras
import tensorflow as tf

def raises():
    raise ValueError("bad shape\\nand more")

def calls_a_library():
    json.loads("{")

def replaces():
    try:
        {}["key"]
    except KeyError:
        raise ValueError("no such key")

class Layer(keras.layers.Layer):
    def call(self, inputs, training=False):
        return self.doubled(inputs) if training else inputs

    def doubled(self, inputs):
        raise ValueError("bad shape")

@tf.function
def asserts(value):
    tf.debugging.assert_less(value, 0.0, message="too much")
    return value

@tf.function
def converted(value):
    if value > 0.0:
        raise ValueError("bad value")
    return value
"""


def line_with(text):
    return next(number for number, line in enumerate(MODULE.splitlines(), 1) if text in line)


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    (tmp_path / "blocks.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    yield user_code.import_module("blocks")
    del sys.modules["blocks"]


def raised(call, *arguments):
    """Return the exception that a call raises, as Flotilla's code would see it."""
    try:
        call(*arguments)
    except Exception as error:
        # Remove this test's own frame, which is not part of Flotilla.
        return error.with_traceback(error.__traceback__.tb_next)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("name", "said", "text"),
    [
        ("raises", "ValueError: bad shape", "bad shape\\nand"),
        ("calls_a_library", "JSONDecodeError: Expecting property name", 'json.loads("{")'),
        ("replaces", "ValueError: no such key", 'ValueError("no such key")'),
    ],
)
def test_the_innermost_frame_of_the_users_code_is_named(blocks, name, said, text):
    error = raised(getattr(blocks, name))
    assert format_error(error).startswith(said)
    assert find_place(error) == f"blocks.py:{line_with(text)}"
    assert format_error(error).endswith(f" (blocks.py:{line_with(text)})")
    assert "\n" not in format_error(error)
    assert f"in {name}" in find_traceback(error)


@pytest.mark.parametrize("graph", [False, True])
def test_a_layer_is_named_by_what_it_raised_and_not_by_keras(blocks, graph):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, blocks.Layer()(inputs))
    call = tf.function(model) if graph else model
    error = raised(lambda: call(np.ones((1, 2), np.float32), training=True))
    line = line_with("bad shape")
    line = next(n for n, each in enumerate(MODULE.splitlines(), 1) if n > line and "bad sh" in each)
    assert format_error(error) == f"ValueError: bad shape (blocks.py:{line})"


def test_a_node_of_a_graph_is_found_by_the_stack_in_the_text(blocks):
    blocks.asserts(tf.constant(-1.0))
    error = raised(blocks.asserts, tf.constant(1.0))
    assert find_place(error) == f"blocks.py:{line_with('assert_less')}"
    assert "too much" in format_error(error)
    assert "Graph execution error" not in format_error(error)


def test_the_file_that_kfp_makes_of_a_component_is_not_the_users(tmp_path):
    stack = f'  File "{tmp_path}/ephemeral_component.py", line 12, in evaluate_model\n'
    error = RuntimeError(f"Graph execution error:\n\nDetected at node Add\n{stack}\nbad shape")
    assert find_place(error) == ""
    assert find_traceback(error) == ""


def test_a_function_that_tensorflow_has_rewritten(blocks):
    error = raised(blocks.converted, 1.0)
    assert format_error(error) == f"ValueError: bad value (blocks.py:{line_with('bad value')})"


def test_a_module_that_is_no_python(tmp_path, monkeypatch):
    (tmp_path / "broken_blocks.py").write_text("x = 1\ndef model(spec:\n")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    error = raised(user_code.import_module, "broken_blocks")
    assert format_error(error) == "SyntaxError: '(' was never closed (broken_blocks.py:2)"


def test_a_module_elsewhere_is_named_by_its_whole_path(blocks, tmp_path, monkeypatch):
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, "/elsewhere")
    assert find_place(raised(blocks.raises)).startswith(f"{tmp_path}/blocks.py:")


def test_an_installed_package_of_the_users_is_theirs(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    (folder / "own_package").mkdir(parents=True)
    (folder / "own_package" / "__init__.py").write_text("def fail():\n    raise ValueError('no')\n")
    monkeypatch.syspath_prepend(folder)
    module = user_code.import_module("own_package")
    assert find_place(raised(module.fail)) == f"{folder}/own_package/__init__.py:2"
    monkeypatch.setattr(user_code, "_imported", set())
    assert find_place(raised(module.fail)) == ""


def test_a_module_of_python_that_a_configuration_names_is_not_the_users(blocks):
    user_code.import_module("json")
    error = raised(blocks.calls_a_library)
    assert find_place(error) == f"blocks.py:{line_with('json.loads')}"


def test_an_error_of_flotilla_or_a_library_has_no_place():
    error = raised(user_code.import_module, "no_such_package")
    assert format_error(error) == "ModuleNotFoundError: No module named 'no_such_package'"
    assert find_traceback(error) == ""


def test_a_users_error_shows_the_traceback_of_its_cause(blocks):
    cause = raised(blocks.raises)
    wrapped = ConfigError("model blocks:raises: bad shape")
    assert find_traceback(wrapped) == ""
    wrapped.__cause__ = cause
    assert find_traceback(wrapped) == find_traceback(cause) != ""
    # An error from another process carries its traceback as text.
    wrapped.traceback = "Traceback ..."
    assert find_traceback(wrapped) == "Traceback ..."


def test_a_long_traceback_keeps_its_head_and_its_end(blocks, monkeypatch):
    monkeypatch.setattr(user_code, "_MAX_TRACEBACK", 40)
    text = find_traceback(raised(blocks.raises))
    assert text.startswith("Traceback (most recent call last):\n  ...\n")
    assert text.endswith("bad shape\nand more\n")
    assert len(text) < 100


def test_a_frame_without_a_module_is_judged_by_its_file(monkeypatch):
    # A user has configured a model `:f`, with an empty module name.
    monkeypatch.setattr(user_code, "_imported", {""})
    assert not user_code.is_users_file("/usr/lib/python3/site-packages/keras/layer.py")
    assert user_code.is_users_file("/home/ann/net.py")
