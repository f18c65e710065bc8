"""Tests which checkpoints in a folder are complete, in every layout."""

import os
import zipfile

import pytest

from flotilla.trainer.program import layouts


def write(folder, *names, at=None):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        if at:
            os.utime(path, (at, at))


def state(folder, prefix):
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "{prefix}"\nall: "x"\n')


def paths(found):
    return sorted(map(str, found.files)) if found else None


def test_a_checkpoint_of_tensorflow_is_the_one_that_its_record_names(tmp_path):
    data = "ckpt-7.data-00000-of-00002"
    write(tmp_path, "ckpt-7.index", data, "ckpt-8.index", "graph.pbtxt")
    state(tmp_path, "/another/machine/ckpt-7")
    assert layouts.find_newest(tmp_path) is None
    write(tmp_path, "ckpt-7.data-00001-of-00002", "ckpt-7.meta")
    found = layouts.find_newest(tmp_path)
    assert paths(found) == [
        data, "ckpt-7.data-00001-of-00002", "ckpt-7.index", "ckpt-7.meta",
    ]  # fmt: skip
    assert (found.layout, found.number, found.prefix) == ("tensorflow", 7, "ckpt-7")
    layouts.write_state(tmp_path / "checkpoint", found.prefix)
    assert layouts.find_newest(tmp_path).signature == found.signature


def test_a_name_with_spaces_quotes_and_other_letters(tmp_path):
    prefix = 'my "best" ü\n-7'
    write(tmp_path, f"{prefix}.index", f"{prefix}.data-00000-of-00001")
    layouts.write_state(tmp_path / "checkpoint", prefix)
    # Protobuf escapes the name in this way.
    assert rb"my \042best\042 \303\274\012-7" in (tmp_path / "checkpoint").read_bytes()
    found = layouts.find_newest(tmp_path)
    assert (found.prefix, found.number) == (prefix, 7)
    assert set(layouts.times(found.signature)) == set(paths(found))
    state(tmp_path, r"my \"best\" \303\274\n-7")
    assert layouts.find_newest(tmp_path).prefix == prefix


def test_a_pipe_and_a_link_out_of_the_folder_are_no_files_of_it(tmp_path):
    own, away = tmp_path / "own", tmp_path / "away"
    write(away, "b-1.index", "b-1.data-00000-of-00001", "saved_model.pb")
    own.mkdir()
    os.mkfifo(own / "a.keras")
    os.mkfifo(own / "DONE")
    for name in ("b-1.index", "b-1.data-00000-of-00001", "saved_model.pb"):
        (own / name).symlink_to(away / name)
    (own / "all").symlink_to(away)
    (own / "again").symlink_to(own)
    assert layouts.find_newest(own) is None
    assert layouts.find_model(own) is None
    assert layouts.find_newest(own, "DONE") is None
    assert layouts.files_below(own) == []
    write(own, "c-2.index", "c-2.data-00000-of-00001")
    (own / "last.index").symlink_to("c-2.index")
    (own / "last.data-00000-of-00001").symlink_to(own / "c-2.data-00000-of-00001")
    assert layouts.find_newest(own).number == 2


def test_a_folder_of_many_files_is_looked_at_quickly(tmp_path, monkeypatch):
    for number in range(300):
        write(tmp_path, f"a-{number}.index", f"a-{number}.data-00000-of-00001", f"{number}.keras")
    opened = []
    monkeypatch.setattr(zipfile, "ZipFile", lambda path: opened.append(path) or Archive())
    assert layouts.find_newest(tmp_path).number == 299
    assert len(opened) == 1


class Archive:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def namelist(self):
        return ["a"]


def test_without_a_record_a_whole_one_counts(tmp_path):
    write(tmp_path, "a/b-3.index", "a/b-3.data-00000-of-00001", "a/b-4.index")
    assert layouts.find_newest(tmp_path).number == 3
    # A full disk has truncated the state file, or the checkpoint that it names.
    for text in ("", 'model_checkpoint_path: "b-4', 'model_checkpoint_path: "b-4"'):
        (tmp_path / "a" / "checkpoint").write_text(text)
        assert layouts.find_newest(tmp_path).number == 3


def test_files_of_keras(tmp_path):
    (tmp_path / "half.keras").write_bytes(b"PK\x03\x04")
    assert layouts.find_newest(tmp_path) is None
    with zipfile.ZipFile(tmp_path / "epoch_03.keras", "w") as file:
        file.writestr("config.json", "{}")
    assert layouts.find_newest(tmp_path).number == 3
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "late-9.weights.h5", "w", libver="latest") as file:
        file["a"] = [1.0]
    with h5py.File(tmp_path / "late-10.weights.h5", "w") as file:
        file["a"] = [1.0]
    found = layouts.find_newest(tmp_path)
    assert found.layout == "keras"
    whole = (tmp_path / "late-10.weights.h5").read_bytes()
    for each in tmp_path.iterdir():
        each.unlink()
    (tmp_path / "late-10.weights.h5").write_bytes(whole[:-8])
    assert layouts.find_newest(tmp_path) is None
    (tmp_path / "late-10.weights.h5").write_bytes(whole)
    assert layouts.find_newest(tmp_path).number == 10


def test_folders_of_orbax(tmp_path):
    write(tmp_path, "20.orbax-checkpoint-tmp-7/_CHECKPOINT_METADATA", "x.tmp/saved_model.pb")
    assert layouts.find_newest(tmp_path) is None
    write(tmp_path, "10/default/manifest.ocdbt", "10/default/d/1", "10/_CHECKPOINT_METADATA")
    found = layouts.find_newest(tmp_path)
    assert (found.layout, found.number, len(found.files)) == ("orbax", 10, 3)


def test_a_saved_model(tmp_path):
    write(tmp_path, "1/saved_model.pb", "1/variables/variables.index")
    assert layouts.find_model(tmp_path) is None
    write(tmp_path, "1/variables/variables.data-00000-of-00001", "1/assets/a.txt")
    found = layouts.find_model(tmp_path)
    assert (found.layout, found.number, len(found.files)) == ("saved_model", 1, 4)
    assert not layouts.is_empty(tmp_path)


def test_with_a_marker_only_its_folders_count(tmp_path):
    write(tmp_path, "a-1/weights.bin", "ckpt-2.index", "ckpt-2.data-00000-of-00001")
    assert layouts.find_newest(tmp_path, "DONE") is None
    write(tmp_path, "a-1/DONE")
    found = layouts.find_newest(tmp_path, "DONE")
    assert (found.layout, found.number) == ("marker", 1)
    assert paths(found) == ["a-1/DONE", "a-1/weights.bin"]


def test_the_newest_is_the_one_that_was_written_last(tmp_path):
    write(tmp_path, "9/_METADATA", at=100)
    write(tmp_path, "8/_METADATA", at=200)
    assert layouts.find_newest(tmp_path).number == 8
    assert layouts.find_newest(tmp_path / "absent") is None
