"""Tests the folder, environment, log and termination message of a task's process."""

import json
import os
import signal
import socket
import sys
from dataclasses import replace

import pytest

from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.process import TaskProcess
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task, from_tf_config
from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.errors import FAILED, UserError

CLUSTER = Cluster(
    addresses={"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",), "worker": ("127.0.0.1:3",)}
)
CHIEF, SERVER, WORKER = (Task(role=role, index=0) for role in ("chief", "ps", "worker"))
PRINT_ENVIRONMENT = "import json, os; print(json.dumps({**os.environ, 'CWD': os.getcwd()}))"
WAIT = "import signal; signal.pause()"


@pytest.fixture
def job(tmp_path):
    return Job(
        config=Config(),
        dataset="file:///data",
        checkpoints="file:///run/check%20points",
        workdir=tmp_path / "the work",
    )


@pytest.fixture
def process(job):
    made = []

    def make(task=CHIEF, job=job, cluster=CLUSTER, code=None):
        process = TaskProcess(job, cluster, task)
        if code is not None:
            process._command = lambda: [sys.executable, "-c", code]
        made.append(process)
        return process

    yield make
    for each in made:
        each.kill()


def test_a_task_has_a_folder_of_its_own(process, job):
    names = {process(task).folder for task in (CHIEF, SERVER, Task(role="worker", index=12))}
    assert names == {job.workdir / name for name in ("chief-0", "ps-0", "worker-12")}
    assert not job.workdir.exists()


def test_the_command_names_the_work_folder_so_that_a_run_can_be_found(process, job):
    command = process()._command()
    assert command[:4] == [sys.executable, "-m", "flotilla.trainer", "task"]
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert options == {
        "--config": str(job.workdir / "chief-0" / "config.json"),
        "--dataset": "file:///data",
        "--checkpoints": "file:///run/check%20points",
        "--workdir": str(job.workdir / "chief-0"),
    }


def test_a_relative_work_folder_is_made_absolute(process, job, monkeypatch):
    monkeypatch.chdir(job.workdir.parent)
    relative = replace(job, workdir=job.workdir.relative_to(job.workdir.parent))
    one = process(job=relative, code="print('here')")
    assert one.folder == job.workdir / "chief-0"
    assert one.start().wait() == 0
    assert one.log.read_text() == "here\n"


def test_the_environment_of_a_task(process, job, monkeypatch):
    task = WORKER
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    monkeypatch.setenv("OF_THE_USER", "kept")
    monkeypatch.setenv("TF_CONFIG", "of another cluster")
    one = process(task, code=PRINT_ENVIRONMENT)
    assert one.start().wait() == 0
    found = json.loads(one.last_line())
    assert from_tf_config(found["TF_CONFIG"]) == (CLUSTER, task)
    assert found[signals.PARENT_VARIABLE] == str(os.getpid())
    assert found["GRPC_FAIL_FAST"] == "use_caller"
    assert found["GRPC_EXPERIMENTS"] == "tcp_frame_size_tuning"
    assert found["PYTHONPATH"] == "/somewhere/else"
    assert found["PYTHONSAFEPATH"] == "1"
    assert found["FLOTILLA_USER_FOLDER"] == os.getcwd()
    assert found["OF_THE_USER"] == "kept"
    assert found["CWD"] == str(job.workdir / str(task))


@pytest.mark.parametrize(
    "assignments",
    [
        ["model.args={hidden_units: [10], text: 'ö 😀: # {}'}", "gate.max.loss=1e22"],
        ["training.optimizer.learning_rate=1e-7", "storage.root=file:///tmp/a b"],
    ],
)
def test_the_task_reads_the_same_configuration(process, job, assignments):
    config = load_config(None, assignments)
    one = process(job=replace(job, config=config), code="")
    one.start().wait()
    assert load_config(one.folder / "config.json") == config


def test_it_is_terminated_and_killed(process):
    terminated, killed, idle = (
        process(code=WAIT),
        process(SERVER, code=WAIT),
        process(WORKER, code=WAIT),
    )
    first, second = terminated.start(), killed.start()
    terminated.terminate()
    assert first.wait() == -signal.SIGTERM
    # A stopped task can be killed, too.
    second.send_signal(signal.SIGSTOP)
    killed.kill()
    assert second.poll() == -signal.SIGKILL
    for ended_or_never_begun in (terminated, killed, idle):
        ended_or_never_begun.terminate()
        ended_or_never_begun.kill()


def test_a_ctrl_c_of_the_terminal_does_not_reach_it(process):
    popen = process(code=WAIT).start()
    assert os.getsid(popen.pid) == popen.pid != os.getsid(0)


def test_both_streams_are_appended_to_the_log(process):
    one = process(code="import sys; print('out'); print('err', file=sys.stderr)")
    for times in (1, 2):
        assert one.start().wait() == 0
        assert one.log.read_text().count("out\n") == times
        assert one.log.read_text().count("err\n") == times


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("", "(nothing)"),
        ("print('first'); print('last'); print()", "last"),
        ("import sys; sys.stdout.buffer.write(b'a\\xff')", "a\ufffd"),
    ],
)
def test_the_last_line_of_the_log(process, code, last):
    one = process(code=code)
    one.start().wait()
    assert one.last_line() == last


def test_a_new_attempt_deletes_the_termination_message(process):
    one = process(code="import pathlib; pathlib.Path('termination.txt').write_text('it was so\\n')")
    one.start().wait()
    assert one.termination_message() == "it was so"
    one._command = lambda: [sys.executable, "-c", ""]
    one.start().wait()
    # A task that was killed or that ends without a message has none.
    assert one.termination_message() == ""


def test_a_real_task_writes_why_it_ends(process):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        one = process(
            SERVER, cluster=Cluster(addresses={"ps": (address,), "worker": ("127.0.0.1:1",)})
        )
        assert one.start().wait() == FAILED
    expected = (
        f"ps-0 cannot serve on {address}: Address already in use; "
        "end the process that uses the port, or give the task another port"
    )
    assert one.termination_message() == expected
    assert one.last_line() == f"flotilla: {expected}"
    assert len(one.log.read_text().splitlines()) == 1


def test_a_folder_that_cannot_be_created_is_one_line(process, job):
    job.workdir.write_text("in the way")
    with pytest.raises(UserError) as caught:
        process().start()
    assert str(caught.value) == f"cannot write to {job.workdir / 'chief-0'}: Not a directory"
