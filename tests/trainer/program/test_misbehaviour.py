"""Programs that behave badly: one line says what happened, or they end well; nothing is left."""

import os
import signal
import threading

import pytest

from flotilla.trainer.cluster.local import launch
from flotilla.trainer.runtime.errors import ClusterLostError, RunInterruptedError, UserError
from tests.trainer.program.runs import COUNT, COUNTS, make_job, published_steps
from tests.trainer.program.test_agent import left, log

pytestmark = pytest.mark.cluster

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
REFUSED = {
    "exits with 3": ("import sys; print('no data'); sys.exit(3)", "exit code 3.*no data"),
    "a file over its limit": (FULL, "File too large"),
    "a port that is taken": (BUSY, "Address already in use"),
}
KILLS = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + COUNT
EVERYWHERE = "import socket\nopened = socket.socket()\nopened.bind(('', 0))\nopened.listen()\n"
CORRUPT = """
import os, sys
with open(os.environ["FLOTILLA_METRICS"], "wb") as file:
    file.write(b'\\xff\\x00{"step": \\n[1]\\n{"step": "a"}\\n{"step": -1}\\n{"step": 1e400}\\n{"st')
"""
WRITES = "open('left-behind.txt', 'w').write('x')\n"
ENDS_WELL = {
    "binds all addresses": EVERYWHERE + COUNT,
    "corrupt metrics": CORRUPT + COUNT,
    "writes into its folder": WRITES + COUNT,
    "never prints": COUNT.replace("print(", "(lambda *_, **__: None)("),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(tmp_path, name):
    text, said = REFUSED[name]
    job = make_job(tmp_path, text)
    with pytest.raises(UserError, match=said) as error:
        launch(job)
    assert "\n" not in str(error.value)
    assert not left(tmp_path)


@pytest.mark.parametrize("name", ENDS_WELL)
def test_it_ends_well(tmp_path, name):
    job = make_job(tmp_path, ENDS_WELL[name], "3", program={"working_dir": str(tmp_path)})
    launch(job)
    assert published_steps(job)[-1] == 3
    assert not left(tmp_path)


@pytest.mark.slow
def test_one_that_kills_its_parent_is_given_up_after_the_restarts(tmp_path):
    job = make_job(tmp_path, KILLS, "3", cluster={"max_restarts": 1})
    with pytest.raises((ClusterLostError, UserError)) as error:
        launch(job)
    assert "\n" not in str(error.value)
    assert not left(tmp_path)


@pytest.mark.slow
def test_one_that_ignores_sigterm_is_killed_after_its_grace(tmp_path):
    text = COUNTS + "step = 2\nsave(2)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    text += "print('waits', flush=True)\ntime.sleep(600)\n"
    job = make_job(tmp_path, text)
    ended = threading.Event()

    def interrupt():
        while not ended.wait(0.1):
            if (job.workdir / "chief-0" / "log.txt").exists() and "waits" in log(job):
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(RunInterruptedError, match="at global step 2"):
            launch(job)
    finally:
        ended.set()
        thread.join()
    assert not left(tmp_path)
