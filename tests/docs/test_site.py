"""The site is built without warnings, loads nothing from other hosts, and can be searched."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT

pytest.importorskip("mkdocs", reason="the extra docs is not installed")

# Search queries of users, each with the page in which a section must contain all of its words.
QUESTIONS = {
    "tensorflow serving": "start/predictions.html",
    "exit code": "start/failures.html",
    "resume": "how-to/cancel-and-resume.html",
    "learning_rate": "reference/configuration.html",
    "ImagePullBackOff": "how-to/kubernetes.html",
    "keras model": "how-to/own-model.html",
    "remove old runs": "how-to/retention.html",
    "every night": "start/every-night.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_no_page_loads_from_another_host(site):
    loads = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc="?https?:|<link[^>]*\shref="?https?:""")
    for path in (*site.rglob("*.html"), *site.rglob("*.svg")):
        assert not loads.search(path.read_text(encoding="utf-8")), path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(\s*.?https?:|@import", path.read_text(encoding="utf-8")), path


def test_the_search_index_has_what_users_look_for(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert {each["location"].partition("#")[0] for each in index["docs"]} >= {
        f"{path.relative_to(ROOT / 'docs').with_suffix('.html')}"
        for path in (ROOT / "docs").rglob("*.md")
        if path.name != "README.md"
    }
    for words, page in QUESTIONS.items():
        texts = [
            f"{each['title']} {each['text']}".lower()
            for each in index["docs"]
            if each["location"].partition("#")[0] == page
        ]
        assert any(all(word.lower() in text for word in words.split()) for text in texts), words


def test_the_navigation_begins_with_short_pages():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    first = settings["nav"][1]["Start here"]
    for name in first:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert len(text.split()) < 450, name
        assert "](../pictures/" in text or name == first[0], name
