"""Tests the guard, a single file for Python 3.8 or newer that ends all processes of a program."""

import ast
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.trainer.program import guard

FILE = Path(guard.__file__)


def test_it_needs_python_3_8_and_nothing_else():
    tree = ast.parse(FILE.read_text("utf-8"), feature_version=(3, 8))
    nodes = list(ast.walk(tree))
    plain = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    plain += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in plain} <= sys.stdlib_module_names
    # Subscripting a built-in type outside of an annotation needs Python 3.9.
    values = [node.value for node in nodes if isinstance(node, ast.Assign)]
    subscripted = [each.value for each in values if isinstance(each, ast.Subscript)]
    names = {each.id for each in subscripted if isinstance(each, ast.Name)}
    assert not names & {"dict", "list", "tuple", "set"}


class Agent:
    """The agent's end of the socket."""

    def __init__(self, folder, *options):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / guard.SOCKET))
        self.listener.listen()
        self.listener.settimeout(30)
        self.log = folder / "output.txt"
        with self.log.open("ab") as output:
            command = [sys.executable, "-IS", FILE, "--socket", folder / guard.SOCKET, *options]
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        self.accept()

    def accept(self):
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(30)
        self.lines = self.connection.makefile("rb")
        self.ready = self.read("ready")

    def send(self, **message):
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def start(self, code, **more):
        self.send(do="start", attempt=1, command=[sys.executable, "-uc", code], **more)
        return self.read("started")["pid"]

    def read(self, kind):
        for line in self.lines:
            message = json.loads(line)
            if message["is"] == kind:
                return message
        raise EOFError(kind)

    def close(self):
        for each in (self.lines, self.connection, self.listener):
            each.close()


@pytest.fixture
def agent(tmp_path):
    found = Agent(tmp_path)
    yield found
    found.close()
    found.process.wait(30)


def is_there(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_output_steps_and_the_end(agent):
    agent.start("print('hello'); print('{\"step\": 3, \"loss\": 0.5}'); print('end', end='')")
    assert json.loads(agent.read("line")["text"]) == {"step": 3, "loss": 0.5}
    end = agent.read("ended")
    assert (end["code"], end["last"][-1]) == (0, "end")
    assert agent.log.read_text().startswith("hello\n")
    agent.start("import os, sys; print(os.environ['A'], file=sys.stderr); exit(3)", env={"A": "b"})
    assert agent.read("ended")["code"] == 3
    agent.send(do="exit", code=7)
    assert agent.process.wait(30) == 7


def test_a_program_that_cannot_start(agent, tmp_path):
    agent.send(do="start", attempt=1, command=["/no/such"])
    failed = agent.read("failed")
    assert failed["code"] == guard.NOT_FOUND
    assert failed["message"].startswith("cannot start /no/such: No such file or directory")
    (tmp_path / "a.txt").touch()
    agent.send(do="start", attempt=1, command=[str(tmp_path / "a.txt")])
    failed = agent.read("failed")
    assert failed["code"] == guard.NOT_EXECUTABLE
    assert failed["message"].startswith(f"cannot start {tmp_path / 'a.txt'}: Permission denied")
    agent.send(do="start", attempt=1, command=["ls"], cwd="/no/such")
    assert agent.read("failed")["message"] == "program.working_dir: there is no folder /no/such"


FORKS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                        start_new_session=True)
print("{\\"step\\": 1, \\"pids\\": [%d, %d]}" % (child.pid, away.pid))
"""


@pytest.mark.parametrize("ends", ["by itself", "killed", "without agent"])
def test_nothing_of_it_is_left(agent, ends):
    code = FORKS if ends == "by itself" else FORKS + "time.sleep(600)"
    pid = agent.start(code)
    pids = [pid, *json.loads(agent.read("line")["text"])["pids"]]
    if ends == "killed":
        agent.send(do="kill")
    elif ends == "without agent":
        agent.connection.shutdown(socket.SHUT_RDWR)
        assert agent.process.wait(30) == guard.BEGIN_AGAIN
    if ends != "without agent":
        agent.read("ended")
    assert not [each for each in pids if is_there(each)]


def test_the_next_guard_ends_what_a_killed_one_has_left(tmp_path):
    first = Agent(tmp_path)
    pid = first.start(FORKS + "time.sleep(600)")
    watch = os.pidfd_open(pid)
    pids = json.loads(first.read("line")["text"])["pids"]
    first.process.kill()
    # The kernel ends the program's first process together with the guard.
    assert select.select([watch], [], [], 30)[0]
    os.close(watch)
    assert [each for each in pids if is_there(each)] == pids
    first.close()
    (tmp_path / guard.SOCKET).unlink()
    words = ["--socket", tmp_path / guard.SOCKET, "--sweep"]
    subprocess.run([sys.executable, "-IS", FILE, *words], check=True, timeout=30)
    assert not [each for each in pids if is_there(each)]
    first.process.wait(30)


IGNORES = "import signal, time; signal.signal(15, signal.SIG_IGN); print('{\"step\": 1}')\n"


def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(agent):
    agent.start(IGNORES + "time.sleep(600)")
    agent.read("line")
    agent.process.terminate()
    assert agent.read("signal")["number"] == signal.SIGTERM
    agent.send(do="stop", grace=0.1)
    assert agent.read("ended")["code"] == -signal.SIGKILL


def test_much_output_without_an_end_of_a_line(agent):
    agent.start("import sys\nfor _ in range(50): sys.stdout.buffer.write(b'\\xff' * 100_000)")
    assert agent.read("ended")["last"] == ["\ufffd" * guard.LAST_LETTERS]
    assert agent.log.stat().st_size == 5_000_000


def test_an_agent_that_comes_again_learns_what_happened(tmp_path):
    agent = Agent(tmp_path, "--reconnect", "60", "--termination", tmp_path / "end.txt")
    agent.start("import sys; print('{\"step\": 1}'); sys.stdin.read(); exit(5)")
    agent.lines.close()
    agent.connection.close()
    agent.accept()
    ended = agent.read("ended") if agent.ready["running"] else agent.ready["ended"]
    assert (ended["attempt"], ended["code"]) == (1, 5)
    agent.send(do="exit", code=3, message="two\nlines")
    assert agent.process.wait(30) == 3
    assert (tmp_path / "end.txt").read_text() == "two lines\n"
    agent.close()


def test_a_long_path(tmp_path):
    folder = tmp_path / ("a" * 120)
    folder.mkdir()
    where = guard.reach(str(folder / guard.SOCKET))
    assert len(where) < guard.LONGEST_PATH
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where)
    assert (folder / guard.SOCKET).exists()
