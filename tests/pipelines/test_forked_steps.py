"""Tests forked steps of a local run; complete runs are in `tests/pipelines/runs`."""

import os
import signal
import sys

import pytest
from kfp.local import subprocess_task_handler

from flotilla.components.table import STEPS
from flotilla.pipelines import forked_steps
from flotilla.trainer.cluster import forks


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Return the commands that KFP's runner starts; a fake function records them."""
    found = []

    def run(command, env_vars=None):
        found.append((command, env_vars))
        return 7

    monkeypatch.setattr(subprocess_task_handler, "run_local_subprocess", run)
    monkeypatch.delenv(forks.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    return found


def called(*command):
    return subprocess_task_handler.run_local_subprocess(list(command), {"A": "b"})


def test_where_no_process_is_to_be_forked_the_runner_is_left_as_it_is(
    started, monkeypatch, tmp_path
):
    monkeypatch.setenv(forks.VARIABLE, forks.NONE)
    before = subprocess_task_handler.run_local_subprocess
    with forked_steps.forking(tmp_path, "training") as fork_steps:
        fork_steps()
        assert subprocess_task_handler.run_local_subprocess is before
    assert started == []


def test_under_a_debugger_no_process_is_forked(started, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    before = subprocess_task_handler.run_local_subprocess
    with forked_steps.forking(tmp_path, "training") as fork_steps:
        fork_steps()
        assert subprocess_task_handler.run_local_subprocess is before
    assert started == []


def test_where_a_container_refuses_descriptors_of_processes_no_process_is_forked(
    started, monkeypatch, tmp_path
):
    def refuse(*_):
        raise PermissionError

    before = subprocess_task_handler.run_local_subprocess
    for module, name in ((os, "pidfd_open"), (signal, "pidfd_send_signal")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with forked_steps.forking(tmp_path, "training") as fork_steps:
                fork_steps()
                assert subprocess_task_handler.run_local_subprocess is before
    assert started == []


def test_a_step_is_forked_and_other_commands_are_started(started, monkeypatch, tmp_path, capfd):
    source = f"""
import os, sys
{STEPS[-1].name} = None
print("step", os.environ["A"], flush=True)
sys.exit(3)
"""
    shell = "python3 -m kfp.dsl.executor_main"
    step = ("sh", "-c", shell, source, "--executor_input", "{}", "--function_to_execute")
    # The server loads KFP first, which may take long.
    monkeypatch.setattr(forks, "_SECONDS", 300.0)
    # `prepare` does not always need TensorFlow, so the server does not import it.
    with forked_steps.forking(tmp_path, "prepare") as fork_steps:
        fork_steps()
        assert forks.VARIABLE not in os.environ
        assert called("true") == 7
        code = called(*step, STEPS[-1].name)
        # If no server has loaded TensorFlow, steps that need it get a new process.
        assert called(*step, "export_model") == 7
    assert "step b" in capfd.readouterr().out
    assert (code, len(started)) == (3, 2)
