import os
import socket

import pytest

from trainer.cluster.forks import fork_request
from trainer.cluster.forks.fork_request import Request

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
    found, descriptors = fork_request.receive(other)
    assert found == wanted
    assert len(descriptors) == 2
    os.write(descriptors[1], b"x")
    assert os.read(reader, 1) == b"x"
    for each in (reader, writer, *descriptors):
        os.close(each)


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
        fork_request.receive(other)


def test_the_other_end_is_of_this_user(ends):
    assert fork_request.is_own_user(ends[0])
