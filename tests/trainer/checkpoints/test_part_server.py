"""Tests how a server answers the request files of a chief."""

import base64
import errno
import os
from contextlib import contextmanager

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import part_server
from flotilla.trainer.checkpoints.part_server import KEPT_REPLIES, PartServer, Reply, Request
from tests.trainer.checkpoints.by_parts import room_for


def answered(server, folder, name, request):
    (folder / "parts/requests" / f"{name}.json").write_text(request.to_json(), encoding="utf-8")
    assert server.answer_next()
    return Reply.from_json((folder / f"parts/replies/{name}.json").read_bytes())


def waiting(folder):
    """Return a server that answers only when it is called."""
    for name in ("requests", "replies"):
        (folder / "parts" / name).mkdir(parents=True)
    return PartServer(folder, "ps-0")


def with_part(folder, index=b"index"):
    server = waiting(folder)
    (folder / "parts/one.data-00000-of-00001").write_bytes(b"values")
    (folder / "parts/one.index").write_bytes(index)
    return server


@contextmanager
def publishing(folder):
    """Yield a request to publish the part, and a list of replies, which are committed."""
    uri, replies = storage.uri_of(folder / "there"), []
    with storage.draft(uri) as draft:
        yield Request(action="publish", uri=draft, prefix="parts/one", name="data"), replies
        entries = [each.entry for each in replies]
        storage.commit(draft, uri, kind="checkpoint", files=entries, fields={})
    assert storage.read_file(uri, "data") == b"values"


def test_a_part_is_published_and_its_index_returned(tmp_path):
    server = with_part(tmp_path)
    with publishing(tmp_path) as (request, replies):
        replies.append(reply := answered(server, tmp_path, "a", request))
    assert base64.b64decode(reply.index) == b"index"
    assert not list((tmp_path / "parts").glob("one*"))


@pytest.mark.parametrize("size", [0, 1000])
def test_what_is_done_is_answered_when_there_is_room_again(tmp_path, size):
    index = b"index" * 1000
    server = with_part(tmp_path, index)
    with publishing(tmp_path) as (request, replies):
        asked, there = (tmp_path / "parts" / each / "a.json" for each in ("requests", "replies"))
        asked.write_text(request.to_json(), encoding="utf-8")
        with room_for(size):
            assert server.answer_next()
            assert not server.answer_next()
        if size:
            reply = Reply.from_json(there.read_bytes())
            assert reply.transient
            assert reply.error.startswith("ps-0: cannot write its reply: File too large; free")
        else:
            assert there.read_text() == request.to_json()
        replies.append(reply := answered(server, tmp_path, "b", request))
    assert base64.b64decode(reply.index) == index


def test_what_is_not_done_is_done_again(tmp_path):
    server = with_part(tmp_path)
    (tmp_path / "parts/one.index").unlink()
    with publishing(tmp_path) as (request, replies):
        assert "one.index" in answered(server, tmp_path, "a", request).error
        (tmp_path / "parts/one.index").write_bytes(b"index")
        replies.append(answered(server, tmp_path, "b", request))


@pytest.mark.parametrize("prefix", ["", "parts", "parts/../x", "x", "parts/replies"])
def test_only_parts_are_removed(tmp_path, prefix):
    server = waiting(tmp_path)
    (tmp_path / "x").mkdir()
    reply = answered(server, tmp_path, "a", Request(action="discard", prefix=prefix))
    assert reply.error == f"ps-0: {prefix!r} is not part of a checkpoint, so it is not removed"
    assert (tmp_path / "x").is_dir()


def test_a_part_that_was_not_written_to_its_end_is_removed_too(tmp_path):
    server = waiting(tmp_path)
    for name in ("one.index", "one.data-00000-of-00001.tempstate7", "one.index.tempstate7", "one1"):
        (tmp_path / "parts" / name).write_bytes(b"values")
    assert not answered(server, tmp_path, "a", Request(action="discard", prefix="parts/one")).error
    found = {each.name for each in (tmp_path / "parts").iterdir() if each.is_file()}
    assert found == {"one1"}


def test_what_a_chief_has_left_goes_when_another_one_begins(tmp_path):
    server = waiting(tmp_path)
    answered(server, tmp_path, "a", Request(action="discard", prefix="parts/none"))
    (tmp_path / "parts/one-part-0.data-00000-of-00001").write_bytes(b"values")
    (tmp_path / "parts/restored-1").mkdir()
    (tmp_path / "parts/restored-1/variables.index").write_bytes(b"index")
    (tmp_path / "parts/ready.json").write_text("{}")
    assert not answered(server, tmp_path, "b", Request(action="begin")).error
    found = {each.name for each in (tmp_path / "parts").iterdir()}
    assert found == {"ready.json", "requests", "replies"}
    assert (tmp_path / "parts/replies/a.json").exists()


def test_what_fails_is_an_answer(tmp_path):
    server = waiting(tmp_path)
    lacking = answered(
        server, tmp_path, "a", Request(action="publish", uri="file:///x", prefix="y")
    )
    assert lacking.error.startswith("ps-0: ")
    assert "KeyError" in answered(server, tmp_path, "b", Request(action="else")).error


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_what_its_disk_refuses_is_one_line(tmp_path, monkeypatch, number):
    server = waiting(tmp_path)

    def refuse(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(part_server.Path, "read_bytes", refuse)
    reply = server._answer(Request(action="publish", uri="file:///x", prefix="parts/y"))
    line = f"ps-0: cannot publish a part of a checkpoint in {tmp_path}/parts: {tmp_path}/parts/y"
    assert reply.error.startswith(f"{line}.index: {os.strerror(number)}")
    # The chief repeats a request whose error may be transient.
    assert reply.transient == (number == errno.EIO)


def test_a_request_that_comes_again_is_answered_once(tmp_path):
    server = with_part(tmp_path)
    with publishing(tmp_path) as (request, replies):
        replies.append(answered(server, tmp_path, "a", request))
        # A moved file cannot be moved again, so the server must repeat its first reply.
        assert answered(server, tmp_path, "a", request) == replies[0]
    assert not list((tmp_path / "parts/requests").iterdir())


def test_what_is_published_is_published_where_its_index_cannot_be_removed(tmp_path, monkeypatch):
    server = with_part(tmp_path)
    unlink = part_server.Path.unlink

    def refuse(path, **named):
        if path.name == "one.index":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        unlink(path, **named)

    monkeypatch.setattr(part_server.Path, "unlink", refuse)
    with publishing(tmp_path) as (request, replies):
        replies.append(answered(server, tmp_path, "a", request))


def test_a_request_that_is_not_whole_waits(tmp_path):
    server = waiting(tmp_path)
    request = Request(action="discard", prefix="parts/none").to_json()
    path = tmp_path / "parts/requests/a.json"
    path.write_text(request[:-1], encoding="utf-8")
    assert not server.answer_next()
    path.write_text(request, encoding="utf-8")
    assert server.answer_next()


def test_a_request_that_another_thread_has_answered_is_passed_over(tmp_path):
    server = waiting(tmp_path)
    # The file is listed, and deleted before it is read.
    (tmp_path / "parts/requests/a.json").symlink_to(tmp_path / "none")
    assert not answered(server, tmp_path, "b", Request(action="discard", prefix="parts/none")).error


def test_answers_do_not_pile_up(tmp_path):
    server = waiting(tmp_path)
    for number in range(KEPT_REPLIES + 5):
        answered(server, tmp_path, f"{number}", Request(action="discard", prefix="parts/none"))
    assert len(list((tmp_path / "parts/replies").iterdir())) == KEPT_REPLIES
