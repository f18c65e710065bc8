"""What goes into the image: the build context holds all that the Dockerfile copies."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from components.image import IMAGE
from tests.conftest import ROOT
from tests.dockerfile import copied, instructions, is_ignored

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git repository")
    return [path for path in listed.stdout.split("\0") if (ROOT / path).is_file()]


@pytest.mark.parametrize(
    ("path", "patterns", "expected"),
    [
        ("a.txt", [], False),
        ("a.txt", ["*"], True),
        ("trainer/storage/uri.py", ["*"], True),
        ("trainer/storage/uri.py", ["*", "!trainer"], False),
        ("trainer/storage/uri.py", ["!trainer", "*"], True),
        ("trainer/storage/uri.py", ["*", "!trainer", "trainer/storage"], True),
        ("trainer/storage/uri.py", ["*", "!trainer", "trainer/*/uri.py"], True),
        ("trainer/storage/uri.py", ["trainer/*.py"], False),
        ("trainer/storage/uri.py", ["**/uri.py"], True),
        ("uri.py", ["**/uri.py"], True),
        ("trainer/__pycache__/uri.pyc", ["!trainer", "**/__pycache__"], True),
        ("requirements-gpu.lock", ["*", "!requirements.lock"], True),
        ("requirements.lock", ["*", "!requirements?lock/"], False),
        ("a.txt", ["# a.txt", "", "/a.txt "], True),
    ],
)
def test_a_pattern_of_the_ignored_files(path, patterns, expected):
    assert is_ignored(path, patterns) is expected


def test_every_source_of_a_copy_is_in_the_build_context_whole():
    files = tracked()
    sources = copied(DOCKERFILE)
    assert {"trainer", "requirements-gpu.lock", "pyproject.toml"} <= set(sources)
    for source in sources:
        below = [path for path in files if path == source or path.startswith(f"{source}/")]
        assert below, f"COPY {source}: no such file in the repository"
        assert [path for path in below if is_ignored(path, IGNORED)] == [], source


def test_nothing_else_is_sent_to_the_container_engine():
    sent = [path for path in tracked() if not is_ignored(path, IGNORED)]
    sources = tuple(copied(DOCKERFILE))
    assert [path for path in sent if not path.startswith(sources)] == []
    for path in (".git/config", ".venv/bin/python", "runs/x/lock", "trainer/__pycache__/a.pyc"):
        assert is_ignored(path, IGNORED), path


def test_the_base_is_an_argument_that_takes_a_digest():
    (first, base), (second, image), *_ = instructions(DOCKERFILE)
    assert (first, second, image) == ("ARG", "FROM", "${BASE}")
    assert re.fullmatch(r"BASE=python:3\.11\.\d+-slim-\w+", base)


def test_its_labels():
    labels = " ".join(rest for name, rest in instructions(DOCKERFILE) if name == "LABEL")
    found = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', labels))
    assert found["licenses"] == PROJECT["license"]
    assert PROJECT["description"].startswith(found["description"])
    assert (found["version"], found["revision"]) == ("$VERSION", "$COMMIT")
    assert found["base.name"] == "$BASE"
    arguments = dict(
        rest.split("=", 1)
        for name, rest in instructions(DOCKERFILE)
        if name == "ARG" and "=" in rest
    )
    assert arguments["VERSION"] == PROJECT["version"] == IMAGE.rpartition(":")[2]


def test_no_process_in_it_looks_into_its_working_folder_first():
    settings = " ".join(rest for name, rest in instructions(DOCKERFILE) if name == "ENV")
    assert "PYTHONSAFEPATH=1" in settings
