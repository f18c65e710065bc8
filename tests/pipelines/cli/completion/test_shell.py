"""Tests what a shell completes when the user presses Tab, by its protocol and in a real bash."""

import os
import pty
import select
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.pipelines.cli import app
from flotilla.pipelines.cli.completion import VARIABLE, rejoin_words

FLOTILLA = Path(sys.executable).with_name("flotilla")
PATH = f"{FLOTILLA.parent}:{os.environ['PATH']}"
RUN = "digits-20260101-000000-aaaa"
SECONDS = 60


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs", RUN).mkdir(parents=True)
    Path("runs", RUN, "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def completed(here, monkeypatch, capsys):
    assert here.is_dir()

    def complete(line):
        monkeypatch.setenv(VARIABLE, "complete_bash")
        monkeypatch.setenv("COMP_LINE", line)
        assert app.call([]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out.split()

    return complete


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flotilla tra", ["train"]),
        ("flotilla run --work", ["--workdir"]),
        ("flotilla models ro", ["rollback"]),
        ("flotilla status ", [RUN]),
        ("flotilla open --workdir runs dig", [RUN]),
        ("flotilla open --workdir elsewhere ", []),
        ("flotilla train --resume ", [RUN]),
        ("flotilla compare ", [RUN]),
        (f"flotilla compare {RUN} ", []),
        ("flotilla run --set training.hand_on=la", ["training.hand_on=last"]),
        ("flotilla run --set 'training.hand_on=la", ["training.hand_on=last"]),
        ("flotilla sweep --set training.hand", ["training.hand_on="]),
        (f"flotilla replay {RUN} ex", ["export_model"]),
        ("flotilla logs --step check_", ["check_gate"]),
        ("flotilla completion f", ["fish"]),
        ("flotilla predict --to c", ["csv"]),
        ("flotilla run --resume 'a \" b", []),
    ],
)
def test_the_protocol_of_bash(completed, line, expected):
    assert completed(line) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=b c", ["a=b", "c"]),
        ("a 'b c' d", ["a", "b c", "d"]),
        ("a ", ["a", ""]),
        ("a 'b c", ["a", "b c"]),
        ('a "b', ["a", "b"]),
        ("ä@ö:1", ["ä@ö:1"]),
    ],
)
def test_words_are_divided_at_spaces_alone(text, expected):
    environment = {"COMP_LINE": text}
    rejoin_words(environment)
    assert shlex.split(environment["COMP_WORDS"]) == expected
    assert int(environment["COMP_CWORD"]) + 1 == len(expected)


def test_a_script_of_before_still_works(monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "flotilla tra")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.delenv("COMP_LINE", raising=False)
    assert app.call([]) == 0
    assert capsys.readouterr().out.split() == ["train"]


@pytest.fixture
def typed(here):
    """Return a function that types into an interactive bash and returns the displayed line."""
    script = here / "completion"
    with script.open("w") as file:
        subprocess.run([FLOTILLA, "completion", "bash"], stdout=file, check=True)
    process, screen = pty.fork()
    if not process:
        # Only `exec` is safe in the forked child.
        variables = {"PATH": PATH, "PS1": "ready>", "TERM": "dumb", "HOME": str(here)}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], variables)

    def read(until):
        found = b""
        while not found.endswith(until.encode()):
            assert select.select([screen], [], [], SECONDS)[0], found
            found += os.read(screen, 1024)
        return found.decode()

    def press(line, expected):
        # Ctrl-U clears the line of the previous test.
        os.write(screen, f"\x15{line}\t".encode())
        return read(expected)

    read("ready>")
    os.write(screen, f"source {script}\n".encode())
    read("ready>")
    yield press
    os.write(screen, b"\x15exit\n")
    os.waitpid(process, 0)
    os.close(screen)


def test_bash_shows_what_is_completed(typed):
    typed("flotilla status dig", f"flotilla status {RUN} ")
    typed("flotilla run --set training.hand", "flotilla run --set training.hand_on=")
    typed("flotilla run --set training.hand_on=la", "flotilla run --set training.hand_on=last ")
