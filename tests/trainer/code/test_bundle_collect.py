"""Tests which files of a folder are bundled, left out or rejected."""

import os

import pytest

from flotilla.trainer.code import bundle
from flotilla.trainer.runtime.errors import ConfigError, UserError


def paths(folder):
    return [each.path for each in bundle.collect(folder).files]


def refusal(folder, kind=ConfigError):
    with pytest.raises(kind) as refused:
        bundle.collect(folder)
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_all_files_belong_to_it_in_the_order_of_their_paths(folder):
    (folder / "words.txt").write_text("a")
    (folder / "sub" / "größe x.yaml").write_text("a")
    assert paths(folder) == ["blocks.py", "sub/__init__.py", "sub/größe x.yaml", "words.txt"]


def test_what_is_no_code_is_left_out(folder):
    for name in (".git/config", "sub/__pycache__/a.pyc", ".venv/x.py", "runs/a.json", "data/a.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "MANIFEST.json").write_text("{}")
    (folder / "sub" / "data").mkdir()
    (folder / "sub" / "data" / "own.py").touch()
    assert paths(folder) == ["blocks.py", "sub/__init__.py", "sub/data/own.py"]


def test_secrets_are_left_out_and_named(folder):
    for name in (".env", "credentials", "sub/tls.pem", "credentials.py", ".ssh/id_ed25519"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    collected = bundle.collect(folder)
    assert [each.path for each in collected.files] == [
        "blocks.py", "credentials.py", "sub/__init__.py",
    ]  # fmt: skip
    assert sorted(collected.secrets) == [".env", ".ssh", "credentials", "sub/tls.pem"]


def test_the_rules_of_the_user_come_last(folder):
    (folder / "ca.pem").touch()
    (folder / "data").mkdir()
    (folder / "data" / "rows.py").touch()
    assert bundle.collect(folder).modules_left_out == ["data"]
    (folder / bundle.IGNORE_FILE).write_text("!ca.pem\n!/data/\nsub/\n")
    assert paths(folder) == ["blocks.py", "ca.pem", "data/rows.py"]


def test_a_link_inside_the_folder_is_followed(folder):
    (folder / "again.py").symlink_to("blocks.py")
    assert "again.py" in paths(folder)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("/etc/hostname", "again.py is a link to /etc/hostname, outside the folder"),
        ("nowhere", "a broken link"),
        ("sub", "again.py is a link to a folder"),
        ("again.py", "a broken link"),
    ],
)
def test_any_other_link_is_refused_unless_it_is_left_out(folder, target, words):
    (folder / "again.py").symlink_to(target)
    assert words in refusal(folder)
    (folder / bundle.IGNORE_FILE).write_text("again.py\n")
    assert paths(folder) == ["blocks.py", "sub/__init__.py"]


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "pipe")
    assert "pipe is neither a file nor a folder" in refusal(folder)


def test_a_name_that_no_store_takes_is_refused(folder):
    (folder / "a\nb.py").touch()
    assert "'a\\nb.py' has characters that a store rejects; rename it" in refusal(folder)


def test_a_folder_that_is_none_is_refused(folder, tmp_path):
    assert "No such file or directory; give a folder" in refusal(tmp_path / "absent")
    assert "it is a file; give its folder" in refusal(folder / "blocks.py")
    assert "not a valid path; give a folder" in refusal(tmp_path / "a\0b")
    (tmp_path / "empty").mkdir()
    assert "the folder has no module (*.py); give the folder" in refusal(tmp_path / "empty")


def test_a_folder_that_cannot_be_read_is_named(folder, monkeypatch):
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert refusal(folder, UserError) == f"--code: cannot read {folder / 'sub'}: Permission denied"


def test_too_much_is_refused_by_its_largest_files(folder):
    for name, size in (("weights.bin", 8 << 20), ("rows.csv", 3 << 20), ("small", 9)):
        with (folder / name).open("wb") as file:
            file.truncate(size)
    line = refusal(folder)
    assert "the files total 11.5 MB, and the limit is 10.5 MB" in line
    assert "the largest are weights.bin (8.4 MB), rows.csv (3.1 MB)" in line


def test_too_many_files_are_not_counted_to_the_end(folder, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_FILES", 5)
    (folder / "many").mkdir()
    for number in range(9):
        (folder / "many" / f"{number}.txt").touch()
    assert "more than 5 files, which is the maximum (most are below many" in refusal(folder)


def test_an_ignore_file_that_is_no_text_is_refused(folder):
    (folder / bundle.IGNORE_FILE).write_bytes(b"\xff\xfe\xff")
    assert refusal(folder).endswith(".flotillaignore: not UTF-8 text")


PATHS = ("a.py", "b/a.py", "b/c/a.py", "b/c", "data", "b/data", "b/x y", "[x].py", "!a", "#a", "b")
LINES = (
    ("*.py", "a.py", "b/a.py", "b/c/a.py", "[x].py"),
    ("/a.py", "a.py"),
    ("b/*.py", "b/a.py"),
    ("b/**", "b/a.py", "b/c", "b/c/a.py", "b/data"),
    ("**/c", "b/c", "b/c/a.py"),
    ("b/**/a.py", "b/a.py", "b/c/a.py"),
    ("data", "data", "b/data"),
    ("/data/",),
    ("[a-c]", "b", "b/a.py", "b/c", "b/c/a.py", "b/data"),
    ("[!a-b]", "b/c", "b/c/a.py"),
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
    rules = bundle.Rules((line, "here") for line in lines)
    return bool(rules.leaving_out(path, is_folder=is_folder))


def test_a_line_leaves_out_what_git_leaves_out():
    for line, *paths in LINES:
        found = {path for path in (*PATHS, "x y") if left_out([line], path)}
        assert found - {"b/x y"} == set(paths), line


def test_a_slash_at_the_end_is_for_folders():
    assert left_out(["data/"], "b/data", is_folder=True)
    assert not left_out(["data/"], "b/data")


def test_the_last_line_decides():
    lines = ["*.pem", "!mine.pem"]
    assert left_out(lines, "other.pem")
    assert not left_out(lines, "mine.pem")
    assert left_out([*lines, "mine.*"], "mine.pem")


def test_a_line_that_is_no_pattern_leaves_out_nothing():
    assert not [line for line in ("!", "[z-a]", "\\", "a[") if left_out([line], "a")]


def test_what_is_in_a_folder_can_be_taken_in_again():
    lines = ["b/**", "!b/a.py"]
    assert not left_out(lines, "b", is_folder=True)
    assert not left_out(lines, "b/a.py")
    assert left_out(lines, "b/c")
