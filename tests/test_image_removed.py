"""A complete run opens none of the files that the image removes from its packages."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.dockerfile import stages

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

# Python runs this code at the start of each process. Audit hooks run before a file is opened or a
# library is loaded. When a process exits, its memory map shows what native code has loaded.
AUDIT = """
import atexit, os, re, sys
REMOVED, SEEN = re.compile({removed!r}), {seen!r}

def write(place, line):
    with os.fdopen(os.open(place, os.O_APPEND | os.O_CREAT | os.O_WRONLY), "w") as file:
        file.write(line + "\\n")

def note(path):
    if isinstance(path, str) and REMOVED.match(path):
        write(SEEN, path)

def hook(event, arguments):
    if event in ("open", "ctypes.dlopen", "os.listdir", "os.scandir"):
        note(arguments[0])

def maps():
    with open("/proc/self/maps") as file:
        for line in file:
            note(line.split(maxsplit=5)[-1].strip())

write(SEEN + ".processes", " ".join(sys.orig_argv))
sys.addaudithook(hook)
atexit.register(maps)
"""
SMALL = [
    "training.steps=60",
    "training.checkpoint_every=30",
    "training.validate_every=30",
    "gate.min.accuracy=0.05",
    "cluster.workers=1",
    "cluster.evaluator=true",
    "export.formats=[saved_model, keras, tflite, tflite_int8]",
]


def removed() -> list[str]:
    """Return the patterns of the removed files, relative to the image's folder of packages."""
    (command,) = [
        rest
        for name, rest in stages((ROOT / "Dockerfile").read_text())["packages"]
        if "--requirement" in rest
    ]
    parts = [shlex.split(part) for part in command.split("&&")]
    (gone,) = [words[2:] for words in parts if words[:2] == ["rm", "-rf"]]
    (found,) = [words[1:] for words in parts if words[0] == "find"]
    packages = found[: found.index("-type")]
    assert found[len(packages) :] == shlex.split("-type d -name tests -prune -exec rm -rf {} +")
    return [*map(re.escape, gone), *(rf"{re.escape(each)}/(.*/)?tests" for each in packages)]


@pytest.fixture
def audited(tmp_path):
    """Return an environment, the record that its processes write, and the package folder."""
    packages, seen = Path(distribution("tensorflow").locate_file("")), tmp_path / "seen"
    pattern = rf"{re.escape(str(packages))}/({'|'.join(removed())})(/|$)"
    text = AUDIT.format(removed=pattern, seen=str(seen))
    (tmp_path / "sitecustomize.py").write_text(text)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}, seen, packages


def test_the_audit_sees_a_header_a_test_and_a_library(audited):
    environment, seen, packages = audited
    code = (
        "import ctypes, sklearn.tests, numpy, tensorflow\n"
        "open(tensorflow.sysconfig.get_include() + '/tensorflow/c/c_api.h').close()\n"
        f"ctypes.CDLL('{packages}/clang/native/libclang.so')"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    noted = seen.read_text()
    for part in ("tensorflow/include/", "sklearn/tests/", "clang/native/libclang.so"):
        assert f"{packages}/{part}" in noted


@pytest.mark.long
def test_a_whole_run_opens_nothing_of_it(audited, tmp_path):
    environment, seen, _ = audited
    settings = [word for each in SMALL for word in ("--set", each)]
    command = [
        sys.executable,
        "-m",
        "flotilla.pipelines.cli",
        "run",
        "configs/digits.yaml",
        *settings,
    ]
    ended = subprocess.run(
        [*command, "--workdir", str(tmp_path / "runs"), "--json"],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["status"] == "blessed"
    processes = seen.with_suffix(".processes").read_text(encoding="utf-8")
    for each in ("trainer task", "flotilla.pipelines.runs.local_child"):
        assert each in processes
    assert not seen.exists(), seen.read_text()
