"""The programs of the guide to models give the same classes as the model itself."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.docs.markdown import read
from tests.trainer import small_run
from trainer import storage

PROGRAMS = [
    block.text for block in read(ROOT / "docs" / "how-to" / "use-a-model.md", ROOT).of("python")
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    run = small_run.small_run(tmp_path_factory.mktemp("run"))
    run = small_run.with_formats(run, "saved_model", "keras", "tflite")
    decision = small_run.decide(run, run.root, accuracy=0.5)
    output = storage.uri_of(run.root / "model")
    small_run.export_model(run, decision, output, run.root / "scratch")
    return run, storage.local_path(output)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_each_program_runs_unchanged(exported, tmp_path):
    run, folder = exported
    assert len(PROGRAMS) == 3
    asked = json.loads((folder / "request.json").read_text())["instances"]
    images = np.array([each["image"] for each in asked], np.uint8)
    logits = dataclasses.replace(run, images=images).logits
    expected = [str(place) for place in np.argmax(logits, axis=-1)]
    settings = {**os.environ, "PYTHONSAFEPATH": "1"}
    for number, program in enumerate(PROGRAMS):
        path = tmp_path / f"program{number}.py"
        path.write_text(program)
        ended = subprocess.run(
            [sys.executable, path, folder], cwd=tmp_path, env=settings,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert ast.literal_eval(ended.stdout.splitlines()[-1]) == expected
