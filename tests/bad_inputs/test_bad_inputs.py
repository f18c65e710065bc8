"""Wrong calls of every command and option: the exit code, a one-line error, and no files left."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from flotilla.pipelines.cli import __main__ as flotilla
from flotilla.pipelines.cli.app import app
from flotilla.trainer import __main__ as trainer
from tests.bad_inputs.files import prepare, tree
from tests.bad_inputs.table import Row, rows

ROWS = rows()
KEYS = {"status", "run_id", "metrics", "artifacts", "message"}
# The KFP SDK waits this long between retries. Tests skip the wait, because a closed port stays
# closed.
NO_PAUSE = "urllib3.util.retry.Retry.get_backoff_time"


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with its name as a tuple of words."""
    groups = [((), typer.main.get_command(app))]
    while groups:
        words, command = groups.pop()
        below = getattr(command, "commands", None)
        if below is None:
            yield words, command
        else:
            groups += [((*words, name), each) for name, each in below.items()]


COMMANDS = dict(commands())


def command_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the leading words that name a command; empty if they name none."""
    return next((words[:size] for size in (2, 1) if words[:size] in COMMANDS), ())


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    yield tmp_path
    signal.signal(signal.SIGINT, before)


def called(row: Row, words: tuple[str, ...], monkeypatch, capsys) -> tuple[Any, str, str]:
    """Call a program in this process; return exit code, standard output and standard error."""
    for name, value in row.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(NO_PAUSE, lambda _: 0)
    # Without this patch, the call would set `TMPDIR` and `tempfile.tempdir` for later tests.
    monkeypatch.setattr(flotilla, "_own_temporary", lambda: None)
    monkeypatch.setattr(sys, "argv", [row.program, *words])
    main = trainer.main if row.program == "trainer" else flotilla.main
    with pytest.raises(SystemExit) as ended:
        main(*([list(words)] if row.program == "trainer" else []))
    return (ended.value.code, *capsys.readouterr())


def in_a_shell(row: Row, folder: Path) -> tuple[int, str, str]:
    """Run a shell line with the `flotilla` and `python` of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["sh", "-c", row.words[0]],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def children() -> set[str]:
    """Return the ids of the child processes, without a look at all processes of the machine."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {number for task in tasks for number in task.read_text().split()}


def with_json(words: tuple[str, ...]) -> tuple[str, ...]:
    size = len(command_of(words))
    return (*words[:size], "--json", *words[size:]) if size else words


@pytest.mark.parametrize("row", [pytest.param(each, id=each.text[:60]) for each in ROWS])
def test_a_bad_input_is_one_line(row, here, monkeypatch, capsys):
    prepare(row.text, here)
    before, others = tree(here), children()
    if row.program == "sh":
        code, out, err = in_a_shell(row, here)
    else:
        words = with_json(row.words) if row.program == "flotilla" else row.words
        code, out, err = called(row, words, monkeypatch, capsys)
        if "--json" in words:
            check_json(out, err)
            out = ""
    assert out == ""
    assert err.count("\n") == 1, err
    assert row.line in err
    assert "HIDDEN" not in err
    assert err.startswith(("flotilla: ", "python -m flotilla.trainer"))
    assert code == row.code
    assert tree(here) == before if here.exists() else row.program == "sh"
    # A process of an earlier test may exit during this test.
    assert others.issuperset(children())


def check_json(out: str, err: str) -> None:
    assert out.count("\n") == 1, out
    answer = json.loads(out)
    assert set(answer) == KEYS
    assert answer["status"] == "failed"
    assert err == f"flotilla: {answer['message']}\n"


def test_the_table_has_each_call_once():
    texts = [row.text for row in ROWS]
    assert len(texts) == len(set(texts)) >= 300


def test_the_table_has_every_command_and_every_option():
    called = [(command_of(row.words), row.words) for row in ROWS if row.program == "flotilla"]
    assert {command for command, _ in called} >= set(COMMANDS)
    for command, definition in COMMANDS.items():
        given = {word.split("=")[0] for words in called if words[0] == command for word in words[1]}
        for option in definition.params:
            names = {*option.opts, *option.secondary_opts}
            is_option = option.param_type_name == "option" and "--json" not in names
            assert not is_option or given & names, f"{' '.join(command)} {option.opts}: no row"
