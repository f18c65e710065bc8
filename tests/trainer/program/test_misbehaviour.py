"""Tests that programs that behave badly are reported or end well, and leave no process behind."""

import pytest

from flotilla.trainer.runtime.errors import UserError
from tests.trainer.program.runs import COUNT, make_job, published_steps

pytestmark = pytest.mark.cluster

FORKS = """
import os, time
for own in (False, True):
    if os.fork() == 0:
        own and os.setsid()
        time.sleep(600)
"""
FULL = """
import os, resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with open(os.environ["FLOTILLA_CHECKPOINTS"] + "/ckpt-9.index", "wb") as file:
    file.write(bytes(2 << 20))
"""
BUSY = """
import socket
first, second = socket.socket(), socket.socket()
first.bind(("127.0.0.1", 0))
second.bind(first.getsockname())
"""
FIFO = 'import os\nos.mkfifo(os.environ["FLOTILLA_MODEL"] + "/a.keras")\n'
LINKS = """
import os
folder = os.environ["FLOTILLA_MODEL"] + "/"
os.symlink("/etc", folder + "1")
os.symlink("/etc/hostname", folder + "saved_model.pb")
"""
EVALUATE = {"after_training": "evaluate"}
ASK = "import argparse; argparse.ArgumentParser().parse_args()"
REFUSED = {
    "exits with 0 at once": ("", EVALUATE, "FLOTILLA_MODEL .* is empty"),
    "forks": (FORKS, EVALUATE, "saved no model"),
    "needs a package": ("import no_such_package", {}, "No module named 'no_such_package'"),
    "wrong flag": (ASK, {}, "exit code 2.*unrecognized arguments: 3"),
    "fails": ("import sys; sys.exit(7)", {}, "exit code 7; it printed nothing"),
    "absent command": ("", {"command": ["no-such"]}, "cannot start no-such: No such file"),
    "absent folder": ("", {"working_dir": "no-such"}, "program.working_dir: there is no folder"),
    "no words": ("", {"command": ["/"]}, "cannot start /: Permission denied"),
    "a file over its limit": (FULL, {}, "File too large"),
    "a port that is taken": (BUSY, {}, "Address already in use"),
    "a model that is a pipe": (FIFO, EVALUATE, "FLOTILLA_MODEL .* contains no complete model"),
    "a model of links": (LINKS, EVALUATE, "FLOTILLA_MODEL .* contains no complete model"),
}  # fmt: skip
CORRUPT = """
import os, sys
with open(os.environ["FLOTILLA_METRICS"], "wb") as file:
    file.write(b'\\xff\\x00{"step": \\n[1]\\n{"step": "a"}\\n{"step": -1}\\n{"step": 1e400}\\n{"st')
"""
EVERYWHERE = "import socket\nopened = socket.socket()\nopened.bind(('', 0))\nopened.listen()\n"
WRITES = "open('left-behind.txt', 'w').write('x')\n"
# This program writes invalid metrics, listens on all interfaces, leaves a file in its working
# directory and prints nothing. None of these is an error.
ODD = CORRUPT + EVERYWHERE + WRITES + COUNT.replace("print(", "(lambda *_, **__: None)(")


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(launched, tmp_path, name):
    text, own, said = REFUSED[name]
    job = make_job(tmp_path, text, "3", program=own)
    with pytest.raises(UserError, match=said) as error:
        launched(job)
    assert "\n" not in str(error.value)


def test_one_that_says_nothing_and_listens_everywhere_ends_well(launched, tmp_path):
    job = make_job(tmp_path, ODD, "3", program={"working_dir": str(tmp_path)})
    launched(job)
    assert published_steps(job)[-1] == 3


def test_one_that_kills_its_guard_is_given_up_after_the_restarts(launched, tmp_path):
    kills = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    job = make_job(tmp_path, kills, cluster={"max_restarts": 1})
    with pytest.raises(UserError, match=r"cluster\.max_restarts") as error:
        launched(job)
    assert "\n" not in str(error.value)
