"""What is loaded for what: no TFDS in a cluster's task, no TensorFlow for a reused dataset."""

import json
import subprocess
import sys

import pytest

from trainer import storage

LOADED = "import json, sys; print(json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))"


def loaded_by(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{LOADED}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_reading_needs_no_tfds():
    loaded = loaded_by("import trainer.data.read")
    assert "tensorflow" in loaded
    assert "tensorflow_datasets" not in loaded


@pytest.mark.parametrize(
    "module", ["trainer.data", "trainer.data.spec", "trainer.data.key", "trainer.data.listing"]
)
def test_what_a_launcher_may_ask_needs_nothing(module):
    loaded = loaded_by(f"import {module}")
    assert not {"tensorflow", "tensorflow_datasets", "sklearn", "keras"} & loaded


def test_a_dataset_that_is_reused_needs_no_tensorflow(digits, tmp_path):
    root = storage.uri_of(storage.local_path(digits.uri).parents[1])
    loaded = loaded_by(
        "from pathlib import Path\n"
        "from trainer.config.data import DataConfig\n"
        "from trainer.data.prepare import prepare\n"
        f"found = prepare(DataConfig(), {root!r}, Path({str(tmp_path / 'scratch')!r}))\n"
        f"assert found.reused and found.uri == {digits.uri!r}"
    )
    assert "tensorflow_datasets" in loaded
    assert "tensorflow" not in loaded
