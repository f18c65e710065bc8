"""The console script before its imports are done, and where its output leads nowhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from tests.pipelines.called import FLOTILLA

TIMED = "import time:"
# Bytes that it may write before anybody reads them, so that it is not done before it is signalled.
AHEAD = 4096


@pytest.mark.parametrize("module", ["typer.core", "pydantic_core", "pipelines.cli.display"])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_while_it_loads_is_one_line(tmp_path, module, as_json):
    settings = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    command = [FLOTILLA, "train", "no/such.yaml", *(["--json"] if as_json else [])]
    with subprocess.Popen(
        command, cwd=tmp_path, env=settings, stdout=-1, stderr=-1, text=True, pipesize=AHEAD
    ) as process:
        names = (line.split("|")[-1].strip() for line in process.stderr)
        # What was imported before is out of anybody's hands.
        assert "pipelines.cli.__main__" in names
        assert module in names
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    said = [line for line in err.splitlines() if not line.startswith(TIMED)]
    assert (process.returncode, said) == (130, ["flotilla: interrupted"])
    if as_json:
        assert json.loads(out)["status"] == "interrupted"
    else:
        assert out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 1, "cannot write to standard output: No space left on device"),
        (["run", "no/such.yaml", "--json"], 2, "cannot read the configuration no/such.yaml"),
        (["compile", "--image", "h/n:t", "--json"], 1, "cannot write to standard output: No space"),
    ],
)
def test_a_full_output_is_one_line(tmp_path, arguments, code, said):
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(
            [FLOTILLA, *arguments],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("wrote ")]
    assert (ended.returncode, len(lines)) == (code, 1), ended.stderr
    assert lines[0].startswith(f"flotilla: {said}")


def test_where_nobody_hears_the_exit_code_still_arrives(tmp_path):
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(
            [FLOTILLA, "run", "no/such.yaml", "--json"],
            cwd=tmp_path,
            stdout=full,
            stderr=full,
            check=False,
        )
    assert ended.returncode == 2
