"""Tests programs under the local launcher: exits, restarts, checkpoints and leftovers."""

import os
import signal
import threading

import pytest

from flotilla.trainer import storage
from flotilla.trainer.cluster import completion
from flotilla.trainer.cluster.local import free_port
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
    assert completion.is_over(job)
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
