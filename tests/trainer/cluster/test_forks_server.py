import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from flotilla.trainer.cluster import forks
from tests.trainer.cluster.serving import SECONDS, Asked, has_ended, serving

pytestmark = pytest.mark.cluster
# Time limit in seconds, longer than the timeout of one request and shorter than that of two.
HELD = 1.5 * forks._SECONDS


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as found:
        yield found


def test_a_copy_is_as_if_it_was_started_anew(server, tmp_path):
    asked = Asked(folder=tmp_path, arguments=("a b", ""), environment={"OWN": "1"})
    process = asked.fork(server.first)
    said = asked.says()
    seen = psutil.Process(process.pid)
    assert said["arguments"] == asked.wanted.command[3:]
    assert said["environment"] == asked.wanted.environment
    assert said["folder"] == str(tmp_path)
    assert said["session"]
    assert said["collects"]
    assert seen.cmdline() == asked.wanted.command
    assert seen.ppid() == server.process.pid
    assert process.poll() is None
    asked.end(7)
    assert process.wait(SECONDS) == process.poll() == 7


def test_the_interrupt_of_a_run_ends_the_copy_and_not_the_server(server, tmp_path):
    asked = Asked(folder=tmp_path)
    process = asked.fork(server.first)
    asked.says()
    server.process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == -signal.SIGTERM
    require_serving(server, tmp_path)


@contextmanager
def starting(server, folder):
    """Yield the connection of a starter, and the descriptor of the process that it has started."""
    with connected(server) as starter:
        asked = Asked(folder=folder)
        with asked.descriptors() as output:
            forks.send(starter, asked.wanted, output)
        assert select.select([starter], [], [], HELD)[0]
        _, descriptor = forks.receive_number(starter)
        asked.says()
        yield descriptor


def connected(server):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.connect(f"\0{server.first}")
    return made


def require_serving(server, folder):
    asked = Asked(folder=folder)
    assert asked.fork(server.first)
    asked.says()


def test_a_copy_ends_with_its_starter_also_when_it_is_stopped(server, tmp_path):
    with starting(server, tmp_path) as descriptor:
        signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
    assert has_ended(descriptor)
    os.close(descriptor)


def test_a_copy_and_its_starter_that_end_at_once_do_not_end_the_server(server, tmp_path):
    with starting(server, tmp_path) as descriptor:
        # Stop the server, as if it were busy loading a module.
        server.process.send_signal(signal.SIGSTOP)
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        assert has_ended(descriptor)
    os.close(descriptor)
    server.process.send_signal(signal.SIGCONT)
    require_serving(server, tmp_path)


def test_a_copy_ends_with_a_server_that_is_killed(server, tmp_path):
    asked = Asked(folder=tmp_path)
    process = asked.fork(server.first)
    asked.says()
    server.process.kill()
    assert process.wait(SECONDS) == -signal.SIGKILL
    assert Asked(folder=tmp_path).fork(server.first) is None


def test_where_a_command_line_cannot_be_moved_there_is_no_server_and_no_word(tmp_path, capfd):
    refusal = """
from pathlib import Path
read_text = Path.read_text

def refused(path, *words, **options):
    if path == Path("/proc/self/stat"):
        raise PermissionError
    return read_text(path, *words, **options)

Path.read_text = refused
"""
    (tmp_path / "sitecustomize.py").write_text(refusal)
    with serving(tmp_path, PYTHONPATH=str(tmp_path)) as server:
        assert server.process.wait(SECONDS) == 0
        assert Asked(folder=tmp_path).fork(server.first) is None
    assert capfd.readouterr() == ("", "")


def test_what_it_has_not_loaded_it_does_not_fork(server, tmp_path):
    assert Asked(folder=tmp_path, loaded="no_such_module").fork(server.first) is None


def test_a_request_that_is_none_is_dropped(server, tmp_path):
    with connected(server) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(SECONDS)
        with pytest.raises((ConnectionError, OSError)):
            forks.receive_number(stranger)
    require_serving(server, tmp_path)


def test_one_that_sends_nothing_holds_nobody(server, tmp_path):
    assert Asked(folder=tmp_path).fork(server.first)
    with ExitStack() as silent:
        for sent in (b"", b"\0" * 3):
            silent.enter_context(connected(server)).sendall(sent)
        # A server that handled requests one by one would first wait for the timeouts of the others.
        with starting(server, tmp_path) as descriptor:
            os.close(descriptor)


def test_the_second_server_has_loaded_the_rest_and_both_end_with_standard_input(tmp_path):
    with serving(tmp_path, later="no_such_module,colorsys") as server:
        asked = Asked(folder=tmp_path, loaded="colorsys")
        process = asked.fork(server.second)
        asked.says()
        second = psutil.Process(process.pid).parent()
        assert second.ppid() == server.process.pid
        assert Asked(folder=tmp_path, loaded="colorsys").fork(server.first) is None
        server.process.stdin.close()
        server.process.wait(SECONDS)
        assert not second.is_running()
        assert process.wait(SECONDS) == -signal.SIGKILL


@pytest.mark.slow
def test_tensorflow_has_no_thread_before_its_first_operation(tmp_path):
    # A fork is unsafe if other threads run. OpenBLAS and Arrow's allocator stop their threads at a
    # fork.
    rooms = "training.chief", "evaluation.evaluate", "export.export"
    modules = ",".join((*(f"flotilla.trainer.{room}" for room in rooms), "csv"))
    with serving(tmp_path, later=modules, OPENBLAS_NUM_THREADS="1") as server:
        asked = Asked(folder=tmp_path, loaded="flotilla.trainer.export.export")
        process = asked.fork(server.second)
        asked.says()
        loaded = psutil.Process(process.pid).parent()
        assert any("libtensorflow" in each.path for each in loaded.memory_maps())
        threads = [Path(f"/proc/{each.id}/comm").read_text() for each in loaded.threads()]
        assert len([each for each in threads if each != "jemalloc_bg_thd\n"]) == 1, threads
        process.kill()
        process.wait(SECONDS)


PROGRAM = """
import os, sys
from flotilla.trainer.cluster import forks
forks.show_command_line(sys.argv[1:])
forks.show_command_line([*sys.argv[1:], "again"])
# The heap grows after that.
kept = [bytes(1000) for _ in range(10000)]
sys.stdout.buffer.write(open("/proc/self/cmdline", "rb").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_process_shows_the_words_that_it_wants():
    words = ["a b", "", "x" * 10_000]
    found = subprocess.run([sys.executable, "-c", PROGRAM, *words], check=True, capture_output=True)
    assert found.stdout.split(b"\0") == [*(word.encode() for word in words), b"again", b""]
