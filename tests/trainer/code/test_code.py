"""Tests which files a code bundle has, its name, and the notes of its runs."""

import json
import os
import subprocess
import sys
import tempfile
import threading

import pytest

from flotilla.trainer import code as bundle
from flotilla.trainer import storage
from flotilla.trainer.code import Collected, Found
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage.manifest import Manifest, checksum
from tests.trainer.code.referred import referred


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
    digest = bundle.compute_digest
    assert digest({"a": "1", "b": "2"}) == digest({"b": "2", "a": "1"})
    assert len(set(map(digest, ({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a\n": "1"})))) == 4


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
    # The file had a different size when the folder was listed.
    listed = Found(path="blocks.py", file=place, bytes=2)
    monkeypatch.setattr(bundle, "collect", lambda _folder: Collected(files=[listed]))
    with pytest.raises(UserError, match=r"--code: blocks.py changed while it was read"):
        bundle.publish(folder, root)
    place.unlink()
    with pytest.raises(UserError, match=r"cannot read .*blocks.py: No such file"):
        bundle.publish(folder, root)
    assert storage.names(root) == []


def test_names_that_come_second_are_remarked(folder, root):
    for name in ("json.py", "yaml.py", "unheard.py", "flotilla/blocks.py", "notes/json.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "key.pem").touch()
    secret, *named = bundle.publish(folder, root).remarks
    assert secret.startswith(
        "--code leaves out key.pem, whose names look like secrets; to include one, add a line "
        "!NAME to"
    )
    assert len(named) == 3
    assert "a run cannot import flotilla: Flotilla has a module with the name flotilla" in named[0]
    assert "a run cannot import json.py: Python has a module with the name json" in named[1]
    assert "yaml.py has the same name as an installed package" in named[2]


@pytest.mark.parametrize("value", ["code", "file:///r/code/abc", "http://h/" + "a" * 64, "s3://b"])
def test_another_uri_is_no_bundle(value):
    with pytest.raises(ValueError, match="code"):
        Config(code=value)


CHILD = """
import os, sys
from flotilla.trainer.runtime import user_code
from flotilla.trainer import code as bundle
bundle.enter(sys.argv[1])
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
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # Set both variables, so that monkeypatch restores them even if they were not set before.
    monkeypatch.setenv(user_code.BUNDLE_VARIABLE, "")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    return folder


def child(uri, cwd):
    command = [sys.executable, "-P", "-c", CHILD, uri]
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_at_once_import_it_and_what_is_pythons_own_stays(made, tmp_path, scratch):
    # A module of the same name in the working directory must not be imported.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "blocks.py").write_text("A = 2\n")
    running = [child(made, tmp_path / "elsewhere") for _ in range(2)]
    for each in running:
        out, err = each.communicate()
        assert each.returncode == 0, err
        assert out.split()[:2] == ["1", str(next(scratch.iterdir()) / storage.name_of(made))]


PROJECT = """
import sys
from flotilla.trainer import code as bundle
from flotilla.trainer.runtime import user_code
bundle.enter(sys.argv[1])
print(user_code.import_module("trainer.task").SIZE, "components" in user_code.folder())
"""


def test_a_project_may_have_folders_of_the_names_of_our_rooms(tmp_path):
    home = tmp_path / "project"
    for name in ("trainer", "components", "pipelines"):
        (home / name).mkdir(parents=True)
        (home / name / "__init__.py").touch()
    (home / "trainer" / "task.py").write_text("from components.sizes import SIZE\n")
    (home / "components" / "sizes.py").write_text("from pipelines import size as SIZE\n")
    (home / "pipelines" / "__init__.py").write_text("size = 7\n")
    made = bundle.publish(home, storage.uri_of(tmp_path / "root"))
    assert made.remarks == ()
    # The image also starts Python with `-P`, without the working directory in the import path.
    command = [sys.executable, "-P", "-c", PROJECT, made.uri]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stdout == "7 False\n", ended.stderr


def test_it_comes_before_what_an_image_has_on_pythonpath(made, tmp_path, monkeypatch):
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "blocks.py").write_text("A = 2\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "image"))
    out, err = child(made, tmp_path).communicate()
    assert out.startswith("1 "), err


def test_its_children_get_it_from_the_environment(made):
    bundle.enter(made)
    assert user_code.bundle() == made
    given = user_code.environment()
    assert given[user_code.FOLDER_VARIABLE] == os.environ[user_code.FOLDER_VARIABLE]
    assert given[user_code.BUNDLE_VARIABLE] == made
    assert user_code.is_users("blocks")


def test_without_a_bundle_nothing_changes():
    before = user_code.environment()
    bundle.enter("")
    assert user_code.environment() == before


def test_what_was_changed_in_transit_is_refused_in_one_line(made):
    path = storage.local_path(made) / "blocks.py"
    path.write_text("A = 9\n")
    with pytest.raises(UserError, match=r"damaged: blocks.py has crc32c") as refused:
        bundle.enter(made)
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
    with pytest.raises(
        UserError, match=r"was changed after it was published: its content does not"
    ):
        bundle.enter(made)
    assert user_code.bundle() == ""
    # The rejected files must not be reused by the next process.
    (place / "blocks.py").write_text(whole[0])
    (place / "MANIFEST.json").write_bytes(whole[1])
    bundle.enter(made)
    assert user_code.import_module("blocks").A == 1
    del sys.modules["blocks"]


def test_a_bundle_that_is_gone_is_refused(made):
    storage.delete(made)
    with pytest.raises(ConfigError, match=r"code: there is no bundle at .*; submit the run again"):
        bundle.enter(made)


def test_a_folder_that_others_may_write_to_is_not_used(made, scratch):
    planted = scratch / f"flotilla-code-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    bundle.enter(made)
    assert planted not in (folder := storage.local_path(storage.uri_of(user_code.folder()))).parents
    assert (folder / "blocks.py").is_file()
    assert list(planted.iterdir()) == []


def test_a_module_that_is_not_in_it_is_not_sought_elsewhere(made):
    bundle.enter(made)
    with pytest.raises(ConfigError, match=r"put it in the folder of --code or on PYTHONPATH"):
        user_code.import_named("model.name", "unheard_of")


def names(*letters):
    return {letter * 64 for letter in letters}


def uri(root, letter):
    return storage.join(root, "code", letter * 64)


def test_runs_and_schedules_refer_to_bundles(root):
    assert referred(root) == set()
    bundle.note_run(root, "digits-1", uri(root, "a"))
    bundle.note_run(root, "digits-1", uri(root, "a"))
    bundle.note_run(root, "digits-1", uri(root, "b"))
    bundle.note_schedule(uri(root, "c"), "nightly")
    bundle.note_schedule(uri(root, "c"), "weekly")
    assert referred(root) == names("a", "b", "c")
    bundle.forget_schedule(uri(root, "c"), "nightly")
    bundle.forget_schedule(uri(root, "c"), "never was")
    assert referred(root) == names("a", "b", "c")
    bundle.forget_schedule(uri(root, "c"), "weekly")
    assert referred(root) == names("a", "b")


def test_a_damaged_note_hides_no_other(root):
    bundle.note_run(root, "digits-1", uri(root, "a"))
    storage.write_bytes(storage.join(root, "digits-2", "code.json"), b"{")
    assert referred(root) == names("a")


def paths(folder):
    return [each.path for each in bundle.collect(folder).files]


def refusal(folder, kind=ConfigError):
    with pytest.raises(kind) as refused:
        bundle.collect(folder)
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_all_files_and_links_within_belong_to_it_in_the_order_of_their_paths(folder):
    (folder / "words.txt").symlink_to("blocks.py")
    (folder / "sub" / "größe x.yaml").write_text("a")
    assert paths(folder) == ["blocks.py", "sub/__init__.py", "sub/größe x.yaml", "words.txt"]


def test_what_is_no_code_is_left_out(folder):
    for name in (".git/config", "sub/__pycache__/a.pyc", ".venv/x.py", "runs/a.json", "data/a.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "MANIFEST.json").write_text("{}")
    (folder / "sub" / "data").mkdir()
    (folder / "sub" / "data" / "own.py").touch()
    assert paths(folder) == ["blocks.py", "sub/__init__.py", "sub/data/own.py"]


def test_secrets_are_left_out_and_named(folder):
    for name in (".env", "credentials", "sub/tls.pem", "credentials.py", ".ssh/id_ed25519"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    collected = bundle.collect(folder)
    assert [each.path for each in collected.files] == [
        "blocks.py", "credentials.py", "sub/__init__.py",
    ]  # fmt: skip
    assert sorted(collected.secrets) == [".env", ".ssh", "credentials", "sub/tls.pem"]


def test_the_rules_of_the_user_come_last(folder):
    (folder / "ca.pem").touch()
    (folder / "data").mkdir()
    (folder / "data" / "rows.py").touch()
    assert bundle.collect(folder).modules_left_out == ["data"]
    (folder / bundle.IGNORE_FILE).write_text("!ca.pem\n!/data/\nsub/\n")
    assert paths(folder) == ["blocks.py", "ca.pem", "data/rows.py"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("/etc/hostname", "again.py is a link to /etc/hostname, outside the folder"),
        ("nowhere", "a broken link"),
        ("sub", "again.py is a link to a folder"),
        ("again.py", "a broken link"),
    ],
)
def test_any_other_link_is_refused_unless_it_is_left_out(folder, target, words):
    (folder / "again.py").symlink_to(target)
    assert words in refusal(folder)
    (folder / bundle.IGNORE_FILE).write_text("again.py\n")
    assert paths(folder) == ["blocks.py", "sub/__init__.py"]


def test_a_pipe_and_a_name_that_no_store_takes_are_refused(folder):
    os.mkfifo(folder / "pipe")
    assert "pipe is neither a file nor a folder" in refusal(folder)
    (folder / "a\nb.py").touch()
    assert "'a\\nb.py' has characters that a store rejects; rename it" in refusal(folder)


def test_a_folder_that_is_none_is_refused(folder, tmp_path):
    assert "No such file or directory; give a folder" in refusal(tmp_path / "absent")
    assert "it is a file; give its folder" in refusal(folder / "blocks.py")
    assert "not a valid path; give a folder" in refusal(tmp_path / "a\0b")
    (tmp_path / "empty").mkdir()
    assert "the folder has no module (*.py); give the folder" in refusal(tmp_path / "empty")


def test_a_folder_that_cannot_be_read_is_named(folder, monkeypatch):
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert refusal(folder, UserError) == f"--code: cannot read {folder / 'sub'}: Permission denied"


def test_too_much_is_refused_by_its_largest_files(folder):
    for name, size in (("weights.bin", 8 << 20), ("rows.csv", 3 << 20), ("small", 9)):
        with (folder / name).open("wb") as file:
            file.truncate(size)
    line = refusal(folder)
    assert "the files total 11.5 MB, and the limit is 10.5 MB" in line
    assert "the largest are weights.bin (8.4 MB), rows.csv (3.1 MB)" in line


def test_too_many_files_are_not_counted_to_the_end(folder, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_FILES", 5)
    (folder / "many").mkdir()
    for number in range(9):
        (folder / "many" / f"{number}.txt").touch()
    assert "more than 5 files, which is the maximum (most are below many" in refusal(folder)


def test_an_ignore_file_that_is_no_text_is_refused(folder):
    (folder / bundle.IGNORE_FILE).write_bytes(b"\xff\xfe\xff")
    assert refusal(folder).endswith(".flotillaignore: not UTF-8 text")


PATHS = ("a.py", "b/a.py", "b/c/a.py", "b/c", "data", "b/data", "b/x y", "[x].py", "!a", "#a", "b")
LINES = (
    ("*.py", "a.py", "b/a.py", "b/c/a.py", "[x].py"),
    ("/a.py", "a.py"),
    ("b/*.py", "b/a.py"),
    ("b/**", "b/a.py", "b/c", "b/c/a.py", "b/data"),
    ("**/c", "b/c", "b/c/a.py"),
    ("b/**/a.py", "b/a.py", "b/c/a.py"),
    ("data", "data", "b/data"),
    ("/data/",),
    ("[a-c]", "b", "b/a.py", "b/c", "b/c/a.py", "b/data"),
    ("[!a-b]", "b/c", "b/c/a.py"),
    (r"\!a", "!a"),
    (r"\#a", "#a"),
    (r"\[x\].py", "[x].py"),
    ("?.py", "a.py", "b/a.py", "b/c/a.py"),
    ("x\\ y  ", "x y"),
    ("# a comment",),
    ("",),
    ("/",),
)


def left_out(lines, path, *, is_folder=False):
    rules = bundle.Rules((line, "here") for line in lines)
    return bool(rules.leaving_out(path, is_folder=is_folder))


def test_a_line_leaves_out_what_git_leaves_out():
    for line, *paths in LINES:
        found = {path for path in (*PATHS, "x y") if left_out([line], path)}
        assert found - {"b/x y"} == set(paths), line


@pytest.mark.parametrize(
    ("lines", "path", "is_left_out"),
    [
        # A slash at the end is for folders.
        (["data/"], "b/data/", True),
        (["data/"], "b/data", False),
        # The last matching line decides.
        (["*.pem", "!mine.pem"], "other.pem", True),
        (["*.pem", "!mine.pem"], "mine.pem", False),
        (["*.pem", "!mine.pem", "mine.*"], "mine.pem", True),
        # What is in a folder can be included again.
        (["b/**", "!b/a.py"], "b/", False),
        (["b/**", "!b/a.py"], "b/a.py", False),
        (["b/**", "!b/a.py"], "b/c", True),
        # These lines are no patterns.
        *(([line], "a", False) for line in ("!", "[z-a]", "\\", "a[")),
    ],
)
def test_the_rules_of_several_lines(lines, path, is_left_out):
    found = left_out(lines, path.rstrip("/"), is_folder=path.endswith("/"))
    assert found == is_left_out
