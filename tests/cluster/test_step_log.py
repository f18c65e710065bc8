"""The log of a step that trains by itself in a pod: nobody follows its events but a reader."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trainer import storage

pytestmark = pytest.mark.cluster

# What `train_model` does between its inputs and its outputs.
STEP = """
import json, sys
from pathlib import Path
from components import launchers
from components.records.record import recorded
from trainer.cluster.launcher import Job
from trainer.config.load import parse_config

job = json.loads(sys.argv[1])
with recorded("train_model"):
    launchers.launch(Job(
        config=parse_config(job["config"]), dataset=job["dataset"],
        checkpoints=job["checkpoints"], workdir=Path(job["workdir"]),
    ))
"""


@pytest.mark.slow
def test_it_has_lines_of_progress_checkpoints_and_validations(dataset, tmp_path):
    training = {"steps": 300, "checkpoint_every": 100, "validate_every": 150}
    job = {
        "config": {"training": training, "cluster": {"workers": 1}},
        "dataset": dataset,
        "checkpoints": storage.uri_of(tmp_path / "checkpoints"),
        "workdir": str(tmp_path / "cluster"),
    }
    ended = subprocess.run(
        [sys.executable, "-c", STEP, json.dumps(job)],
        cwd=ROOT,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    lines = ended.stdout.splitlines()
    number = r"[\d.]+"
    line = rf"global step (\d+)/300  loss {number}  {number} steps/s  {number} s left"
    steps = [int(found[1]) for each in lines if (found := re.search(line, each))]
    assert steps
    assert steps == sorted(set(steps))
    validated = [re.search(rf"validation of global step (\d+): .*loss {number}", e) for e in lines]
    assert [int(found[1]) for found in validated if found] == [150, 300]
    published = [re.search(r"checkpoint of global step (\d+): file://", each) for each in lines]
    assert [int(found[1]) for found in published if found][-3:] == [100, 200, 300]
    # Each event once, in words.
    assert not [each for each in lines if '{"event": "progress"' in each]
