"""What no file of the project may say; the patterns are written so as not to match themselves."""

import re

import pytest

from tests.house_rules.source import files, text

FORBIDDEN = {
    "a package registry or its mirror": r"py[p]i\.|pythonhosted\.org|npmj[s]\.|conda\.anaconda\.",
    "a container registry": r"\b(?:ghcr|docker|gcr|quay)\.io\b|docker\.pkg\.dev|registry\.k8s\.",
    "an index of its own": r"--(?:extra-)?index[-]url|--find[-]links|--trusted[-]host",
    "a path of one machine": r"/wor[k]/(?:main|shared|notes)|/roo[t]/\.",
    "a ticket": r"(?i)\b(?:issue|ticket)s?\s+#?\d|\b(?:fix\w*|closes?|resolves?|see|PR)\s+#\d",
    "how the text came about": r"\bA[I]\b|\bLL[M]s?\b|(?i:co-authored[-]by|language[ ]model)",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what):
    found = [
        f"{path}:{number}: {line.strip()[:120]}"
        for path in files()
        for number, line in enumerate(text(path).splitlines(), start=1)
        if re.search(FORBIDDEN[what], line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a package registry or its mirror", "https://py" + "pi.org/simple"),
        ("a container registry", "FROM ghcr" + ".io/a/b"),
        ("an index of its own", "--extra-" + "index-url x"),
        ("a path of one machine", "see /" + "work/main"),
        ("a ticket", "as in issue" + " 12"),
    ],
)
def test_the_rule_sees(what, line):
    assert re.search(FORBIDDEN[what], line)
