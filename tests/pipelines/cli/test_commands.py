"""Tests the help: its groups and sentences, and that its examples can be copied and run."""

import shlex

import pytest
import typer

from docs.build.reference import flat
from flotilla.pipelines.cli import app
from flotilla.trainer.config.load import load_config

GROUP = typer.main.get_command(app.app)
CALLED = dict(flat(GROUP.commands))
# Words that begin a sentence without a subject, such as "Of SOURCE, to be predicted".
PREPOSITIONS = {"At", "By", "For", "From", "In", "Of", "On", "Such", "To", "Where", "Which", "With"}
WIDTH = 80


@pytest.fixture(autouse=True)
def fresh_command():
    """Discard the cached command, which keeps the help options of the context that came first."""
    typer.main.get_command.cache_clear()


def helped(capsys, words):
    assert app.call(words.split()) == 0
    return capsys.readouterr().out


def test_every_command_is_in_the_table_and_in_a_group_in_this_order(capsys):
    assert set(app.COMMANDS) == set(CALLED)
    displayed = {each.rich_help_panel for each in GROUP.commands.values()}
    panels = (app.RUN, app.CLUSTER, app.MODELS, app.DATA)
    assert displayed == {*panels, app.HOUSEKEEPING}
    text = helped(capsys, "--help")
    panels = (app.RUN, app.CLUSTER, app.MODELS, app.DATA)
    places = [text.index(f"─ {panel} ─") for panel in (*panels, app.HOUSEKEEPING)]
    assert places == sorted(places)
    assert "─ Commands ─" not in text
    assert "<bool>" not in text


@pytest.mark.parametrize("words", ["", "models", "run", "models promote"])
def test_the_short_option_is_the_long_one(capsys, words):
    assert helped(capsys, f"{words} -h") == helped(capsys, f"{words} --help")


def test_the_examples_end_the_help_unbroken_and_can_be_called(capsys):
    for name in app.COMMANDS:
        lines = helped(capsys, f"{name} -h").splitlines()
        assert lines[-3:-1] == [f"   {each}" for each in app.find_examples(name)], name
    assert {len(set(app.find_examples(name))) for name in app.COMMANDS} == {2}
    for name, line in [(each, e) for each in app.COMMANDS for e in app.find_examples(each)]:
        assert len(line) + 3 <= WIDTH + 10, line
        words = shlex.split(line.partition(" > ")[0])
        given = name.split()
        assert words[: 1 + len(given)] == ["flotilla", *given], line
        context = CALLED[name].make_context(name, words[1 + len(given) :])
        assigned = context.params.get("assignments") or []
        if name != "sweep":
            load_config(None, assigned)


def test_help_is_in_sentences():
    for each in [each for command in (GROUP, *CALLED.values()) for each in command.params]:
        assert each.help[0].isupper(), each.opts
        assert each.help.endswith("."), each.opts
        assert each.help.split()[0].strip(",:") not in PREPOSITIONS, each.opts
        assert "; may be repeated" not in each.help, each.opts
