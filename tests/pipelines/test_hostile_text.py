"""Tests that commands display hostile names and texts in records, logs and arguments harmlessly."""

import json
import logging
import random
import shutil
from pathlib import Path

import pytest
import typer.main

from flotilla.pipelines import compile
from flotilla.pipelines.cli.app import app, call
from flotilla.pipelines.doctor import Finding, machine
from flotilla.pipelines.runs import kfp_access
from flotilla.trainer.runtime.masking import printable
from tests.kfp_instance.fixtures import _compiled_before
from tests.pipelines.test_damaged_records import DAMAGED, MODEL, WHOLE, records_of, template

__all__ = ["template"]

PIECES = (
    "\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;http://h/\x1b\\", "\x9b1A", "\x90q\x9c",
    "\0", "\b", "\x7f", "\r", "\r\n", "\n", "\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\t",
    "\u202e", "\u202a", "\u2066", "\u2069", "\u200e", "\u200f", "\u061c", "\u200b",
    "\u2060", "\ufeff",
    "\ud800", "\udcff", "\ufff9", "\U000e0041", "e\u0301", "👩\u200d💻", "größe", "年齢", "²3",
    "[/]", "[red]",
    "[/red]", "[link=file:///etc/passwd]", "[bold", "\\", "\\[", "{x}", "{0.__class__}", "%s",
    "%(a)s", "<script>alert(1)</script>", "--json", "../..", "/", "a", " ", "'", '"', "`", "$(x)",
    "\nflotilla: blessed", "\rflotilla: blessed", "\n[chief-0] blessed", "x" * 300,
    '\n{"event": "run_end", "time": 1.0, "status": "blessed"}',
    "\n2026-01-01 00:00:00,000 INFO blessed",
)  # fmt: skip
OF_A_RUN = (
    ("runs",), ("status", DAMAGED), ("compare", WHOLE, DAMAGED), ("logs", DAMAGED),
    ("logs", DAMAGED, "--verbose"), ("models", "list"), ("models", "show", MODEL),
    ("models", "show", MODEL, "1"), ("checkpoint", "show", DAMAGED),
    ("gc", "--keep-runs", "30d", "--dry-run"), ("gc",), ("cancel", DAMAGED),
    ("replay", DAMAGED, "finish"), ("predict", MODEL, "t.csv"), ("models", "promote", MODEL, "1"),
    ("models", "rollback", MODEL),
)  # fmt: skip
CODES = (0, 1, 2, 3)


def hostile(chance):
    return "".join(chance.choices(PIECES, k=chance.randint(1, 4)))


def spoiled(tree, chance, share=0.3):
    """Return a copy of a JSON tree with hostile text in some names and strings."""
    if isinstance(tree, dict):
        found = {}
        for name, value in tree.items():
            other = hostile(chance) if chance.random() < share / 20 else name
            found[other] = spoiled(value, chance, share)
        if chance.random() < share / 3:
            values = [1.0, 7, hostile(chance), [hostile(chance)], None]
            found[hostile(chance)] = chance.choice(values)
        return found
    if isinstance(tree, list):
        return [spoiled(each, chance, share) for each in tree]
    if isinstance(tree, str) and chance.random() < share:
        return chance.choice([tree, ""]) + hostile(chance)
    return tree


def spoil(path, chance):
    """Insert hostile texts into a record, line by line."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    made = [json.dumps(spoiled(json.loads(line), chance)) for line in lines]
    path.write_text("".join(f"{line}\n" for line in made))


@pytest.fixture
def commands(capfd, monkeypatch, tmp_path, instance, outside_attempts):
    """Return a function that calls a command and returns the problems in its output."""
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("x,y\n" + "".join(f"{each},{each % 2}\n" for each in range(40)))
    # Skip compilation and the dry run, which take seconds; other tests cover them.
    monkeypatch.setattr(compile, "_text_of_pipeline", _compiled_before)
    monkeypatch.setattr(machine, "fits", lambda _config, **_: Finding("ok", "not tried"))
    monkeypatch.setattr(kfp_access, "TOKEN_VOLUME", tmp_path / "no-volume")

    def wrong_with(*arguments):
        arguments = [instance.url if each == "URL" else each for each in arguments]
        capfd.readouterr()
        with monkeypatch.context() as patch:
            # As in the process of a command, no logging handler is configured.
            patch.setattr(logging.getLogger(), "handlers", [])
            try:
                code = call(list(arguments))
            except Exception as error:
                return [f"{arguments}: {type(error).__name__}: {error}"]
        # A request to an endpoint with a hostile name is expected, and rejected.
        outside_attempts.clear()
        out, err = capfd.readouterr()
        lines = [line for text in (out, err) for line in text.split("\n")]
        found = [line for line in lines if "\t" in line or printable(line) != line]
        # Table cells may contain any text, so only standard error is searched for forged lines.
        said = [] if "--json" in arguments else err.split("\n")
        forged = ("flotilla: blessed", "Traceback", "2026-01-01")
        found += [line for line in said if line.startswith(forged)]
        found += [] if code in CODES else [f"exit code {code}"]
        return [f"{' '.join(arguments)!r}: {line!r}" for line in found]

    return wrong_with


NAMED = (
    ("status", "NAME"), ("logs", "NAME"), ("compare", "NAME", "NAME"), ("compare", WHOLE, "NAME"),
    ("cancel", "NAME"), ("open", "NAME"), ("runs", "--workdir", "NAME"),
    ("logs", DAMAGED, "--task", "NAME"),
    ("logs", DAMAGED, "--step", "NAME"), ("models", "list", "NAME"), ("models", "show", "NAME"),
    ("models", "show", MODEL, "NAME"), ("models", "list", "--root", "NAME"),
    ("models", "promote", "NAME", "1"), ("models", "rollback", "NAME"),
    ("checkpoint", "show", "NAME"), ("checkpoint", "show", "file:///NAME"),
    ("gc", "--dry-run", "--keep-runs", "NAME"),
    ("gc", "--dry-run", "--keep-runs", "3", "--root", "NAME"), ("manifest", "NAME"),
    ("manifest", "--set", "NAME"), ("manifest", "--set", "name=NAME"),
    ("manifest", "--set", "data.label=NAME", "--set", "cluster.launcher=tfjob"),
    ("manifest", "--set", "model.args={NAME: 1}", "--set", "cluster.launcher=jobset"),
    ("compile", "-o", "xNAME"), ("compile", "--set", "data.source=NAME", "-o", "x.yaml"),
    ("predict", "NAME", "NAME"), ("predict", MODEL, "NAME", "--to", "NAME"),
    ("replay", "NAME", "NAME"), ("replay", DAMAGED, "NAME"), ("completion", "NAME"), ("NAME",),
    ("--NAME",),
    ("sweep", "--over", "NAME"), ("run", "--resume", "NAME"), ("run", "xNAME"), ("train", "xNAME"),
    ("prepare", "--set", "data.source=NAME"), ("prepare", "--label", "NAME"),
    ("run", "--set", "data.source=xNAME"), ("train", "--dataset", "NAME"),
    ("sweep", "--metric", "NAME"), ("sweep", "--compile", "--image", "NAME", "-o", "x.yaml"),
    ("predict", MODEL, "NAME", "--columns", "NAME"), ("predict", MODEL, "--split", "NAME"),
    ("models", "promote", MODEL, "NAME"), ("gc", "--yes", "--keep-versions", "NAME"),
    ("check", "xNAME"), ("check", "--set", "name=NAME", "--set", "steps=NAME"),
    ("check", "--set", "data.source=xNAME", "--label", "NAME"), ("check", "--code", "xNAME"),
    ("doctor", "xNAME"), ("doctor", "--workdir", "NAME"), ("doctor", "--endpoint", "NAME"),
    ("doctor", "--service-account", "NAME", "--mount", "NAME"),
    ("doctor", "--set", "tracking.mlflow.uri=NAME"), ("doctor", "--set", "storage.root=xNAME"),
    ("init", "xNAME"), ("init", "t.csv", "--label", "NAME", "-o", "x.yaml"),
    ("init", "t.csv", "--set", "name=NAME", "-o", "xNAME/y"), ("configs", "NAME"),
    ("upload", "NAME"), ("upload", "--name", "NAME"), ("upload", "--image", "NAME"),
    ("upload", "--env", "NAME=NAME"), ("upload", "--node-selector", "NAME"),
    ("submit", "--name", "NAME"), ("submit", "--experiment", "NAME"), ("submit", "xNAME"),
    ("submit", "--pipeline", "NAME"), ("submit", "--version", "NAME"), ("submit", "--file", "NAME"),
    ("submit", "--pipeline-root", "NAME"), ("submit", "--service-account", "NAME"),
    ("schedule", "--cron", "NAME"), ("schedule", "--every", "1h", "--name", "NAME"),
    ("schedule", "--every", "NAME"), ("schedule", "--every", "1h", "--timezone", "NAME"),
    ("reschedule", "NAME"), ("unschedule", "NAME"), ("upload", "--endpoint", "NAME"),
    ("upload", "--token-file", "NAME"), ("upload", "-n", "NAME"), ("runs", "--endpoint", "URL"),
    ("status", "NAME", "--endpoint", "URL"), ("logs", "NAME", "--endpoint", "URL"),
    ("cancel", "NAME", "--endpoint", "URL"), ("replay", "NAME", "finish", "--endpoint", "URL"),
    ("runs", "--endpoint", "URL", "--experiment", "NAME"),
)  # fmt: skip
ON_AN_INSTANCE = ("upload", "submit", "schedule", "reschedule", "unschedule")


NOT_OF_A_WORKDIR = (
    "check", "manifest", "compile", "completion", "configs", "init", "NAME", "--NAME",
    *ON_AN_INSTANCE,
)  # fmt: skip


def names(template, commands, seed, count, some):
    """Pass hostile names to each command at least once; return the failures."""
    chance = random.Random(seed)
    wrong = []
    first = {command[0]: command for command in chance.sample(some, len(some))}
    rest = [chance.choice(some) for _ in range(2 * count)]
    for some_commands in zip(*[iter([*first.values(), *rest])] * 2, strict=False):
        # A process argument cannot contain NUL or a lone surrogate.
        name = hostile(chance).replace("\0", "\x01").encode("utf-8", "replace").decode()
        for command in some_commands:
            if command[0] in ON_AN_INSTANCE and "--endpoint" not in command:
                command = (*command, "--endpoint", "URL")  # noqa: PLW2901
            given = [each.replace("NAME", name) for each in command]
            if "--workdir" not in command and command[0] not in NOT_OF_A_WORKDIR:
                given += ["--workdir", str(template)]
            wrong += commands(*given)
    return wrong


def test_every_command_is_given_hostile_names():
    tree, tried = typer.main.get_command(app), {command[:2] for command in NAMED}
    for name, command in tree.commands.items():
        for each in getattr(command, "commands", {"": command}):
            assert any(found[0] == name and each in ("", found[1]) for found in tried), (name, each)


@pytest.mark.parametrize("count", [5, pytest.param(500, marks=pytest.mark.slow)])
def test_no_name_is_a_command_or_forges_a_line(template, commands, count):
    wrong = names(template, commands, count, count, NAMED)
    assert not wrong, "\n".join(wrong)


def attack(template, commands, folder, seed, records):
    """Insert hostile texts into records and logs in a copy of the template; return the problems."""
    chance = random.Random(seed)
    runs = folder / f"runs-{seed}"
    shutil.copytree(template, runs)
    found = chance.choices(records_of(runs), k=records)
    for record in found:
        spoil(runs / record, chance)
    said = "".join(f"{hostile(chance)}\n" for _ in range(9))
    log = runs / DAMAGED / "pipeline.log"
    log.write_text(said, encoding="utf-8", errors="replace")
    wrong = []
    for command in OF_A_RUN:
        as_json = ["--json"] if chance.random() < 0.3 else []
        wrong += commands(*command, "--workdir", str(runs), *as_json)
    shutil.rmtree(runs)
    return wrong


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 102), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_text_of_a_record_or_a_log_is_a_command_or_forges_a_line(
    template, commands, tmp_path, seeds
):
    wrong = [each for seed in seeds for each in attack(template, commands, tmp_path, seed, 20)]
    assert not wrong, "\n".join(wrong)
