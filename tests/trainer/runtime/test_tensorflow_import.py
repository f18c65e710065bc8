import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
PROGRAM = """
import json, sys
from types import ModuleType
from flotilla.trainer.runtime import tensorflow_import
tensorflow_import.prepare()
tensorflow_import.prepare()

def imports(importer, name):
    try:
        exec(f"import {name}", {"__name__": importer})
    except ModuleNotFoundError as error:
        return error.name
    return ""

found = [imports("keras.src.wrappers", "sklearn"), imports("keras.src.wrappers", "csv"),
         imports("keras_hub.models", "sklearn"), imports("mine", "sklearn")]
print(json.dumps(found))
"""


def test_keras_alone_finds_none_of_them():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True)
    assert json.loads(done.stdout) == ["sklearn", "", "", ""]


def imported(folder, program, *arguments, more="", **variables):
    """Run a program with a stand-in of TensorFlow, and return what it prints."""
    (folder / "tensorflow.py").write_text(f"import gc\nis_enabled = gc.isenabled()\n{more}\n")
    rest = {name: value for name, value in os.environ.items() if name != GROWTH}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**rest, **variables, "PYTHONPATH": f"{folder}:{Path.cwd()}"},
        check=True,
        capture_output=True,
    )
    return json.loads(done.stdout)


OF_TENSORFLOW = """
import gc, json, sys
from flotilla.trainer.runtime import tensorflow_import
if sys.argv[1] == "disabled":
    gc.disable()
tensorflow_import.prepare()
try:
    import tensorflow
    while_imported = tensorflow.is_enabled
except ValueError:
    while_imported = None
print(json.dumps([while_imported, gc.isenabled(), gc.get_freeze_count() > 0]))
"""


@pytest.mark.parametrize(
    ("before", "more", "expected"),
    [
        ("enabled", "", [False, True, True]),
        # The fork server disables garbage collection itself.
        ("disabled", "", [False, False, False]),
        ("enabled", "raise ValueError", [None, True, False]),
    ],
)
def test_nothing_is_collected_while_tensorflow_is_imported(tmp_path, before, more, expected):
    assert imported(tmp_path, OF_TENSORFLOW, before, more=more) == expected


HOOKED = """
import gc, json, os, sys, wrapt
from flotilla.trainer.runtime import tensorflow_import
called = []
wrapt.register_post_import_hook(lambda module: called.append(module.__name__), "tensorflow")
tensorflow_import.prepare()
import tensorflow
growth = os.environ["TF_FORCE_GPU_ALLOW_GROWTH"]
print(json.dumps([called, tensorflow.is_enabled, gc.isenabled(), growth]))
"""


@pytest.mark.parametrize(("before", "expected"), [({}, "true"), ({GROWTH: "false"}, "false")])
def test_the_import_calls_who_asks_and_takes_what_it_needs_of_a_gpu(tmp_path, before, expected):
    assert imported(tmp_path, HOOKED, **before) == [["tensorflow"], False, True, expected]
