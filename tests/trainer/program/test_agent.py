"""Tests programs under the local launcher: exits, restarts, checkpoints and misbehaviour."""

import os
import shutil
import signal
import threading

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import read_history
from flotilla.trainer.cluster.launcher import is_over
from flotilla.trainer.cluster.local import free_port, launch
from flotilla.trainer.program.agent import judge_end
from flotilla.trainer.program.task_folders import find_published
from flotilla.trainer.runtime.errors import (
    ClusterLostError,
    ConfigError,
    RunInterruptedError,
    UserError,
)
from tests.stores.fixtures import bucket_name
from tests.trainer.program.runs import COUNT, COUNTS, make_job, published_steps


@pytest.mark.parametrize(
    ("code", "several", "kind"),
    [
        (1, True, ClusterLostError), (1, False, UserError), (2, True, ConfigError),
        (3, True, UserError), (126, True, ConfigError), (127, True, ConfigError),
        (138, False, ClusterLostError), (-9, False, ClusterLostError),
        (-99, False, ClusterLostError),
    ],
)  # fmt: skip
def test_the_exit_code_decides(code, several, kind):
    error = judge_end(code, ["a", "why"], several=several)
    assert type(error) is kind
    assert "its last line: why" in str(error)


def log(job, task="chief-0"):
    return (job.workdir / task / "log.txt").read_text()


def begun_at(job, task="chief-0"):
    return [int(line.split()[-1]) for line in log(job, task).splitlines() if "begins at" in line]


cluster = pytest.mark.cluster


# Poll the program's own metrics until they contain the last step.
ASKS = """
import time, urllib.request
def ask():
    return urllib.request.urlopen(sys.argv[2]).read().decode()
while "flotilla_global_step 5.0" not in (text := ask()):
    time.sleep(0.1)
print(text)
"""


@cluster
def test_a_program_ends_with_its_checkpoint_and_model(launched, tmp_path):
    port = free_port()
    job = make_job(
        tmp_path, COUNT + ASKS, "5", f"http://127.0.0.1:{port}/metrics",
        cluster={"metrics_port": port},
    )  # fmt: skip
    launched(job)
    served = dict(line.split(" ") for line in log(job).splitlines() if line.startswith("flotilla_"))
    assert served["flotilla_loss"] == "0.2"
    assert served["flotilla_global_step_target"] == "5.0"
    assert served['flotilla_restarts_total{role="chief"}'] == "0.0"
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
    assert is_over(job)
    launched(job)
    assert len(begun_at(job)) == 1


# This program runs the code in `ENDS` at the given steps, once each.
DIES = (
    COUNTS
    + """
with (folder.parent / "starts").open("a") as starts:
    starts.write(f"{step} ")
while step < 6:
    step += 1
    print(json.dumps({"step": step}))
    save(step)
    once = folder.parent / f"once-{step}"
    if step in ENDS and not once.exists():
        once.touch()
        exec(ENDS[step])
"""
)
GUARD = "guard = os.getppid()\n"
AGENT = GUARD + "agent = int(open(f'/proc/{guard}/stat').read().rpartition(')')[2].split()[1])\n"
WAIT = "\ntime.sleep(600)"
KILL = "os.kill(os.getpid(), 9)"
# In this program, a process outside of its process group kills guard and agent at the same time.
BOTH = (
    AGENT
    + """if os.fork() == 0:
    os.setsid()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for each in (guard, agent):
            os.kill(each, number)"""
    + WAIT
)


def dying(**ends):
    return DIES.replace("ENDS", repr({int(step[1:]): text for step, text in ends.items()}))


@cluster
def test_a_killed_program_goes_on_at_its_checkpoint(launched, tmp_path):
    job = make_job(tmp_path, dying(_2=KILL, _4="os._exit(200)"))
    launched(job)
    assert begun_at(job) == [0, 2, 4]
    assert published_steps(job)[-1] == 6


@cluster
def test_a_killed_agent_or_guard_is_started_again(launched, tmp_path):
    ends = {"_2": f"{AGENT}os.kill(agent, 9){WAIT}", "_4": f"{GUARD}os.kill(guard, 9){WAIT}"}
    job = make_job(tmp_path, dying(**ends))
    launched(job)
    # A killed guard may lose the program's last output, so the log is not evidence.
    (starts,) = job.workdir.rglob("starts")
    assert starts.read_text().split() == ["0", "2", "4"]


@cluster
def test_of_a_killed_agent_and_guard_nothing_is_left(launched, tmp_path):
    job = make_job(tmp_path, dying(_2=BOTH), cluster={"max_restarts": 0})
    with pytest.raises(
        UserError, match=r"SIGKILL, and no restarts are left \(cluster\.max_restarts is 0\)"
    ):
        launched(job)


AWAITS = """
again = [folder.parents[1] / f"worker-{n}" / "again" for n in (0, 1)]
if step:
    again[task["index"]].touch()
while step and not all(each.exists() for each in again):
    time.sleep(0.05)
"""


@cluster
def test_workers_that_all_lead_begin_again_together(launched, tmp_path):
    text = dying(_3=f"if task['index'] == 1: os._exit(1){WAIT}")
    # Worker 0 must wait for the restart of worker 1, because the run ends when worker 0 exits.
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
    """Send SIGTERM to this process when the chief has printed a line."""

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
    job = make_job(tmp_path, dying(_3=half))
    launched(job)
    assert begun_at(job) == [0, 3]
    assert published_steps(job)[-1] == 6
    assert not list((job.workdir / "chief-0" / "checkpoints").glob("ckpt-9*"))


FORKS = """
import os, time
for own in (False, True):
    if os.fork() == 0:
        own and os.setsid()
        time.sleep(600)
"""
FIFO = 'import os\nos.mkfifo(os.environ["FLOTILLA_MODEL"] + "/a.keras")\n'
EVALUATE = {"after_training": "evaluate"}
ASK = "import argparse; argparse.ArgumentParser().parse_args()"
REFUSED = {
    "exits with 0 at once": ("", EVALUATE, "FLOTILLA_MODEL .* is empty"),
    "forks": (FORKS, EVALUATE, "saved no model"),
    "wrong flag": (ASK, {}, "exit code 2.*unrecognized arguments: 3"),
    "fails": ("import sys; sys.exit(7)", {}, "exit code 7; it printed nothing"),
    "absent command": ("", {"command": ["no-such"]}, "cannot start no-such: No such file"),
    "a model that is a pipe": (FIFO, EVALUATE, "FLOTILLA_MODEL .* contains no complete model"),
}  # fmt: skip
CORRUPT = """
import os, sys
with open(os.environ["FLOTILLA_METRICS"], "wb") as file:
    file.write(b'\\xff\\x00{"step": \\n[1]\\n{"step": "a"}\\n{"step": -1}\\n{"step": 1e400}\\n{"st')
"""
EVERYWHERE = "import socket\nopened = socket.socket()\nopened.bind(('', 0))\nopened.listen()\n"
WRITES = "open('left-behind.txt', 'w').write('x')\n"
# This program writes invalid metrics, listens on all interfaces, leaves a file in its working
# directory and prints nothing. None of these is an error.
ODD = CORRUPT + EVERYWHERE + WRITES + COUNT.replace("print(", "(lambda *_, **__: None)(")


@cluster
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(launched, tmp_path, name):
    text, own, said = REFUSED[name]
    job = make_job(tmp_path, text, "3", program=own)
    with pytest.raises(UserError, match=said) as error:
        launched(job)
    assert "\n" not in str(error.value)


@cluster
def test_one_that_says_nothing_and_listens_everywhere_ends_well(launched, tmp_path):
    job = make_job(tmp_path, ODD, "3", program={"working_dir": str(tmp_path)})
    launched(job)
    assert published_steps(job)[-1] == 3


@cluster
def test_one_that_kills_its_guard_is_given_up_after_the_restarts(launched, tmp_path):
    kills = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    job = make_job(tmp_path, kills, cluster={"max_restarts": 1})
    with pytest.raises(UserError, match=r"cluster\.max_restarts") as error:
        launched(job)
    assert "\n" not in str(error.value)


# A program that always fails after step 3, unless a certain file exists.
FAILS = COUNT.replace(
    "    save(step)\nmodel",
    "    save(step)\n    step == 3 and not os.path.exists(sys.argv[2]) and sys.exit(3)\nmodel",
)


@cluster
def test_a_run_is_resumed_from_an_object_store(tmp_path, s3):
    bucket = bucket_name()
    s3.create_bucket(bucket)
    checkpoints = f"s3://{bucket}/run/checkpoints"

    may = tmp_path / "may"
    job = make_job(tmp_path, FAILS, "6", str(may), at=checkpoints, training={"keep": 2})
    with pytest.raises(UserError, match="exit code 3"):
        launch(job)
    assert published_steps(job)[-1] == 3
    may.touch()
    # A different machine has no local files of the first one.
    shutil.rmtree(job.workdir)
    launch(job)
    assert "begins at 3" in (job.workdir / "chief-0" / "log.txt").read_text()
    uri, step = find_published(checkpoints)
    assert step == 6
    assert storage.read_file(uri, "model/a.txt") == b"model"
    assert storage.verify(uri).fields["program"]["checkpoint"]
    assert is_over(job)
    assert read_history(checkpoints)[-1]["global_step"] == 6
