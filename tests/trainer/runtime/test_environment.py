"""Tests that every environment variable of Flotilla is checked at startup."""

import re
from pathlib import Path

import pytest

from flotilla.components.kubernetes.pods import guard
from flotilla.pipelines.cli.app import call
from flotilla.trainer.runtime.environment import VARIABLES, check_variables, read_variable
from flotilla.trainer.runtime.errors import USAGE, ConfigError

ROOT = Path(__file__).parents[3]
WRONG = {
    "FLOTILLA_STORAGE_DEADLINE": ("nan", "inf", "-inf", "-1", "soon", "5 min", "1e999", " "),
    "FLOTILLA_GUARD_PORT": ("0", "65536", "-1", "http", "2223/tcp", "²"),
    "FLOTILLA_PARENT": ("-1", "me", "1e3", "²"),
    "FLOTILLA_HEARTBEAT": ("3", "3:", "a:b", "3:nan", "3:-1"),
    "FLOTILLA_CONFIG": ("{", "[]", "null", "[" * 100_000),
    "FLOTILLA_LAUNCHER": ("{", "1"),
    "FLOTILLA_RUN_ID": ("../../etc", "a/b", "a b", "-x", "a\nb", "x" * 200),
    "FLOTILLA_EVENTS": ("a\nb", "\x1b[31m"),
}


def test_the_table_names_every_variable() -> None:
    found = set()
    for folder in ("trainer", "components", "pipelines"):
        for path in ROOT.joinpath(folder).rglob("*.py"):
            found |= set(re.findall(r"(?<!_)FLOTILLA_[A-Z]\w+", path.read_text(encoding="utf-8")))
    # The common prefix of several names is not itself a variable.
    whole = {each for each in found if not any(f"{each}_" in name for name in VARIABLES)}
    assert whole == set(VARIABLES)


RIGHT = {
    "FLOTILLA_STORAGE_DEADLINE": "1e3",
    "FLOTILLA_RUN_ID": "digits-20260101-abc.1",
    "FLOTILLA_HEARTBEAT": "7:0.25",
    "FLOTILLA_PARENT": "",
    "FLOTILLA_EVENTS": "/tmp/a b/ü.jsonl",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_one_line_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for text in WRONG[name]:
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=rf"^{name}: .* is not .*; unset it, or correct it$"):
            check_variables()


def test_what_is_right_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in RIGHT.items():
        monkeypatch.setenv(name, text)
    check_variables()
    assert {name: read_variable(name) for name in RIGHT} == RIGHT


def test_the_command_line_and_the_guard_refuse_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "nan")
    said = "FLOTILLA_STORAGE_DEADLINE: 'nan' is not a number of seconds; unset it, or correct it\n"
    assert call(["manifest"]) == USAGE
    assert capsys.readouterr().err.endswith(said)
    assert guard.main(["--", "true"]) == USAGE
    assert capsys.readouterr().err == f"guard: {said}"
