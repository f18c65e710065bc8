"""Tests that `--json` prints exactly the keys that the help of a command documents."""

import json
import math
import re
from pathlib import Path

import pytest
import typer

from docs.build.reference import command_line, flat
from flotilla.pipelines.cli import app
from flotilla.pipelines.cli.app import call
from flotilla.pipelines.cli.exit import Answer, answers, write
from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from tests.pipelines.conftest import register_models

COMMANDS = dict(flat(typer.main.get_command(app.app).commands))
RUNS = ["digits-20260101-000000-aaaa", "digits-20260102-000000-bbbb"]
CALLS = {
    "compare": RUNS,
    "gc": ["--keep-runs", "30d", "--dry-run"],
    "models list": [],
    "models show": ["digits"],
    "models promote": ["digits", "1"],
    "models rollback": ["digits"],
}


@pytest.fixture
def workdir(tmp_path):
    """Create two runs, and a model whose version 2 replaced version 1 as the champion."""
    folder = tmp_path / "runs"
    for run in RUNS:
        (folder / run).mkdir(parents=True)
        (folder / run / "config.json").write_text(parse_config({}).model_dump_json())
    root = storage.uri_of(folder)
    register_models(root, tmp_path, 2, champions=2, run_id=RUNS[0], metrics={})
    return folder


def answer(capsys, *words, code=0):
    assert app.call([*words, "--json"]) == code
    [line] = capsys.readouterr().out.splitlines()
    return json.loads(line, parse_constant=pytest.fail)


def always():
    head = command_line(typer.main.get_command(app.app)).partition("\n## `flotilla ")[0]
    keys = head.partition("## `--json`")[2]
    return set(re.findall(r"^\| `(\w+)`", keys, re.MULTILINE))


def added(name):
    return set(re.findall(r"`(\w+)`", COMMANDS[name].epilog or ""))


@pytest.mark.parametrize("name", CALLS)
def test_the_keys_are_those_of_the_help(name, workdir, capsys):
    found = answer(capsys, *name.split(), *CALLS[name], "--workdir", str(workdir))
    assert set(found) == always() | added(name)


def test_the_keys_of_a_manifest_a_compilation_and_a_failure(capsys, workdir):
    assert set(answer(capsys, "manifest")) == always() | added("manifest")
    found = answer(capsys, "compile", "-o", f"{workdir}/a.yaml")
    assert set(found) == always() | added("compile")
    assert set(found["artifacts"]) == {"pipeline"}
    found = answer(capsys, "models", "show", "nothing", "--workdir", str(workdir), code=2)
    assert set(found) == always()
    assert found["status"] == "failed"
    assert "nothing" in found["message"]


def test_an_object_is_what_json_can_say():
    """Non-finite numbers become null, credentials are masked, and other text is unchanged."""
    metrics = {"cookie": 0.5, "loss": math.nan, "bounds": [math.inf, (1, -math.inf)]}
    message = "s3://me:secret@bucket has \x1b[1m"
    text = Answer(metrics=metrics, message=message, more={"at": Path("a")}).json()
    found = json.loads(text, parse_constant=pytest.fail)
    assert found["metrics"] == {"cookie": 0.5, "loss": None, "bounds": [None, [1, None]]}
    assert found["message"] == "s3://***@bucket has \x1b[1m"
    assert found["at"] == "a"


@answers
def _broken() -> Answer:
    write("for people\n")
    raise ZeroDivisionError("nothing\nto divide by")


def test_a_bug_is_an_object_as_well(capsys):
    with pytest.raises(typer.Exit) as ended:
        _broken(as_json=True)
    out, err = capsys.readouterr()
    assert ended.value.exit_code == 1
    assert json.loads(out)["message"] == "internal error: ZeroDivisionError: nothing to divide by"
    assert err.startswith("for people\nTraceback")
    with pytest.raises(ZeroDivisionError):
        _broken(as_json=False)


def test_compiling_says_how_it_is_started(tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    words = ["--compile", "-o", str(file), "--json", "--set", "training.batch_size=16,32"]
    assert call(["sweep", *words]) == 0
    out, err = capsys.readouterr()
    assert f"--file {file}" in err
    answer = json.loads(out.splitlines()[-1])
    assert answer["artifacts"] == {"pipeline": str(file)}
    settings = [each["settings"]["training.batch_size"] for each in answer["trials"]]
    assert settings == ["16", "32"]
