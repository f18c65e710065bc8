"""Tests the import of TensorFlow and Keras, and which lines of libraries are noise."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.trainer.runtime import tensorflow_import

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


# Output of TensorFlow 2.21 and Keras.
START = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795902305.459360   27264 port.cc:153] oneDNN custom operations are on.
I0000 00:00:1795902305.460269   27264 cudart_stub.cc:31] Could not find cuda drivers on your machine
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with flags.
E0000 00:00:1795902307.721074   27273 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA
2024-05-01 10:00:00.123456: I tensorflow/core/util/port.cc:113] oneDNN custom operations are on.
2024-05-01 10:00:00.123456: E external/local_xla/xla/cuda_dnn.cc:9] Unable to register cuDNN factory
2024-05-01 10:00:00.123456: W tensorflow/compiler/tf2tensorrt/x.cc:38] TF-TRT Warning: Could not \
find TensorRT
INFO:tensorflow:Assets written to: /tmp/x/assets
Sharding callback duration: 14 microseconds
Dl Completed...:  50%|#####     | 1/2 [00:00<00:00,  9.2 url/s]
"""
SAID = """\
E0000 00:00:1795902307.721074   27273 collective.cc:52] the peer worker-1 is gone
W0000 00:00:1795902307.721074   27273 cpu_allocator.cc:82] exceeds 10% of free system memory
F0000 00:00:1795902307.721074   27273 cpu_feature_guard.cc:37] AVX is not available
WARNING:tensorflow:5 out of the last 5 calls triggered tf.function retracing
Epoch 1: loss 0.5
"""


@pytest.mark.parametrize("line", START.splitlines())
def test_what_libraries_write_at_their_start_is_noise(line):
    assert tensorflow_import.is_noise(line)


@pytest.mark.parametrize("line", SAID.splitlines())
def test_errors_warnings_and_prints_are_none(line):
    assert not tensorflow_import.is_noise(line)


def test_each_pattern_has_its_source():
    assert all(source and pattern for source, pattern in tensorflow_import.TABLE)


FILTERED = """
import os, sys
from flotilla.trainer.runtime import tensorflow_import
with tensorflow_import.filter_output():
    os.write(2, b"INFO:tensorflow:Assets written to: x\\n")
    os.write(2, b"a word\\n")
    if sys.argv[1:]:
        os.abort()
os.write(2, b"INFO:tensorflow:Assets written to: y\\n")
"""


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", FILTERED, *arguments],
        capture_output=True, check=False, env={**os.environ, "PYTHONFAULTHANDLER": ""},
    )  # fmt: skip


def test_noise_is_left_out_of_standard_error_in_the_block():
    assert run().stderr == b"a word\nINFO:tensorflow:Assets written to: y\n"
    # What a library prints when it ends the process comes through.
    done = run("abort")
    assert done.returncode < 0
    assert done.stderr == b"a word\n"


def test_a_logger_is_quiet(caplog):
    logger = logging.getLogger("noisy")
    logger.addFilter(tensorflow_import.QUIET)
    logger.warning("Assets written to: %s", "x")
    logger.warning("a word")
    assert [each.getMessage() for each in caplog.records] == ["a word"]
