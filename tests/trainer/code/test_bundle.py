"""A bundle has the name of its content, and is published once."""

from __future__ import annotations

import os
import threading

import pytest

from trainer import storage
from trainer.code import bundle
from trainer.code.collect import Collected, Found
from trainer.config.schema import Config
from trainer.errors import UserError


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "mine"
    (home / "sub").mkdir(parents=True)
    (home / "blocks.py").write_text("A = 1\n")
    (home / "sub" / "__init__.py").touch()
    return home


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


def test_it_is_published_below_its_digest(folder, root):
    made = bundle.publish(folder, root)
    manifest = storage.verify(made.uri)
    assert storage.parent_of(made.uri) == f"{root}/code"
    assert [each.path for each in manifest.files] == ["blocks.py", "sub/__init__.py"]
    assert (manifest.kind, manifest.fields["digest"]) == ("code", storage.name_of(made.uri))
    assert (made.files, made.bytes, made.remarks) == (2, 6, ())


def test_the_same_content_is_the_same_bundle_whatever_else_differs(folder, root, tmp_path):
    made = bundle.publish(folder, root)
    before = storage.read_manifest(made.uri).created
    other = tmp_path / "other"
    (other / "sub").mkdir(parents=True)
    (other / "sub" / "__init__.py").touch()
    (other / "blocks.py").write_text("A = 1\n")
    (other / "blocks.py").chmod(0o755)
    os.utime(other / "blocks.py", (1, 1))
    assert bundle.publish(other, root).uri == made.uri
    assert storage.read_manifest(made.uri).created == before
    (other / "blocks.py").write_text("A = 2\n")
    assert bundle.publish(other, root).uri != made.uri


def test_a_name_and_a_content_are_not_mixed_up():
    assert bundle.digest_of({"a": "1", "b": "2"}) == bundle.digest_of({"b": "2", "a": "1"})
    assert (
        len({bundle.digest_of(each) for each in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a\n": "1"})})
        == 4
    )


def test_two_at_once_publish_one(folder, root):
    found: list[str] = []
    ready = threading.Barrier(4)

    def work():
        ready.wait()
        found.append(bundle.publish(folder, root).uri)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    storage.verify(found[0])


def test_a_file_that_changes_meanwhile_is_refused(folder, root, monkeypatch):
    place = folder / "blocks.py"
    # It was so long when the folder was listed.
    listed = Found(path="blocks.py", file=place, bytes=2)
    monkeypatch.setattr(bundle, "collect", lambda _folder: Collected(files=[listed]))
    with pytest.raises(UserError, match=r"--code: blocks.py changed while it was read"):
        bundle.publish(folder, root)
    place.unlink()
    with pytest.raises(UserError, match=r"cannot read .*blocks.py: No such file"):
        bundle.publish(folder, root)
    assert storage.names(root) == []


def test_names_that_come_second_are_remarked(folder, root):
    for name in ("json.py", "yaml.py", "unheard.py", "trainer/blocks.py", "notes/json.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "key.pem").touch()
    secret, *named = bundle.publish(folder, root).remarks
    assert secret.startswith("--code leaves out key.pem: secrets by their names; a line !NAME of")
    assert len(named) == 3
    assert "json.py is not found by a run: json is a name of Python itself" in named[0]
    assert "trainer is not found by a run: trainer is a name of Flotilla itself" in named[1]
    assert "yaml.py has the name of an installed package" in named[2]


@pytest.mark.parametrize("value", ["code", "file:///r/code/abc", "http://h/" + "a" * 64, "s3://b"])
def test_another_uri_is_no_bundle(value):
    with pytest.raises(ValueError, match="code"):
        Config(code=value)
