"""A bundle comes onto the path of a process; what is not as it was published is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import pytest

from trainer import storage, user_code
from trainer.code import bundle, delivery
from trainer.errors import ConfigError, UserError
from trainer.storage.manifest import Manifest, checksum

CHILD = """
import os, sys
from trainer import user_code
from trainer.code import delivery
delivery.enter(sys.argv[1])
module = user_code.import_module("blocks")
print(module.A, user_code.folder(), os.getcwd())
user_code.import_module("json").dumps
"""


@pytest.fixture
def made(tmp_path):
    home = tmp_path / "mine"
    home.mkdir()
    (home / "blocks.py").write_text("A = 1\n")
    (home / "json.py").write_text("raise ValueError('not Python\\'s own')\n")
    return bundle.publish(home, storage.uri_of(tmp_path / "root")).uri


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """A process with a temporary folder of its own, whose environment is put back."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # What is set here is put back, whether it was set before or not.
    monkeypatch.setenv(user_code.BUNDLE_VARIABLE, "")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    return folder


def child(uri, cwd):
    command = [sys.executable, "-P", "-c", CHILD, uri]
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_at_once_import_it_and_what_is_pythons_own_stays(made, tmp_path, scratch):
    # Neither is where the process works.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "blocks.py").write_text("A = 2\n")
    running = [child(made, tmp_path / "elsewhere") for _ in range(2)]
    for each in running:
        out, err = each.communicate()
        assert each.returncode == 0, err
        assert out.split()[:2] == ["1", str(next(scratch.iterdir()) / storage.name_of(made))]


def test_it_comes_before_what_an_image_has_on_pythonpath(made, tmp_path, monkeypatch):
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "blocks.py").write_text("A = 2\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "image"))
    out, err = child(made, tmp_path).communicate()
    assert out.startswith("1 "), err


def test_its_children_get_it_from_the_environment(made):
    delivery.enter(made)
    assert user_code.bundle() == made
    given = user_code.environment()
    assert given[user_code.FOLDER_VARIABLE] == os.environ[user_code.FOLDER_VARIABLE]
    assert given[user_code.BUNDLE_VARIABLE] == made
    assert user_code.is_users("blocks")


def test_without_a_bundle_nothing_changes():
    before = user_code.environment()
    delivery.enter("")
    assert user_code.environment() == before


def test_what_was_changed_in_transit_is_refused_in_one_line(made):
    path = storage.local_path(made) / "blocks.py"
    path.write_text("A = 9\n")
    with pytest.raises(UserError, match=r"damaged: blocks.py has crc32c") as refused:
        delivery.enter(made)
    assert "\n" not in str(refused.value)
    assert user_code.bundle() == ""


def test_a_changed_manifest_does_not_help(made):
    place = storage.local_path(made)
    whole = (place / "blocks.py").read_text(), (place / "MANIFEST.json").read_bytes()
    (place / "blocks.py").write_text("A = 9\n")
    tree = json.loads(whole[1])
    [entry] = [each for each in tree["files"] if each["path"] == "blocks.py"]
    entry["crc32c"] = checksum(place / "blocks.py").crc32c
    (place / "MANIFEST.json").write_bytes(Manifest.from_json(json.dumps(tree)).to_json())
    with pytest.raises(UserError, match=r"was changed after it was published: its content is not"):
        delivery.enter(made)
    assert user_code.bundle() == ""
    # Nothing of it is left for the next process.
    (place / "blocks.py").write_text(whole[0])
    (place / "MANIFEST.json").write_bytes(whole[1])
    delivery.enter(made)
    assert user_code.import_module("blocks").A == 1
    del sys.modules["blocks"]


def test_a_bundle_that_is_gone_is_refused(made):
    storage.delete(made)
    with pytest.raises(ConfigError, match=r"code: there is no bundle at .*; submit again with"):
        delivery.enter(made)


def test_a_folder_that_others_may_write_to_is_not_used(made, scratch):
    planted = scratch / f"flotilla-code-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    delivery.enter(made)
    assert planted not in (folder := storage.local_path(storage.uri_of(user_code.folder()))).parents
    assert (folder / "blocks.py").is_file()
    assert list(planted.iterdir()) == []


def test_a_module_that_is_not_in_it_is_not_sought_elsewhere(made):
    delivery.enter(made)
    with pytest.raises(ConfigError, match=r"it has to be in the folder of --code or on PYTHONPATH"):
        user_code.import_for("model.name", "unheard_of")
