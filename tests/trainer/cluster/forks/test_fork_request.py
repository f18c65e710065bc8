import json
import os
import socket

import pytest

from flotilla.trainer.cluster.forks import fork_request
from flotilla.trainer.cluster.forks.fork_request import Arriving, Request

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
    fork_request.send(one, wanted, writer)
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
    fork_request.send_number(one, -9)
    fork_request.send_number(one, 1 << 40, one.fileno())
    assert fork_request.receive_number(other) == (-9, None)
    number, descriptor = fork_request.receive_number(other)
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
    assert fork_request.is_own_user(ends[0])
