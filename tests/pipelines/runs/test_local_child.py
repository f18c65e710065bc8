"""Tests that the model is tried in parallel with the steps of a local run."""

import os
import signal
import sys

import pytest
from kfp.local import subprocess_task_handler

from flotilla.components.records.record import STOPPING
from flotilla.components.table import STEPS
from flotilla.pipelines.runs import local_child
from flotilla.pipelines.runs.outcome import judge_outcome
from flotilla.trainer import events
from flotilla.trainer.cluster import fitting, forks
from flotilla.trainer.config.form import to_local_form
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.events import StepBegin, StepEnd
from flotilla.trainer.events.run_state import reduce_events
from flotilla.trainer.runtime.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / local_child.EVENTS
    monkeypatch.setenv(events.VARIABLE, str(path))
    monkeypatch.setenv(STOPPING, "")
    monkeypatch.delenv(STOPPING)
    events.begin_again(path, "t-1")
    for event in (StepBegin(step="resolve_config"), StepEnd(step="resolve_config", status="done")):
        events.append(path, event)
    return tmp_path


@pytest.fixture
def killed(monkeypatch):
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: found.append((group, number)))
    return found


@pytest.fixture
def tried(monkeypatch):
    """Return the configurations that were tried; trials run in this thread and find an error."""
    found = []

    def begin(config, dataset, on_mistake, is_over):
        assert not is_over()
        found.append((config, dataset))
        on_mistake(ConfigError("model.args: mlp has no argument 'x'"))

    monkeypatch.setattr(fitting, "begin", begin)
    return found


def judged(folder):
    found = reduce_events(events.read(folder / local_child.EVENTS))
    return judge_outcome(found, 1, interrupted=False)


FORM = to_local_form(parse_config({"training": {"warm_start": "champion"}}))


def test_a_mistake_ends_the_run_as_one_of_its_configuration(folder, killed, tried):
    local_child._begin_trial(folder, {**FORM, "dataset": "file:///d"}, is_resumed=False)
    [(config, dataset)] = tried
    assert (config.training.warm_start, dataset) == ("champion", "file:///d")
    assert killed == [(os.getpgrp(), signal.SIGTERM)]
    interrupted = StepEnd(step="train_model", status="interrupted", exit_code=130)
    events.append(folder / local_child.EVENTS, interrupted)
    result = judged(folder)
    assert (result.status, result.exit_code) == ("failed", 2)
    assert result.message == "resolve_config: model.args: mlp has no argument 'x'"


def test_a_resumed_run_and_one_that_was_asked_to_end(folder, killed, tried, monkeypatch):
    # A resumed run begins with its own checkpoints.
    local_child._begin_trial(folder, FORM, is_resumed=True)
    assert tried.pop()[0].training.warm_start == ""
    assert killed.pop()
    monkeypatch.setenv(STOPPING, "1")
    local_child._begin_trial(folder, FORM, is_resumed=False)
    assert (len(tried), killed) == (1, [])


def test_a_mistake_that_a_training_task_found_before_is_said_once(folder, killed, tried):
    said = "model.args: mlp has no argument 'x' (chief-0)"
    found = StepEnd(step="train_model", status="failed", exit_code=2, error=said)
    events.append(folder / local_child.EVENTS, found)
    local_child._begin_trial(folder, FORM, is_resumed=False)
    assert tried
    assert not killed
    result = judged(folder)
    assert result.message == f"train_model: {said}"


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


def refuse(*_):
    raise PermissionError


@pytest.mark.parametrize(
    "prevent",
    [
        lambda patch: patch.setenv(forks.VARIABLE, forks.NONE),
        # A debugger would not follow a forked process.
        lambda patch: patch.setattr(sys, "gettrace", lambda: print),
        # Some containers refuse descriptors of processes.
        lambda patch: patch.setattr(os, "pidfd_open", refuse),
        lambda patch: patch.setattr(signal, "pidfd_send_signal", refuse),
    ],
    ids=["told", "debugger", "pidfd_open", "pidfd_send_signal"],
)
def test_where_no_process_can_be_forked_the_runner_is_left_as_it_is(
    started, monkeypatch, tmp_path, prevent
):
    prevent(monkeypatch)
    before = subprocess_task_handler.run_local_subprocess
    with local_child.forking(tmp_path, "training") as fork_steps:
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
    with local_child.forking(tmp_path, "prepare") as fork_steps:
        fork_steps()
        assert forks.VARIABLE not in os.environ
        assert called("true") == 7
        code = called(*step, STEPS[-1].name)
        # If no server has loaded TensorFlow, steps that need it get a new process.
        assert called(*step, "export_model") == 7
    assert "step b" in capfd.readouterr().out
    assert (code, len(started)) == (3, 2)
