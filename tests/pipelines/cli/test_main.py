"""Tests how the console script starts: signals while it loads, and closed streams."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.pipelines.cli.__main__ import ANSWER, INTERRUPTED
from flotilla.pipelines.cli.exit import failure

FLOTILLA = Path(sys.executable).with_name("flotilla")
# Modules in the order in which `flotilla prepare` loads them after it sets its signal handlers.
FIRST, COMMANDS, LAST = (
    "flotilla.pipelines.cli.app",
    "flotilla.pipelines.cli.kfp",
    "flotilla.components.records.record",
)
# Capacity of the pipe in bytes, which is so small that the process cannot finish before the signal.
AHEAD = 4096


@pytest.fixture(autouse=True)
def heard():
    """Let child processes receive SIGHUP, which they ignore if this process runs under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def interrupted(tmp_path):
    """Return a function that interrupts a command while it loads a module."""

    def send(module, number, *arguments):
        # With `-v`, Python writes a line to standard error for each module that it loads.
        command = [sys.executable, "-v", "-m", "flotilla.pipelines.cli", *arguments]
        paths = {"PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path)}
        with subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | paths, stdout=-1, stderr=-1, text=True,
            pipesize=AHEAD,
        ) as process:  # fmt: skip
            place = f"{module.replace('.', '/')}."
            for line in process.stderr:
                if place in line:
                    break
            else:
                raise AssertionError(f"{module} was never loaded")
            process.send_signal(number)
            out, err = process.communicate()
        # The signal may arrive in the middle of a line.
        own = re.findall(r"flotilla: .*|Traceback.*", err)
        return process.returncode, out, own

    return send


@pytest.mark.parametrize(
    ("module", "number"),
    [
        (FIRST, signal.SIGHUP),
        (FIRST, signal.SIGTERM),
        (COMMANDS, signal.SIGTERM),
        (COMMANDS, signal.SIGINT),
        (LAST, signal.SIGTERM),
    ],
)
def test_a_signal_while_the_command_loads_is_an_interrupt(interrupted, module, number, tmp_path):
    assert interrupted(module, number, "prepare") == (130, "", ["flotilla: interrupted"])
    assert list(tmp_path.iterdir()) == []


def test_the_interrupt_is_the_answer_of_any_command_where_one_is_asked_for(interrupted):
    code, out, own = interrupted(COMMANDS, signal.SIGTERM, "prepare", "--json")
    assert (code, own) == (130, ["flotilla: interrupted"])
    assert out.count("\n") == 1
    assert out.startswith('{"status": "interrupted"')
    expected = failure("interrupted", INTERRUPTED)
    assert ANSWER.decode() == f"{expected.json()}\n"
    assert expected.status == "interrupted"


def test_a_hang_up_that_is_ignored_stays_ignored():
    program = (
        "import signal\n"
        "from flotilla.pipelines.cli.__main__ import _catch\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "_catch()\n"
        "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGHUP)", "sys.exit(3)", "1 / 0"])
def test_a_closed_terminal_is_a_request_to_end_and_no_end_leaves_a_temporary_file(tmp_path, end):
    program = (
        "import os, signal, sys, tempfile, time\n"
        "from flotilla.pipelines.cli.__main__ import _catch, _own_temporary\n"
        "from flotilla.trainer.runtime.signals import handle_interrupts\n"
        "_catch()\n_own_temporary()\n"
        "open(os.path.join(tempfile.mkdtemp(), 'half'), 'w').close()\n"
        "with handle_interrupts(lambda: sys.exit(3)):\n"
        f"    {end}\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == (1 if "/" in end else 3)
    assert list(tmp_path.iterdir()) == []


COMMANDS_THAT_WRITE = [
    (["gc", "--json", "--workdir", "runs"], 0),
    (["configs", "absent", "--json"], 2),
    *(
        pytest.param(words.split(), code, marks=pytest.mark.slow)
        for words, code in {
            "run --help": 0, "--help": 0, "--version": 0, "manifest": 0, "nonsense": 2,
            "run no/such.yaml --json": 2, "compile --image h/n:t --json": 0,
        }.items()
    ),
]  # fmt: skip


def called(arguments, folder, **streams):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    ended = subprocess.run([FLOTILLA, *arguments], cwd=folder, check=False, **streams)
    return ended.returncode, (ended.stderr or b"").decode()


def requires_no_reader(arguments, code, folder, stream):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended, err = called(arguments, folder, **{stream: writer})
    finally:
        os.close(writer)
    assert ended == code
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), COMMANDS_THAT_WRITE)
def test_a_reader_of_answers_that_has_gone_changes_no_exit_code(arguments, code, tmp_path):
    requires_no_reader(arguments, code, tmp_path, "stdout")


def test_lines_that_nobody_can_read_change_no_exit_code(tmp_path):
    requires_no_reader(["gc", "--workdir", "runs"], 0, tmp_path, "stderr")
    requires_no_reader(["nonsense"], 2, tmp_path, "stderr")
    with open("/dev/full", "wb") as full:
        assert called(["gc", "--workdir", "runs"], tmp_path, stderr=full)[0] == 0


# `test_where_nobody_hears_the_exit_code_still_arrives` does this with a mistake.
# Leave out the first command, because `test_app` covers JSON output with `completion --json`.
@pytest.mark.parametrize(("arguments", "code"), COMMANDS_THAT_WRITE[1:])
def test_an_answer_that_cannot_be_written_is_a_failure_of_one_line(arguments, code, tmp_path):
    with open("/dev/full", "wb") as full:
        ended, err = called(arguments, tmp_path, stdout=full)
    [line] = [line for line in err.splitlines() if not line.startswith("wrote ")]
    said = "cannot write to standard output: No space left on device" if not code else ""
    assert (ended, line.startswith(f"flotilla: {said}")) == (code or 1, True)


TIMED = "import time:"


@pytest.mark.parametrize(
    ("module", "as_json"),
    [("typer.core", True), ("pydantic_core", False), ("flotilla.pipelines.cli.display", True)],
)
def test_an_interrupt_while_it_loads_is_one_line(tmp_path, module, as_json):
    settings = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    command = [FLOTILLA, "train", "no/such.yaml", *(["--json"] if as_json else [])]
    with subprocess.Popen(
        command, cwd=tmp_path, env=settings, stdout=-1, stderr=-1, text=True, pipesize=AHEAD
    ) as process:
        names = (line.split("|")[-1].strip() for line in process.stderr)
        # Python itself handles an interrupt that arrives before this import.
        assert "flotilla.pipelines.cli.__main__" in names
        assert module in names
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    said = [line for line in err.splitlines() if not line.startswith(TIMED)]
    assert (process.returncode, said) == (130, ["flotilla: interrupted"])
    if as_json:
        assert json.loads(out)["status"] == "interrupted"
    else:
        assert out == ""


def test_where_nobody_hears_the_exit_code_still_arrives(tmp_path):
    with open("/dev/full", "wb") as full:
        words = ["run", "no/such.yaml", "--json"]
        assert called(words, tmp_path, stdout=full, stderr=full)[0] == 2
