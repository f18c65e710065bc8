"""Tests a task's attempts in its pod: which exits are final, and what the next attempt finds."""

import math
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from flotilla.components.kubernetes.pods.guard import NextAttempt, RestartRule
from flotilla.trainer import events
from tests.components.kubernetes.attempts import ROOT

# A guard that only runs its task's process; pauses are shortened for tests.
GUARD = """
import os, signal, sys, threading
from flotilla.components.kubernetes.pods import guard
from flotilla.trainer.runtime import streams
guard.PAUSE_SECONDS = float(sys.argv[1])
guard.LONGEST_PAUSE_SECONDS = max(1.0, float(sys.argv[1]))
guard.SHORT_ATTEMPT_SECONDS = float(sys.argv[2])
streams.log_to_stderr()
guard.adopt_orphans()
command = [sys.executable, "-c", sys.argv[3]]
process = guard.TaskProcess(command, os.environ, name="ps-0", rule=guard.RestartRule(2))
signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
signal.signal(signal.SIGUSR1, lambda *_: process.begin_no_more())
process.start()
{also}
sys.exit(process.wait())
"""
COUNTS = "import os, pathlib, signal, sys, subprocess; open('starts', 'a').write('x')\n"
SERVES = f"{COUNTS}print('ready', flush=True); signal.pause()"


@contextmanager
def guarded(folder, code, *, pause=0.001, short=60.0, also=""):
    """Run a guard with a task; its standard output contains the lines of both."""
    program = GUARD.replace("{also}", also)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(pause), str(short), code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=300)


def ended(process):
    out, _ = process.communicate(timeout=300)
    return process.returncode, list(filter(None, map(events.parse, out.splitlines())))


def line_of(process, text):
    return next(line for line in process.stdout if text in line)


def starts(folder):
    return len((folder / "starts").read_text())


@pytest.mark.parametrize("code", [0, 1, 2, 75, 127])
def test_a_code_below_128_is_final(code):
    assert RestartRule(10).next_attempt(code, 1000.0) is None


def test_restarts_are_counted_up_to_the_limit():
    rule = RestartRule(3)
    made = [rule.next_attempt(code, 1000.0) for code in (128, 137, 138, 139)]
    assert made == [NextAttempt(1.0, True)] * 3 + [None]
    assert rule.restarts == 3


def test_a_task_that_dies_at_once_is_started_ever_less_often_until_it_has_run_for_a_minute():
    rule = RestartRule(math.inf)

    def pauses(count, seconds):
        return [rule.next_attempt(137, seconds).pause for _ in range(count)]

    assert pauses(6, 0.0) == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert pauses(1, 7.0) == [3.0]
    assert pauses(1, 59.0) == [1.0]
    assert pauses(2, 60.0) == [1.0, 1.0]
    assert pauses(3, 0.0) == [1.0, 2.0, 4.0]
    assert set(pauses(5000, 0.0)[-10:]) == {10.0}


def test_a_cluster_that_is_lost_before_it_is_whole_counts_for_nothing_for_two_minutes():
    rule = RestartRule(1)
    assert rule.next_attempt(138, 1000.0).is_counted
    # Each of these attempts takes 20 s, and each pause 1 s.
    settling = [rule.next_attempt(138, 20.0) for _ in range(6)]
    assert settling == [NextAttempt(1.0, False)] * 5 + [None]
    assert rule.restarts == 1
    # An attempt of 60 s is not short, so the two minutes that are allowed for short attempts begin
    # again.
    assert rule.next_attempt(137, 60.0) is None
    assert rule.next_attempt(138, 59.0) == NextAttempt(1.0, False)
    assert rule.next_attempt(137, 1.0) is None


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("end", "code", "cause", "restarts"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "exit code 139 (signal SIGSEGV)", 2),
        ("sys.exit(138)", 138, "exit code 138", 2),
        ("sys.exit(127)", 127, "", 0),
    ],
)
def test_each_restart_is_an_event_and_past_the_limit_the_code_is_that_of_the_task(
    tmp_path, end, code, cause, restarts
):
    # With `short=0`, no attempt is short, so a lost cluster (exit code 138) counts as a restart.
    expected = [
        events.Restart(task="ps-0", cause=cause, restarts=number, code=code)
        for number in range(1, restarts + 1)
    ]
    with guarded(tmp_path, f"{COUNTS}{end}", short=0.0) as process:
        assert ended(process) == (code, expected)
    assert starts(tmp_path) == restarts + 1


@pytest.mark.cluster
def test_a_signal_in_a_pause_ends_it(tmp_path):
    with guarded(tmp_path, f"{COUNTS}sys.exit(200)", pause=1000.0) as process:
        line_of(process, '"event": "restart"')
        process.terminate()
        assert ended(process) == (200, [])
    assert starts(tmp_path) == 1


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_task_that_is_asked_to_end_does_not_begin_again(tmp_path, number):
    code = (
        f"{COUNTS}open('pid', 'w').write(str(os.getpid()))\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('signalled', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()"
    )
    with guarded(tmp_path, code, also=ACKNOWLEDGES) as process:
        waited_for = {"ready\n", "handles\n"}
        while waited_for:
            waited_for.discard(process.stdout.readline())
        process.send_signal(number)
        line_of(process, "signalled")
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert ended(process) == (137, [])
    assert starts(tmp_path) == 1


# Here SIGUSR1 stands for the SIGTERM that a server receives before its leader has ended.
ACKNOWLEDGES = (
    "signal.signal(signal.SIGUSR1, lambda *_: (process.begin_no_more(), print('signalled', "
    "flush=True)))\nprint('handles', flush=True)"
)


@pytest.mark.cluster
def test_no_child_of_an_attempt_is_left_when_the_next_one_begins(tmp_path, port):
    # This child keeps the port open, ignores SIGTERM, and outlives its parent.
    child = (
        "import signal, socket, sys, os; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"server = socket.create_server(('127.0.0.1', {port})); os.write(1, b'bound')\n"
        "signal.pause()"
    )
    code = (
        f"{COUNTS}child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=-1)\n"
        "assert child.stdout.read(5) == b'bound'; open('children', 'a').write(f'{child.pid} ')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with guarded(tmp_path, code) as process:
        assert ended(process)[0] == 137
    children = (tmp_path / "children").read_text().split()
    assert len(children) == 3
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


@pytest.mark.cluster
def test_orphans_of_the_task_are_reaped_while_it_runs(tmp_path):
    orphan = "subprocess.Popen(['true'], start_new_session=True).pid"
    code = (
        f"{COUNTS}reader, writer = os.pipe()\n"
        f"os.fork() or (os.write(writer, str({orphan}).encode()), os._exit(0))\n"
        "os.wait(); pid = os.read(reader, 20).decode()\n"
        "while os.path.exists(f'/proc/{pid}'): pass"
    )
    with guarded(tmp_path, code) as process:
        assert ended(process) == (0, [])


@pytest.mark.cluster
def test_a_child_of_the_guard_itself_is_left_to_the_thread_that_waits_for_it(tmp_path):
    # The guard has such a child if the API client runs a program to obtain credentials.
    also = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'raise SystemExit(7)'])\n"
        "os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)\n"
        "timer = threading.Timer(0.05, lambda: (print(child.wait(), flush=True), "
        "process.send_signal(15)))\n"
        "timer.start()"
    )
    with guarded(tmp_path, SERVES, also=also) as process:
        assert "7\n" in list(process.stdout)
        assert process.wait(300) == 128 + signal.SIGTERM


@pytest.mark.cluster
def test_a_task_that_cannot_be_started_again_ends_with_its_code(tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport os\nos.remove({str(program)!r})\nexit(200)\n")
    program.chmod(0o755)
    also = f"command[:] = [{str(program)!r}]"
    with guarded(tmp_path, f"{COUNTS}sys.exit(201)", also=also) as process:
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 200
    assert "cannot restart ps-0: [Errno 2]" in out


@pytest.mark.cluster
def test_a_task_does_not_outlive_a_guard_that_is_killed(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"from flotilla.trainer.runtime import signals; signals.end_with_parent()\n{SERVES}"
    )
    with guarded(tmp_path, code) as process:
        line_of(process, "ready")
        process.kill()
        # The read returns only after the task, which holds the other end of the pipe, has exited.
        assert process.stdout.read() == ""
