"""Tests that a model's commit is read from the image or from the checkout."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flotilla.trainer.promotion import lineage

ROOT = Path(__file__).parents[3]


def git(folder, *words):
    own = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *own, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Return a Git repository that seems to contain the running code."""
    folder = tmp_path / "checkout"
    (folder / "trainer" / "promotion").mkdir(parents=True)
    (folder / "trainer" / "promotion" / "lineage.py").write_text("before\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(lineage, "__file__", str(folder / "trainer" / "promotion" / "lineage.py"))
    return folder


@pytest.mark.usefixtures("checkout")
def test_an_image_says_it(monkeypatch):
    monkeypatch.setenv(lineage.COMMIT, "abc")
    assert lineage.commit() == "abc"


def test_a_checkout_is_asked(checkout, monkeypatch):
    # An image built without Git has an empty variable.
    monkeypatch.setenv(lineage.COMMIT, "")
    commit = git(checkout, "rev-parse", "HEAD")
    assert len(commit) == 40
    assert lineage.commit() == commit
    (checkout / "notes").write_text("not of the code\n")
    assert lineage.commit() == commit
    (checkout / "trainer" / "promotion" / "lineage.py").write_text("after\n")
    assert lineage.commit() == f"{commit}-dirty"


def test_the_repository_around_a_package_is_somebody_elses(checkout, monkeypatch):
    package = checkout / "site-packages" / "trainer" / "promotion"
    package.mkdir(parents=True)
    monkeypatch.setattr(lineage, "__file__", str(package / "lineage.py"))
    assert lineage.commit() == ""


def test_without_git_it_is_not_known(checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(checkout))
    assert lineage.commit() == ""


def test_the_image_gets_the_commit_of_its_checkout():
    if not shutil.which("make"):
        pytest.skip("no make on this machine")
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert 'ARG COMMIT=""' in lines
    (use,) = [line for line in lines if line.startswith(f"ENV {lineage.COMMIT}=$COMMIT")]
    assert lines.index('ARG COMMIT=""') < lines.index(use)

    def built(*words):
        command = ["make", "--dry-run", "--no-print-directory", "image", *words]
        made = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return " ".join(made.replace("\\\n", " ").split())

    assert "--build-arg COMMIT=abc --tag" in built("COMMIT=abc")
    assert "--build-arg COMMIT=abc --build-arg BASE=python:3 --tag" in built(
        "COMMIT=abc", "BASE=python:3"
    )
    try:
        commit = git(ROOT, "rev-parse", "HEAD")
    except subprocess.CalledProcessError:
        # An archive of the sources contains no commit.
        assert "--build-arg COMMIT= --tag" in built()
    else:
        assert f"--build-arg COMMIT={commit}" in built()
