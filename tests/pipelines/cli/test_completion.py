"""Tests completion: the candidates, which never fail, the protocol of bash, and a real bash."""

import os
import pty
import select
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from flotilla.components.table import STEPS
from flotilla.pipelines.cli import app, completion
from flotilla.pipelines.cli.completion import VARIABLE, complete_assignments, rejoin_words
from flotilla.trainer import storage
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import ConfigError
from tests.pipelines.conftest import register_models

RUNS = ["digits-20260101-000000-aaaa", "wine-20260102-000000-bbbb"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Create two runs, a sweep, and a model with two versions; version 1 is the champion."""
    monkeypatch.chdir(tmp_path)
    for age, run in enumerate(reversed(RUNS)):
        Path("runs", run).mkdir(parents=True)
        config = Path("runs", run, "config.json")
        config.write_text("{}")
        os.utime(config, (1000 - age, 1000 - age))
    Path("runs", "sweep-1").mkdir()
    Path("runs", "sweep-1", "sweep.journal").write_text("")
    register_models(storage.uri_of(tmp_path / "runs"), tmp_path, 2, champions=1)
    return tmp_path


def context(**params):
    return SimpleNamespace(params=params)


def values(found):
    return [value for value, _ in found]


def test_runs_sweeps_models_and_versions_are_offered(here):
    assert values(completion.complete_runs(context())) == RUNS[::-1]
    one = context(workdir=here / "runs", runs=[RUNS[0]])
    assert values(completion.complete_runs(one)) == [RUNS[1]]
    assert completion.complete_runs(context(workdir=here / "absent")) == []
    assert values(completion.complete_sweeps(context())) == ["sweep-1"]
    assert values(completion.complete_models(context())) == ["digits"]
    expected = [("2", ""), ("1", "the champion")]
    assert completion.complete_versions(context(name="digits")) == expected
    assert values(completion.complete_model_versions(context(), "di")) == ["digits"]
    named = completion.complete_model_versions(context(), "digits@")
    assert values(named) == ["digits@2", "digits@1"]
    assert completion.complete_versions(context(name="absent")) == []


@pytest.mark.parametrize(
    "name",
    ["$(touch x)", "\\$(touch x)", "`x`", "a b", "a;b", "a'b", "--json", "\x1b[2J", "a\nb", "*"],
)
def test_what_a_shell_would_evaluate_is_not_offered(here, name):
    for file in ("config.json", "sweep.journal"):
        Path("runs", name).mkdir(exist_ok=True)
        Path("runs", name, file).write_text("{}")
    names = storage.join(storage.uri_of(here / "runs"), "registry", "names")
    (here / "empty").mkdir()
    storage.publish(
        here / "empty", storage.join(names, name), kind=registry.NAME, fields={"name": name}
    )
    assert values(completion.complete_runs(context())) == RUNS[::-1]
    assert values(completion.complete_sweeps(context())) == ["sweep-1"]
    assert values(completion.complete_models(context())) == ["digits"]


def test_steps_stages_and_examples_are_offered():
    found = dict(completion.complete_steps())
    assert {row.name for row in STEPS if not row.is_exit_step} <= set(found)
    assert found["validate_data"] == "a stage of prepare_data"
    assert "digits.yaml" in values(completion.complete_examples())


@pytest.mark.usefixtures("here")
def test_nothing_is_asked_over_the_network_and_what_cannot_be_read_is_left_out(monkeypatch):
    def fail(*_given):
        raise OSError("unplugged")

    for root in ("s3://bucket/a", "gs://bucket", "nonsense://", "\0"):
        assert completion.complete_models(context(root=root)) == []
        assert completion.complete_versions(context(root=root, name="digits")) == []
    monkeypatch.setattr(registry, "names", fail)
    monkeypatch.setattr(os, "listdir", fail)
    assert completion.complete_models(context()) == []
    assert completion.complete_runs(context()) == []
    assert completion.complete_versions(context()) == []


def offered(incomplete):
    return [value for value, _ in complete_assignments(incomplete) if value.startswith(incomplete)]


def keys(path=""):
    for each in offered(path):
        if each.endswith("."):
            yield from keys(each)
        else:
            yield each


def leaves(model, path=""):
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{path}{name}.")
        else:
            yield f"{path}{name}="


def test_every_key_can_be_reached_and_is_described():
    assert set(leaves(Config)) <= set(keys())
    found = dict(complete_assignments("training."))
    assert found["training.stall_timeout="]


@pytest.mark.parametrize(
    ("incomplete", "expected"),
    [
        ("tr", ["training."]),
        ("training.hand", ["training.hand_on="]),
        ("training.hand_on=", ["training.hand_on=best", "training.hand_on=last"]),
        ("training.jit_compile=t", ["training.jit_compile=true"]),
        ("training.steps=", ["training.steps=1500", "training.steps=auto"]),
        ("cluster.launcher=j", ["cluster.launcher=jobset"]),
        ("training.optimizer.name=ad", [
            f"training.optimizer.name={name}"
            for name in ("adam", "adadelta", "adafactor", "adagrad", "adamax", "adamw")
        ]),
        ("data.image.channels=", [f"data.image.channels={number}" for number in (3, 1, 4)]),
        ("training.nothing=", []),
        ("nothing.", []),
        ("task.outputs.", []),
        ("....", []),
        ("=", []),
    ],
)  # fmt: skip
def test_what_is_offered(incomplete, expected):
    assert offered(incomplete) == expected


@pytest.mark.parametrize(
    "key", ["model.name", "task.name", "training.strategy", "training.optimizer.name"]
)
def test_the_names_are_those_that_the_configuration_knows(key):
    with pytest.raises(ConfigError) as refused:
        load_config(None, [f"{key}=qqqqqqqqqqqqqqqq"])
    listed = str(refused.value).partition("(one of ")[2].rpartition(")")[0]
    known = {each for each in listed.split(", ") if each.isidentifier()}
    assert known == {each.partition("=")[2] for each in offered(f"{key}=")}


FLOTILLA = Path(sys.executable).with_name("flotilla")
PATH = f"{FLOTILLA.parent}:{os.environ['PATH']}"
RUN = RUNS[0]
SECONDS = 60


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs", RUN).mkdir(parents=True)
    Path("runs", RUN, "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def completed(folder, monkeypatch, capsys):
    assert folder.is_dir()

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
def typed(folder):
    """Return a function that types into an interactive bash and returns the displayed line."""
    script = folder / "completion"
    with script.open("w") as file:
        subprocess.run([FLOTILLA, "completion", "bash"], stdout=file, check=True)
    process, screen = pty.fork()
    if not process:
        # Only `exec` is safe in the forked child.
        variables = {"PATH": PATH, "PS1": "ready>", "TERM": "dumb", "HOME": str(folder)}
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
