"""What a server answers to the files of a chief."""

from __future__ import annotations

import base64

from trainer import storage
from trainer.checkpoints.part_server import KEPT_REPLIES, PartServer, Reply, Request


def answered(server, folder, name, request):
    (folder / "parts/requests" / f"{name}.json").write_text(request.to_json(), encoding="utf-8")
    assert server.answer_next()
    return Reply.from_json((folder / f"parts/replies/{name}.json").read_bytes())


def waiting(folder):
    """Return a server that answers when it is called."""
    for name in ("requests", "replies"):
        (folder / "parts" / name).mkdir(parents=True)
    return PartServer(folder, "ps-0")


def test_a_part_is_published_and_its_index_returned(tmp_path):
    server = waiting(tmp_path)
    (tmp_path / "parts/one.data-00000-of-00001").write_bytes(b"values")
    (tmp_path / "parts/one.index").write_bytes(b"index")
    uri = storage.uri_of(tmp_path / "there")
    with storage.draft(uri) as draft:
        request = Request(action="publish", uri=draft, prefix="parts/one", name="data")
        reply = answered(server, tmp_path, "a", request)
        storage.commit(draft, uri, kind="checkpoint", files=[reply.entry], fields={})
    assert storage.read_file(uri, "data") == b"values"
    assert base64.b64decode(reply.index) == b"index"
    assert not list((tmp_path / "parts").glob("one*"))


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
    assert lacking.error
    assert "KeyError" in answered(server, tmp_path, "b", Request(action="else")).error


def test_a_request_that_is_not_whole_waits(tmp_path):
    server = waiting(tmp_path)
    request = Request(action="discard", prefix="parts/none").to_json()
    path = tmp_path / "parts/requests/a.json"
    path.write_text(request[:-1], encoding="utf-8")
    assert not server.answer_next()
    path.write_text(request, encoding="utf-8")
    assert server.answer_next()


def test_answers_do_not_pile_up(tmp_path):
    server = waiting(tmp_path)
    for number in range(KEPT_REPLIES + 5):
        answered(server, tmp_path, f"{number}", Request(action="discard", prefix="parts/none"))
    assert len(list((tmp_path / "parts/replies").iterdir())) == KEPT_REPLIES
