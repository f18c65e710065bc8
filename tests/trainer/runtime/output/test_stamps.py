import io
import re
import sys
from datetime import datetime

import pytest

from flotilla.trainer.runtime.output.stamps import split_stamp, stamp_output

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


@pytest.fixture
def output(monkeypatch):
    # Replace `sys.stdout` in the test itself, because pytest uses another one while it sets up.
    def replaced():
        monkeypatch.setattr(sys, "stdout", found := io.StringIO())
        return found

    return replaced


def say(text, end="\n"):
    """Write as `print` does."""
    sys.stdout.write(text)
    sys.stdout.write(end)


def test_a_printed_line_has_its_time_once(output):
    written = output()
    with stamp_output():
        say("one line")
        say("two", end=" ")
        say("of it")
    say("after")
    assert re.fullmatch(f"{TIME}one line\n{TIME}two of it\nafter\n", written.getvalue())


def test_a_text_of_several_lines_has_one_time_and_an_empty_line_none(output):
    written = output()
    with stamp_output():
        say("a\n  b")
        say("")
    assert re.fullmatch(f"{TIME}a\n  b\n\n", written.getvalue())


def test_a_terminal_and_a_stream_that_has_times_stay_as_they_are(output, monkeypatch):
    written = output()
    with stamp_output():
        inner = sys.stdout
        with stamp_output():
            assert sys.stdout is inner
    monkeypatch.setattr(written, "isatty", lambda: True)
    with stamp_output():
        assert sys.stdout is written


def test_the_stream_is_otherwise_the_same(output):
    output()
    with stamp_output():
        assert sys.stdout.writable()
        assert sys.stdout.getvalue() == ""


def test_the_time_of_a_line_is_read_again(output):
    written = output()
    before = datetime.now().timestamp()
    with stamp_output():
        say("text")
    moment, text = split_stamp(written.getvalue().rstrip("\n"))
    assert text == "text"
    assert before - 0.002 <= moment <= datetime.now().timestamp()


@pytest.mark.parametrize("line", ["", "text", "2026-13-99 99:99:99,999 text", "2026-01-02 text"])
def test_a_line_without_a_time_is_all_text(line):
    assert split_stamp(line) == (None, line)
    assert split_stamp(f"2026-01-02 03:04:05,678 {line}")[1] == line
