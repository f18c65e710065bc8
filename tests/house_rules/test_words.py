"""Text that no file may contain, and calls that only some modules may make.

The patterns are written so that they do not match themselves.
"""

import ast
import re

from tests.house_rules.source import PACKAGES, files, python_files, text, tree

FORBIDDEN = {
    "a package registry or its mirror": r"py[p]i\.|pythonhosted\.org|npmj[s]\.|conda\.anaconda\.",
    "a container registry": r"\b(?:ghcr|docker|gcr|quay)\.io\b|docker\.pkg\.dev|registry\.k8s\.",
    "an index of its own": r"--(?:extra-)?index[-]url|--find[-]links|--trusted[-]host",
    "a path of one machine": r"/wor[k]/(?:main|shared|notes)|/roo[t]/\.",
    "a ticket": r"(?i)\b(?:issue|ticket)s?\s+#?\d|\b(?:fix\w*|closes?|resolves?|see|PR)\s+#\d",
    "how the text came about": r"\bA[I]\b|\bLL[M]s?\b|(?i:co-authored[-]by|language[ ]model)",
}
SEEN = {
    "a package registry or its mirror": "https://py" + "pi.org/simple",
    "a container registry": "FROM ghcr" + ".io/a/b",
    "an index of its own": "--extra-" + "index-url x",
    "a path of one machine": "see /" + "work/main",
    "a ticket": "as in issue" + " 12",
    "how the text came about": "as the A" + "I wrote",
}
# Modules that may write to the terminal: programs, and code whose output no caller can receive.
WRITERS = {
    "pipelines/cli/__main__.py": "before anything is imported: an interrupt, and a bug",
    "pipelines/cli/exit.py": "the answer of a command",
    "pipelines/runs/local_child.py": "what a step says, as KFP's local runner has it",
    "trainer/__main__.py": "the entry of a task: its answer is a line of standard output",
    "trainer/export/smoke_request.py": "a program: its answer is a line of standard output",
    "trainer/runtime/tensorflow_import.py": "lines of another program, without noise",
    "trainer/runtime/streams.py": "lines of any process, masked: the one door",
    "trainer/prediction/predict.py": "rows, which a terminal gets with escapes",
}
WRITES = re.compile(
    r"(builtins\.)?print|sys\.(__)?std(out|err)(__)?(\.buffer)?\.write|(typer|click)\.s?echo"
)
# Modules that may parse numbers or times themselves. All others use the parsers of `json_records`,
# which reject characters that only look like digits.
READERS = {
    "trainer/runtime/json_records.py": "the reader",
    "trainer/cluster/liveness.py": "a variable of this program's own",
    "trainer/runtime/signals.py": "a variable of this program's own",
    "trainer/config/cluster.py": "checks that the digits are ASCII",
    "trainer/data/builders/datasets.py": "asks for one character, and reads no number",
    "trainer/data/files/formats/csv_layout.py": "names of columns of people",
    "trainer/data/files/text_values.py": "cells of people",
    "trainer/tasks/registry.py": "checks that the digits are ASCII",
    "components/kubernetes/pods/shutdown.py": "a variable of this program's own",
    "pipelines/runs/kfp_watch.py": "asks for one character, and reads no number",
    "pipelines/runs/log_view.py": "a time that was read before, and one character",
}
_READS = re.compile(r"\.(?:isdigit|isdecimal|isnumeric|fromisoformat|fromtimestamp)\(")


def forbidden_words():
    for path in files():
        for number, line in enumerate(text(path).splitlines(), start=1):
            for what, pattern in FORBIDDEN.items():
                if re.search(pattern, line):
                    yield f"{path}:{number}: names {what}: {line.strip()[:120]}"


def writes(module):
    """Return the lines that write to standard output or standard error."""
    return [
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and WRITES.fullmatch(ast.unparse(node.func))
    ]


def printing_libraries():
    writers = set()
    for path in python_files(*PACKAGES):
        lines = writes(tree(path))
        if lines:
            writers.add(str(path))
        if lines and str(path) not in WRITERS:
            yield f"{path}:{lines[0]}: writes to the terminal: return it, and let the caller print"
    for path in sorted(WRITERS.keys() - writers):
        yield f"WRITERS: {path} does not write any more"


def other_readers():
    found = {str(path) for path in python_files(*PACKAGES) if _READS.search(text(path))}
    for path in sorted(found - READERS.keys()):
        yield f"{path}: read foreign numbers and times by flotilla.trainer.runtime.json_records"
    for path in sorted(READERS.keys() - found):
        yield f"READERS: {path} reads no number or time any more"


def test_what_no_file_says_and_no_library_prints():
    assert SEEN.keys() == FORBIDDEN.keys()
    assert all(re.search(FORBIDDEN[what], line) for what, line in SEEN.items())
    offenders = [*forbidden_words(), *printing_libraries(), *other_readers()]
    assert not offenders, "\n".join(offenders)
