"""Tests the answer or error of a module that is called in a child process."""

import json
import subprocess

import pytest

from flotilla.trainer.cluster import child_process

pytestmark = pytest.mark.cluster
PROGRAM = """
import json, os, signal, sys, time
option, path, _, folder = sys.argv[1:]
asked = json.load(open(path))
match asked["how"]:
    case "answer":
        print("a line of the user")
        print(json.dumps({"seen": asked, "set": os.environ["OWN"], "folder": folder}))
    case "fail":
        sys.stderr.write("a warning\\nflotilla: model mlp: it does not fit\\nlater\\n")
        sys.exit(2)
    case "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    case "silent":
        sys.exit(3)
    case "wait":
        time.sleep(60)
"""


@pytest.fixture
def called(tmp_path, monkeypatch):
    (tmp_path / "asked_child.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def call(how, seconds=60.0):
        config, variables = json.dumps({"how": how}), {"OWN": "1"}
        return child_process.call(
            "asked_child", config=config, seconds=seconds, variables=variables
        )

    return call


def test_the_answer_is_the_last_line(called):
    found = called("answer")
    assert found["seen"] == {"how": "answer"}
    assert found["set"] == "1"
    assert found["folder"]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("fail", 2, "model mlp: it does not fit"),
        ("silent", 3, "exit code 3"),
        ("killed", 0, "terminated by SIGKILL; check whether there is enough memory"),
    ],
)
def test_an_error_is_one_line(called, how, code, said):
    with pytest.raises(child_process.ChildError) as caught:
        called(how)
    assert (caught.value.code, str(caught.value)) == (code, said)


def test_nobody_waits_for_ever(called):
    with pytest.raises(child_process.ChildError, match=r"no response after 0\.01 s"):
        called("wait", seconds=0.01)


def test_a_process_is_ended_and_ends_only_once(tmp_path, monkeypatch):
    (tmp_path / "idle_child.py").write_text("print(1, flush=True)\nimport time; time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with child_process.start("idle_child", stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        child_process.end(process, 30)
        assert process.returncode == -15
        child_process.end(process, 30)
