"""Programs under the local launcher: their ends, restarts, checkpoints, and what they leave."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from flotilla.trainer import storage
from flotilla.trainer.cluster import completion
from flotilla.trainer.cluster.local import launch
from flotilla.trainer.program.agent import judge_end
from flotilla.trainer.program.publication import find_published
from flotilla.trainer.runtime.errors import (
    ClusterLostError,
    ConfigError,
    RunInterruptedError,
    UserError,
)
from tests.trainer.program.runs import COUNT, COUNTS, make_job, published_steps


@pytest.mark.parametrize(
    ("code", "several", "kind"),
    [
        (1, True, ClusterLostError),
        (1, False, UserError),
        (2, True, ConfigError),
        (3, True, UserError),
        (126, True, ConfigError),
        (127, True, ConfigError),
        (138, False, ClusterLostError),
        (-9, False, ClusterLostError),
        (-99, False, ClusterLostError),
    ],
)
def test_the_exit_code_decides(code, several, kind):
    error = judge_end(code, ["a", "why"], several=several)
    assert type(error) is kind
    assert "its last line: why" in str(error)


def log(job, task="chief-0"):
    return (job.workdir / task / "log.txt").read_text()


def begun_at(job, task="chief-0"):
    return [int(line.split()[-1]) for line in log(job, task).splitlines() if "begins at" in line]


def left(folder):
    """Return the processes whose command line or environment names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and path.name != str(os.getpid()):
            found.append((path / "cmdline").read_text())
    return found


@pytest.fixture
def launched(tmp_path):
    """Return a function that trains, and then looks for what is left."""

    def train(job):
        try:
            launch(job)
        finally:
            assert not left(tmp_path)

    return train


cluster = pytest.mark.cluster


@cluster
def test_a_program_ends_with_its_checkpoint_and_model(launched, tmp_path):
    job = make_job(tmp_path, COUNT, "5")
    launched(job)
    assert published_steps(job)[-1] == 5
    uri, _ = find_published(job.checkpoints)
    manifest = storage.verify(uri)
    assert manifest.fields["program"] == {
        "checkpoint": "checkpoint", "model": "model", "layout": "tensorflow",
    }  # fmt: skip
    assert manifest.fields["metrics"]["loss"] == 0.2
    assert storage.read_file(uri, "checkpoint/checkpoint").startswith(
        b'model_checkpoint_path: "ckpt-5"\n'
    )
    assert completion.is_over(job)
    # A run that is over is not trained again.
    launched(job)
    assert len(begun_at(job)) == 1


# Task 0 and the others kill themselves once, each after some steps.
DIES = (
    COUNTS
    + """
once = folder.parent / "once"
while step < 6:
    step += 1
    print(json.dumps({"step": step}))
    save(step)
    if step == 3 and not once.exists():
        once.touch()
        END
"""
)


@cluster
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(200)"])
def test_a_killed_program_goes_on_at_its_checkpoint(launched, tmp_path, end):
    job = make_job(tmp_path, DIES.replace("END", end))
    launched(job)
    assert begun_at(job) == [0, 3]
    assert published_steps(job)[-1] == 6


@cluster
@pytest.mark.parametrize("whose", ["agent", "guard"])
def test_a_killed_agent_or_guard_is_started_again(launched, tmp_path, whose):
    pid = "os.getppid()"
    if whose == "agent":
        pid = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"
    job = make_job(tmp_path, DIES.replace("END", f"os.kill({pid}, 9); time.sleep(600)"))
    launched(job)
    assert begun_at(job) == [0, 3]


AWAITS = """
again = [folder.parents[1] / f"worker-{n}" / "again" for n in (0, 1)]
if step:
    again[task["index"]].touch()
while step and not all(each.exists() for each in again):
    time.sleep(0.05)
"""


@cluster
def test_workers_that_all_lead_begin_again_together(launched, tmp_path):
    text = DIES.replace(
        "END",
        "if task['index'] == 1: os._exit(1)\n        time.sleep(600)",
    )
    # The run ends with worker 0, which waits until worker 1 has begun again, too.
    text = text.replace("while step < 6", AWAITS + "while step < 6")
    job = make_job(tmp_path, text, roles={"worker": 2})
    launched(job)
    assert begun_at(job, "worker-0") == [0, 3]
    assert begun_at(job, "worker-1") == [0, 3]


SERVES = COUNT.replace(
    'print("begins',
    """if task["type"] == "ps":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    once = folder.parent / "once"
    if not once.exists():
        once.touch()
        os.kill(os.getpid(), 9)
    (folder.parent.parent / "again").touch()
    time.sleep(600)
while not (folder.parent.parent / "again").exists():
    time.sleep(0.05)
print("begins""",
)


@cluster
def test_a_server_is_started_again_and_ended_at_last(launched, tmp_path):
    job = make_job(tmp_path, SERVES, "3", roles={"ps": 1, "worker": 2})
    launched(job)
    assert published_steps(job) == [3]
    assert (job.workdir / "ps-0" / "starts.txt").read_text() == "2"


def interrupt_at(job, line):
    """Send this process SIGTERM when a task has printed a line."""

    def wait():
        path, pause = job.workdir / "chief-0" / "log.txt", threading.Event()
        while not (path.exists() and line in path.read_text()):
            pause.wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


WAITS = (
    COUNTS
    + """
while step < 4:
    step += 1
    print(json.dumps({"step": step}))
if (folder.parent / "starts.txt").read_text() == "1":
    print("waits")
    time.sleep(600)
"""
)


@cluster
def test_a_cancelled_run_publishes_a_last_checkpoint(launched, tmp_path):
    job = make_job(tmp_path, WAITS)
    interrupt_at(job, "waits")
    with pytest.raises(RunInterruptedError, match=r"at global step 4; checkpoint file:.*00004"):
        launched(job)
    assert published_steps(job) == [4]
    job.workdir.rename(tmp_path / "before")
    (job.workdir / "chief-0").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "end.json").unlink(missing_ok=True)
    interrupt_at(job, "waits")
    with pytest.raises(RunInterruptedError):
        launched(job)
    assert begun_at(job) == [4]


FORKS = """
import subprocess, sys
for own in (False, True):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=own)
"""
BAD = {
    "exits at once": ("", {"after_training": "evaluate"}, "FLOTILLA_MODEL .* has nothing in it"),
    "forks": (FORKS, {"after_training": "evaluate"}, "left no model"),
    "needs a package": ("import no_such_package", {}, "No module named 'no_such_package'"),
    "wrong flag": ("import argparse; argparse.ArgumentParser().parse_args()", {}, "unrecognized"),
    "fails": ("import sys; sys.exit(7)", {}, "exit code 7; it printed nothing"),
    "absent command": ("", {"command": ["no-such"]}, "cannot start no-such: No such file"),
    "absent folder": ("", {"working_dir": "no-such"}, "program.working_dir: there is no folder"),
    "no words": ("", {"command": ["/"]}, "cannot start /: Permission denied"),
}  # fmt: skip


@cluster
@pytest.mark.parametrize("name", BAD)
def test_a_bad_program_ends_in_one_line(launched, tmp_path, name):
    text, own, said = BAD[name]
    job = make_job(tmp_path, text, *(["--x"] if name == "wrong flag" else []), program=own)
    with pytest.raises(UserError, match=said) as error:
        launched(job)
    assert "\n" not in str(error.value)


@cluster
def test_a_program_that_stalls_is_started_again(launched, tmp_path):
    text = COUNT.replace("while step <", "if step == 0: save(1); time.sleep(600)\nwhile step <")
    job = make_job(tmp_path, text, "3", program={"stall_timeout": 2})
    launched(job)
    assert begun_at(job) == [0, 1]
    assert "program.stall_timeout" in log(job)


@cluster
def test_a_half_written_checkpoint_is_passed_over(launched, tmp_path):
    half = """(folder / "ckpt-9.index").touch()
        state.write_text('model_checkpoint_path: "ckpt-9"')
        os._exit(200)"""
    text = DIES.replace("END", half)
    job = make_job(tmp_path, text)
    launched(job)
    assert begun_at(job)[-1] in (0, 2)
    assert published_steps(job)[-1] == 6
    assert not list((job.workdir / "chief-0" / "checkpoints").glob("ckpt-9*"))


@cluster
def test_much_output(launched, tmp_path):
    job = make_job(tmp_path, "import sys\nfor n in range(1000): sys.stdout.write('x' * 100_000)")
    launched(job)
    assert (job.workdir / "chief-0" / "log.txt").stat().st_size > 100_000_000
    manifest = storage.read_manifest(storage.join(job.checkpoints, "step-00000000"))
    assert json.dumps(manifest.fields["program"]["checkpoint"]) == '""'
