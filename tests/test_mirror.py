"""`make check` runs the tests that mirror the changed files."""

import subprocess
from pathlib import PurePosixPath

import pytest

from tests import mirror
from tests.mirror import ELSEWHERE, ROOT, select

FILES = (
    "benchmarks/baselines/fit.py",
    "pyproject.toml",
    "tests/benchmarks/test_baselines.py",
    "tests/docs/test_claims.py",
    "tests/trainer/storage/test_local.py",
    "tests/trainer/storage/test_local_file_rows.py",
    "tests/trainer/storage/test_uri.py",
    "tests/trainer/storage/test_uri_windows.py",
    "tests/trainer/test_main.py",
    "trainer/__main__.py",
    "trainer/storage/local.py",
    "trainer/storage/local_file.py",
    "trainer/storage/uri.py",
)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (
            "trainer/storage/uri.py",
            ["tests/trainer/storage/test_uri.py", "tests/trainer/storage/test_uri_windows.py"],
        ),
        ("trainer/storage/local.py", ["tests/trainer/storage/test_local.py"]),
        ("trainer/storage/local_file.py", ["tests/trainer/storage/test_local_file_rows.py"]),
        ("trainer/__main__.py", ["tests/trainer/test_main.py"]),
        ("benchmarks/baselines/fit.py", ["tests/benchmarks/test_baselines.py"]),
        ("tests/docs/test_claims.py", ["tests/docs/test_claims.py"]),
        ("tests/docs/test_removed.py", []),
        ("README.md", ["tests/docs"]),
    ],
)
def test_the_tests_of_a_file_are_named_for_it(monkeypatch, changed, tests):
    monkeypatch.setattr(mirror, "importing", lambda *_: [])
    assert select([changed], FILES) == mirror.Selection(tests=tuple(tests), unmirrored=())


def test_a_file_without_tests_is_named():
    assert select(["pyproject.toml"], FILES).unmirrored == ("pyproject.toml",)


def test_a_test_that_imports_a_module_mirrors_it():
    paths = [PurePosixPath("tests/test_mirror.py"), PurePosixPath("tests/test_setup.py")]
    assert mirror.importing(PurePosixPath("tests/mirror.py"), paths) == ["tests/test_mirror.py"]


def test_the_tests_elsewhere_exist():
    named = {*ELSEWHERE, *(test for tests in ELSEWHERE.values() for test in tests)}
    assert not [name for name in named if not (ROOT / name).exists()]


def test_what_git_sees_as_changed_is_selected(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mirror, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    for name in ("tests/test_kept.py", "tests/test_changed.py", "tests/test_deleted.py"):
        (tmp_path / name).write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    (tmp_path / "tests/test_changed.py").write_text("pass\n")
    (tmp_path / "tests/test_deleted.py").unlink()
    (tmp_path / "tests/test_new.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    mirror.main()
    printed = capsys.readouterr()
    assert printed.out.split() == ["tests/test_changed.py", "tests/test_new.py"]
    assert printed.err == "notes.txt: no test mirrors it: `make test` shows what it breaks\n"


def test_check_fails_where_the_revision_does_not_exist():
    command = ["make", "check", "--old-file=style", "SINCE=no-such-revision"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "passed" not in ended.stdout


def test_a_revision_or_a_repository_that_does_not_exist_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="'no-such-revision'; SINCE is a revision of this git"):
        mirror.main("no-such-revision")
    monkeypatch.setattr(mirror, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="not a git repository"):
        mirror.main()
