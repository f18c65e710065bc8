"""`conftest.py` fails tests that break its rules, and `-m` imports only the files it needs."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marked import may_match

ROOT = Path(__file__).parents[1]
OUTSIDE = ("192.0.2.1", 9)  # an address that is reserved for documentation

LEAVES_ONE = """
    import os, subprocess, sys
    import pytest
    import tests.conftest
    tests.conftest.SECONDS_TO_END = 0.2
    CODE = "import signal; print(flush=True); signal.pause()"

    @pytest.mark.cluster
    def test_child():
        subprocess.Popen([sys.executable, "-c", CODE])

    @pytest.mark.cluster
    def test_orphan(tmp_path):
        # While the kernel replaces a process, its command line is empty: wait for the first output.
        os.mkfifo(tmp_path / "begun")
        command = ["sh", "-c", '"$@" > "$0" 2> /dev/null &', str(tmp_path / "begun")]
        subprocess.run([*command, sys.executable, "-c", CODE, str(tmp_path)], check=True)
        with open(tmp_path / "begun") as begun:
            begun.readline()

    @pytest.mark.cluster
    def test_ended():
        process = subprocess.Popen([sys.executable, "-c", CODE])
        process.kill()
        process.wait()
"""
TRIES_OUTSIDE = """
    import contextlib, socket

    def test_swallowed():
        with contextlib.suppress(OSError):
            socket.create_connection(("example.com", 80))

    def test_meant(outside_attempts):
        with contextlib.suppress(OSError):
            socket.create_connection(("example.com", 80))
        outside_attempts.clear()
"""


def outcome_of(tmp_path, source):
    lines = [line.removeprefix("    ") for line in source.splitlines()]
    (tmp_path / "test_bad.py").write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "-W", "ignore::ResourceWarning", str(tmp_path)]
    command += ["-W", "ignore::pytest.PytestUnraisableExceptionWarning"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_a_connection_that_leaves_the_machine_is_refused(outside_attempts):
    with pytest.raises(OSError, match="loopback"), socket.socket() as plain:
        plain.connect(OUTSIDE)
    with pytest.raises(OSError, match="loopback"):
        socket.create_connection(("example.com", 443))
    assert outside_attempts == [OUTSIDE[0], "example.com"]
    outside_attempts.clear()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_is_open(host):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((host, port)) as client:
            assert client.getpeername()[1] == port


@pytest.mark.slow
def test_an_attempt_that_was_swallowed_fails_its_test(tmp_path):
    report = outcome_of(tmp_path, TRIES_OUTSIDE)
    assert "2 passed, 1 error" in report
    assert "ERROR" in report
    assert "tried to leave this machine: example.com" in report


@pytest.mark.slow
def test_a_process_left_behind_fails_its_test(tmp_path):
    report = outcome_of(tmp_path, LEAVES_ONE)
    assert "3 passed, 2 errors" in report
    assert "still running" in report


def test_the_machine_is_kept_out_of_the_environment():
    assert not {"TF_CONFIG", "CUDA_VISIBLE_DEVICES", "FLOTILLA_RUN_ID"} & set(os.environ)


FAST, SLOW = "not slow and not cluster", "slow and not long"
PLAIN = "def test_a(): ...\n"
ONE = f"@pytest.mark.slow\n{PLAIN}"


@pytest.mark.parametrize(
    ("text", "fast", "slow"),
    [
        (PLAIN, True, False),
        (ONE, False, True),
        (f"{ONE}\n{PLAIN.replace('_a', '_b')}", True, True),
        (f"@pytest.mark.long\n{ONE}", False, False),
        (f"pytestmark = [pytest.mark.slow, pytest.mark.timeout(9)]\n{PLAIN}", False, True),
        (f"class TestA:\n    pytestmark = pytest.mark.cluster\n    {PLAIN}", False, False),
        (f"@pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.slow)])\n{PLAIN}",
         True, True),
        (f"SLOW = pytest.mark.slow\n\n@SLOW\n{PLAIN}", True, True),
        (f"@pytest.mark.cluster\n@pytest.mark.slow\n{PLAIN}", False, True),
    ],
)  # fmt: skip
def test_the_marks_of_a_file_are_read_from_its_source(text, fast, slow):
    assert (may_match(text, FAST), may_match(text, SLOW)) == (fast, slow)


def test_each_file_is_imported_without_an_expression():
    assert may_match(ONE, "")
