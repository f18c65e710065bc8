import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from trainer.cluster.forks import command_line
command_line.show(sys.argv[1:])
command_line.show([*sys.argv[1:], "again"])
# The heap grows after that.
kept = [bytes(1000) for _ in range(10000)]
sys.stdout.buffer.write(open("/proc/self/cmdline", "rb").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_process_shows_the_words_that_it_wants():
    words = ["a b", "", "x" * 10_000]
    found = subprocess.run([sys.executable, "-c", PROGRAM, *words], check=True, capture_output=True)
    assert found.stdout.split(b"\0") == [*(word.encode() for word in words), b"again", b""]
