"""Tests how processes are forked, and how requests for them are transferred."""

import json
import os
import signal
import socket
import subprocess

import pytest

from flotilla.trainer.cluster import forks
from flotilla.trainer.cluster.forks import Arriving, Request
from tests.trainer.cluster.serving import SECONDS, Asked, serving

WANTED = Request(
    command=["python", "-m", "json.tool"],
    loaded="json",
    folder="/tmp",
    environment={"NAME": "value \udcff"},
    descriptors=[7],
)


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_it_passes_with_its_descriptors(ends):
    one, other = ends
    reader, writer = os.pipe()
    wanted = Request(**{**vars(WANTED), "descriptors": [writer]})
    forks.send(one, wanted, writer)
    found, descriptors = Arriving(other).read()
    assert found == wanted
    assert len(descriptors) == 2
    os.write(descriptors[1], b"x")
    assert os.read(reader, 1) == b"x"
    for each in (reader, writer, *descriptors):
        os.close(each)


def test_it_passes_in_pieces_and_nobody_waits_for_them(ends):
    one, other = ends
    text = json.dumps({**vars(WANTED), "descriptors": []}).encode()
    sent = len(text).to_bytes(8, "big") + text
    arriving = Arriving(other)
    assert arriving.read() is None
    socket.send_fds(one, [sent[:3]], [one.fileno()])
    for at in range(3, len(sent)):
        assert arriving.read() is None
        one.sendall(sent[at : at + 1])
    found, descriptors = arriving.read()
    assert found.command == WANTED.command
    for each in descriptors:
        os.close(each)


def test_what_has_come_of_one_is_closed_with_it(ends):
    one, other = ends
    reader, writer = os.pipe()
    socket.send_fds(one, [b"\0"], [writer])
    os.close(writer)
    arriving = Arriving(other)
    assert arriving.read() is None
    arriving.close()
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_number_passes_with_a_descriptor_or_without(ends):
    one, other = ends
    forks.send_number(one, -9)
    forks.send_number(one, 1 << 40, one.fileno())
    assert forks.receive_number(other) == (-9, None)
    number, descriptor = forks.receive_number(other)
    assert number == 1 << 40
    os.close(descriptor)


@pytest.mark.parametrize(
    "sent", [b"", b"abc", b"\xff" * 8, (2).to_bytes(8) + b"[]", (2).to_bytes(8) + b"{}"]
)
def test_what_is_no_request_is_an_error(ends, sent):
    one, other = ends
    one.sendall(sent)
    one.close()
    with pytest.raises(OSError):  # noqa: PT011
        Arriving(other).read()


def test_the_other_end_is_of_this_user(ends):
    assert forks.is_own_user(ends[0])


def started(asked):
    with asked.descriptors() as output:
        return forks.start_process(asked.wanted, output)


@pytest.mark.cluster
def test_a_process_is_forked_where_there_is_a_server(tmp_path, monkeypatch):
    with serving(tmp_path) as server:
        monkeypatch.setenv(forks.VARIABLE, server.first)
        asked = Asked(folder=tmp_path)
        process = started(asked)
        asked.says()
        assert isinstance(process, forks.Forked)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        process.kill()
        assert process.wait(SECONDS) == -signal.SIGKILL
        process.kill()


@pytest.mark.cluster
@pytest.mark.parametrize("address", ["", forks.NONE, "no-such-server"])
def test_it_is_started_anew_where_there_is_none(tmp_path, monkeypatch, address):
    monkeypatch.setenv(forks.VARIABLE, address)
    asked = Asked(folder=tmp_path, environment={"PYTHONPATH": os.getcwd()})
    process = started(asked)
    assert asked.says()["session"]
    asked.end(5)
    assert isinstance(process, subprocess.Popen)
    assert process.wait(SECONDS) == 5


@pytest.mark.cluster
def test_it_is_started_anew_where_nothing_is_to_be_loaded(tmp_path, monkeypatch):
    with serving(tmp_path) as server:
        monkeypatch.setenv(forks.VARIABLE, server.first)
        asked = Asked(folder=tmp_path, loaded="", environment={"PYTHONPATH": os.getcwd()})
        process = started(asked)
        asked.says()
        asked.end(0)
        assert isinstance(process, subprocess.Popen)
        assert process.wait(SECONDS) == 0
