"""Tests the separate process that checks an exported model: what it loads, and when it exits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import psutil
import pytest

from flotilla.trainer.export.parity import _environment, fresh_process, largest_difference
from flotilla.trainer.runtime.errors import UserError


def test_it_ends_with_an_export_that_fails(tmp_path):
    started = []

    def failing():
        with fresh_process(tmp_path) as process:
            started.append(process)
            assert process.poll() is None
            raise UserError("nothing is exported")

    with pytest.raises(UserError):
        failing()
    (process,) = started
    assert process.returncode == -9
    assert not psutil.pid_exists(process.pid)


@pytest.mark.slow
def test_it_loads_no_keras():
    program = "import sys, tensorflow; print('keras' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program],
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False"]


@pytest.mark.slow
def test_it_ends_when_nobody_is_left_to_ask_it(tmp_path):
    program = (
        "import pathlib, sys, time; from flotilla.trainer.export import parity\n"
        "with parity.fresh_process(pathlib.Path(sys.argv[1])) as process:\n"
        "    print(process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as parent:
        fresh = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    # Allow a long time, because the process first loads TensorFlow.
    _, alive = psutil.wait_procs([fresh], timeout=600)
    for each in alive:
        each.kill()
    assert not alive


@pytest.mark.parametrize(
    ("expected", "found", "size"),
    [
        ([0.5, 0.25], [0.5, 0.25001], 1e-5),
        ([2e4, 1e4, 0.3], [2e4, 1e4, 0.301], 1e-3 / 12910),
        ([1e6, 2.0], [1e6, 2.0 + 1e-5], 1e-5 / 707107),
        ([1.0, np.nan], [1.0, np.nan], np.nan),
        ([1.0, 2.0], [np.nan, 2.0], np.nan),
    ],
)
def test_an_answer_near_zero_is_as_exact_as_the_others_are(expected, found, size):
    answers = {"output": np.array(expected)}
    difference = largest_difference(answers, {"output": np.array(found)})
    assert difference == pytest.approx(size, rel=1e-3, nan_ok=True)
