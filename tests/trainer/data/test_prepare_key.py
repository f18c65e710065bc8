"""Tests the key of a published dataset, which is computed without importing TensorFlow."""

import json
import subprocess
import sys

import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data.prepare import dataset_key

SECTIONS = [
    {},
    {"label": "price"},
    {"label": ["price", "size"]},
    {"label": "price", "weight": "times"},
    {"label": "price", "group": "shop"},
    {"inputs": "size"},
    {"shapes": {"image": [8, 8, 3]}},
    {"shapes": {"image": [9, 9, 3]}},
]


def test_every_role_and_shape_is_another_dataset():
    configs = [parse_config({"data": each}).data for each in SECTIONS]
    assert len({dataset_key(each, {"version": "1.0.0"}) for each in configs}) == len(SECTIONS)


def test_one_name_is_a_list_of_one():
    text, several = (
        parse_config({"data": {"label": label, "inputs": label}}).data
        for label in ("price", ["price"])
    )
    assert text == several == DataConfig.model_validate_json(text.model_dump_json())
    assert dataset_key(text, {}) == dataset_key(several, {})


LOADED = "import json, sys; print(json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))"


def loaded_by(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{LOADED}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_reading_needs_no_tfds():
    loaded = loaded_by("import flotilla.trainer.data.read")
    assert "tensorflow" in loaded
    assert "tensorflow_datasets" not in loaded


@pytest.mark.parametrize(
    "module",
    [
        "flotilla.trainer.data",
        "flotilla.trainer.features.dataset_spec",
        "flotilla.trainer.data.listing",
    ],
)
def test_what_a_launcher_may_ask_needs_nothing(module):
    loaded = loaded_by(f"import {module}")
    assert not {"tensorflow", "tensorflow_datasets", "sklearn", "keras"} & loaded


def test_a_dataset_that_is_reused_needs_no_tensorflow(digits, tmp_path):
    root = storage.uri_of(storage.local_path(digits.uri).parents[1])
    loaded = loaded_by(
        "from pathlib import Path\n"
        "from flotilla.trainer.config.data import DataConfig\n"
        "from flotilla.trainer.data.prepare import prepare\n"
        f"found = prepare(DataConfig(), {root!r}, Path({str(tmp_path / 'scratch')!r}))\n"
        f"assert found.reused and found.uri == {digits.uri!r}"
    )
    assert "tensorflow_datasets" in loaded
    assert "tensorflow" not in loaded
