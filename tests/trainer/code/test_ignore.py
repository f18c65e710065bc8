"""`.flotillaignore` has the rules of git; `pathspec`, which knows them, is asked as well."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pathspec import GitIgnoreSpec

from trainer.code.ignore import deciding, rules_of

PATHS = ("a.py", "b/a.py", "b/c/a.py", "b/c", "data", "b/data", "b/x y", "[x].py", "!a", "#a", "b")
LINES = (
    ("*.py", "a.py", "b/a.py", "b/c/a.py", "[x].py"),
    ("/a.py", "a.py"),
    ("b/*.py", "b/a.py"),
    ("b/**", "b/a.py", "b/c", "b/c/a.py", "b/data"),
    ("**/c", "b/c"),
    ("b/**/a.py", "b/a.py", "b/c/a.py"),
    ("data", "data", "b/data"),
    ("/data/",),
    ("[a-c]", "b", "b/c"),
    ("[!a-b]", "b/c"),
    (r"\!a", "!a"),
    (r"\#a", "#a"),
    (r"\[x\].py", "[x].py"),
    ("?.py", "a.py", "b/a.py", "b/c/a.py"),
    ("x\\ y  ", "x y"),
    ("# a comment",),
    ("",),
    ("/",),
)


def left_out(lines, path, *, is_folder=False):
    rule = deciding(rules_of(lines, "here"), path, is_folder=is_folder)
    return bool(rule and rule.leaves_out)


@pytest.mark.parametrize(("line", *["paths"]), [(line, paths) for line, *paths in LINES])
def test_a_line_leaves_out_what_git_leaves_out(line, paths):
    assert {path for path in (*PATHS, "x y") if left_out([line], path)} - {"b/x y"} == set(paths)


def test_a_slash_at_the_end_is_for_folders():
    assert left_out(["data/"], "b/data", is_folder=True)
    assert not left_out(["data/"], "b/data")


def test_the_last_line_decides():
    lines = ["*.pem", "!mine.pem"]
    assert left_out(lines, "other.pem")
    assert not left_out(lines, "mine.pem")
    assert left_out([*lines, "mine.*"], "mine.pem")


SEGMENT = st.text("ab.*?-[]!^\\", min_size=1, max_size=4)
LINE = st.builds(
    lambda names, start: start + "/".join(names),
    st.lists(
        st.one_of(st.sampled_from(["a", "b", "*", "**", "a*", "?", "[ab]", "[!a]"])),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["", "/"]),
)
PATH = st.lists(st.sampled_from(["a", "b", "ab", "ba"]), min_size=1, max_size=4).map("/".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(LINE, max_size=4), PATH)
def test_any_lines_are_read_as_pathspec_reads_them(lines, path):
    # Asked from the top down, as a folder is walked: nothing in one that is left out is asked for.
    parts = path.split("/")
    above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    ours = any(left_out(lines, each, is_folder=each != path) for each in above)
    assert ours == GitIgnoreSpec.from_lines(lines).match_file(path)


@settings(max_examples=150, deadline=None)
@given(st.lists(SEGMENT, min_size=1, max_size=3).map("/".join))
def test_no_line_is_an_error(line):
    assert len(rules_of([line], "here")) <= 1
