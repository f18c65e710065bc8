"""Tests that a process ends with its parent, in real chains of processes."""

import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.signals import handle_interrupts

ROOT = Path(signals.__file__).parents[2]
SECONDS = 120  # Timeout for each condition that a test waits for.


# Last process of the chain: it prints its PID and its parent's, then waits forever.
TASK = """
import os, signal
from flotilla.trainer.runtime import signals
signals.end_with_parent()
print(os.getpid(), os.getppid(), flush=True)
signal.pause()
"""


# First process of the chain: it starts the next one and waits for a line of input.
STARTER = """
import os, subprocess, sys
from flotilla.trainer.runtime import signals
child = subprocess.Popen(sys.argv[1:], env={**os.environ, **signals.parent_environment()})
sys.stdin.readline()
"""
DIRECT = [sys.executable, "-c", TASK]


# The shell does not replace itself with the task, because another command follows.
BEHIND_A_SHELL = ["sh", "-c", '"$@"; true', "sh", *DIRECT]
BEHIND_TWO = ["sh", "-c", '"$@"; true', "sh", *BEHIND_A_SHELL]


@contextmanager
def started(*command):
    """Start the chain. Yield its first and last process, and whether the first is the parent."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, *command],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, parent_of_task = map(int, starter.stdout.readline().split())
    task = psutil.Process(pid)
    family = psutil.Process(starter.pid).children(recursive=True)
    try:
        yield starter, task, parent_of_task == starter.pid
    finally:
        # Kill all processes first, because `communicate` waits until each has closed its end of the
        # pipe.
        starter.kill()
        for process in family:
            with suppress(psutil.NoSuchProcess):  # The process may exit with its starter.
                process.kill()
        starter.communicate()


def is_gone(process):
    """Wait until the process ends, even if the init process has not yet reaped it."""
    try:
        watched = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    with os.fdopen(watched) as file:
        return bool(select.select([file], [], [], SECONDS)[0])


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits as Linux lets it")
@pytest.mark.parametrize(
    ("command", "direct", "end"),
    [
        (DIRECT, True, signal.SIGKILL),
        (DIRECT, True, None),
        (BEHIND_A_SHELL, False, signal.SIGTERM),
        (BEHIND_A_SHELL, False, None),
    ],
    ids=["killed", "ended", "stopped behind a shell", "ended behind a shell"],
)
def test_it_ends_with_its_starter(command, direct, end):
    with started(*command) as (starter, task, is_child):
        assert is_child is direct
        assert task.is_running()
        if end:
            starter.send_signal(end)
        else:
            starter.stdin.write("done\n")
            starter.stdin.flush()
        assert is_gone(task)
        assert starter.wait() == (-end if end else 0)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits as Linux lets it")
def test_it_ends_even_when_it_is_stopped():
    with started(*DIRECT) as (starter, task, _):
        task.suspend()
        starter.kill()
        assert is_gone(task)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits as Linux lets it")
def test_the_shells_between_end_too():
    with started(*BEHIND_TWO) as (starter, task, _):
        shells = task.parents()[:2]
        assert [shell.name() for shell in shells] == ["sh", "sh"]
        starter.kill()
        assert all(map(is_gone, [task, *shells]))


def run(name, code="print('on')"):
    program = f"from flotilla.trainer.runtime import signals\nsignals.end_with_parent()\n{code}"
    environment = {**os.environ, signals.PARENT_VARIABLE: name or ""}
    if name is None:
        del environment[signals.PARENT_VARIABLE]
    options = {"cwd": ROOT, "env": environment, "timeout": SECONDS}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, **options, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits as Linux lets it")
@pytest.mark.parametrize("name", [None, "nobody", str(os.getppid())])
def test_it_goes_on_where_no_process_or_a_running_one_is_named(name):
    done = run(name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits as Linux lets it")
def test_it_ends_at_once_where_the_named_one_is_gone():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = run(str(gone.pid), code="import signal\nsignal.pause()")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


ENDS_AT_ONCE = """
import os, signal
from flotilla.trainer.runtime import signals
requested = signals.catch_stop_signals()
print(requested())
with signals.end_at_once():
    pass
os.kill(os.getpid(), signal.{name})
print(requested(), flush=True)
with signals.end_at_once():
    os.kill(os.getpid(), signal.{name})
print("not reached")
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits as Linux lets it")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_stop_signal_ends_what_has_nothing_to_save(name):
    done = run(None, ENDS_AT_ONCE.format(name=name))
    assert (done.returncode, done.stdout) == (-getattr(signal, name), "False\nTrue\n")


ROUNDS = 10


# The other threads are awake, as in a supervisor, so any of them could receive the signal.
WAITING = """
import os, queue, select, threading
from flotilla.trainer.runtime.signals import handle_interrupts

def turn():
    while True:
        select.select([reader], [], [], 0.001)

interrupts, (reader, _) = queue.SimpleQueue(), os.pipe()
for _ in range(6):
    threading.Thread(target=turn, daemon=True).start()
with handle_interrupts(lambda: interrupts.put(None)):
    while True:
        print("ready", flush=True)
        interrupts.get()
        interrupts.get()
"""


def test_both_of_two_signals_are_noticed():
    with subprocess.Popen(
        [sys.executable, "-c", WAITING],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            for _ in range(ROUNDS):
                assert select.select([process.stdout], [], [], SECONDS)[0], "nothing was noticed"
                assert process.stdout.readline() == "ready\n"
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGTERM)
        finally:
            process.kill()


def test_the_handlers_before_it_come_back():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGURG)
    before = [signal.getsignal(number) for number in numbers]
    with handle_interrupts(list):
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
