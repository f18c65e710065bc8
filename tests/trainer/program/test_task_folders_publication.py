"""Tests that complete checkpoints of a program are published and restored into its folder."""

import zipfile

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import History
from flotilla.trainer.checkpoints.index import list_checkpoints
from flotilla.trainer.cluster.lease import NoLease
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.program import layouts
from flotilla.trainer.program.agent import Agent
from flotilla.trainer.program.metrics import Metrics
from flotilla.trainer.program.task_folders import Publisher, TaskFolders, fill, find_published
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.program.runs import COUNT, make_job, published_steps


@pytest.fixture
def job(tmp_path):
    return make_job(tmp_path, COUNT, training={"keep": 2})


@pytest.fixture
def folders(job):
    found = TaskFolders(folder=job.workdir)
    found.make()
    return found


def publisher_of(job, folders):
    found = Publisher(job, folders, NoLease())
    found.begin(Metrics(History(job.checkpoints, start=0), 0, 0))
    return found


def save(folders, step, text="a"):
    for name in (f"ckpt-{step}.index", f"ckpt-{step}.data-00000-of-00001"):
        (folders.checkpoints / name).write_text(text)
    (folders.checkpoints / "checkpoint").write_text(f'model_checkpoint_path: "ckpt-{step}"')


def unknown(_when, _number):
    return -1


def finish(publisher, *, with_model=False):
    return publisher.finish(unknown, {"loss": 1.0}, with_model=with_model)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_one_that_its_record_names_is_published_at_once_and_once(job, folders):
    publisher = publisher_of(job, folders)
    save(folders, 3)
    publisher.look(unknown, {"loss": 1.0})
    publisher.look(unknown, {})
    assert finish(publisher).endswith("step-00000003")
    assert published_steps(job) == [3]
    save(folders, 5)
    finish(publisher)
    save(folders, 9)
    finish(publisher)
    assert published_steps(job) == [5, 9]


def test_the_last_one_is_published_again_if_its_step_was_reported_late(job, folders):
    publisher = publisher_of(job, folders)
    save(folders, 20)
    publisher.look(lambda _when, _number: 0, {})
    uri = publisher.finish(lambda _when, number: number, {}, with_model=False)
    assert uri.endswith("step-00000020")
    assert published_steps(job) == [0, 20]


def test_a_step_that_is_reported_while_the_folder_is_searched_counts(job, folders, monkeypatch):
    agent = Agent(job, Cluster(addresses={"chief": ("a:1",)}), Task(role="chief", index=0))
    agent._publisher = publisher_of(job, folders)
    agent._make_metrics(agent._publisher)
    folders.metrics.write_text('{"step": 0}\n')

    def report_and_find(*args, find=layouts.find_newest):
        with folders.metrics.open("a") as file:
            file.write('{"step": 20}\n')
        save(folders, 20)
        return find(*args)

    monkeypatch.setattr(layouts, "find_newest", report_and_find)
    agent._look()
    agent._publisher._uploads.flush()
    assert published_steps(job) == [20]


def test_another_layout_has_to_be_the_same_at_two_looks(job, folders):
    publisher = publisher_of(job, folders)

    def write(step, text="a"):
        with zipfile.ZipFile(folders.checkpoints / f"epoch-{step}.keras", "w") as file:
            file.writestr("a", text)

    write(1)
    publisher.look(unknown, {})
    write(1, "another")
    publisher.look(unknown, {})
    assert published_steps(job) == []
    # The next checkpoint is started before this one has been seen unchanged.
    write(2)
    publisher.look(unknown, {})
    write(3)
    publisher._uploads.flush()
    assert published_steps(job) == [1]
    finish(publisher)
    assert published_steps(job) == [1, 3]


def test_a_new_attempt_publishes_what_was_whole_and_begins_from_it(job, folders):
    publisher_of(job, folders)
    save(folders, 3)
    (folders.checkpoints / "ckpt-4.index").touch()
    again = publisher_of(job, folders)
    assert again.step == 3
    whole = ["checkpoint", "ckpt-3.data-00000-of-00001", "ckpt-3.index"]
    assert names(folders.checkpoints) == whole
    publisher_of(job, folders)
    assert published_steps(job) == [3]


def test_a_damaged_one_is_passed_over(job, folders):
    publisher = publisher_of(job, folders)
    for step in (3, 5):
        save(folders, step)
        finish(publisher)
    damaged = storage.local_path(storage.join(job.checkpoints, "step-00000005"))
    (damaged / "checkpoint" / "ckpt-5.index").write_text("other")
    (folders.exchange / "known.json").unlink()
    for path in folders.checkpoints.iterdir():
        path.unlink()
    assert publisher_of(job, folders).step == 3


def test_the_model_is_published_with_the_last_checkpoint(job, folders):
    publisher = publisher_of(job, folders)
    save(folders, 3)
    finish(publisher)
    (folders.model / "1").mkdir()
    (folders.model / "1" / "a.txt").write_text("a")
    uri = finish(publisher, with_model=True)
    files = [each.path for each in storage.verify(uri).files]
    assert "model/1/a.txt" in files
    assert "checkpoint/ckpt-3.index" in files
    assert published_steps(job) == [3]


@pytest.mark.parametrize("place", ["publish", "delete"])
def test_nothing_is_lost_when_the_end_is_killed(job, folders, monkeypatch, place):
    publisher = publisher_of(job, folders)
    save(folders, 3)
    finish(publisher)
    (folders.model / "a.txt").write_text("a")

    def die(*_args, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, place, die)
    with pytest.raises(KeyboardInterrupt):
        finish(publisher, with_model=True)
    monkeypatch.undo()
    at, step = find_published(job.checkpoints)
    assert step == 3
    assert bool(storage.verify(at).fields["program"]["model"]) == (place == "delete")
    # The next attempt starts from the published checkpoint, and only one checkpoint of this step
    # remains.
    publisher = publisher_of(job, folders)
    assert publisher.last == at
    (folders.model / "a.txt").write_text("another")
    uri = finish(publisher, with_model=True)
    assert storage.read_file(uri, "model/a.txt") == b"another"
    assert [each for each, _ in list_checkpoints(job.checkpoints)] == [uri]


def test_a_program_that_leaves_nothing_has_a_record_of_its_end(job, folders):
    uri = finish(publisher_of(job, folders), with_model=True)
    assert storage.read_manifest(uri).fields["global_step"] == 0
    assert find_published(job.checkpoints) == ("", 0)


@pytest.mark.parametrize("name", ["checkpoints/ckpt-3.index", "model", "model/a.txt"])
def test_what_cannot_be_read_is_refused_and_not_left_out(job, folders, monkeypatch, name):
    publisher = publisher_of(job, folders)
    save(folders, 3)
    (folders.model / "a.txt").write_text("a")
    closed = folders.folder / name
    monkeypatch.setattr("os.access", lambda path, _mode: path != closed)
    with pytest.raises(UserError, match=f"cannot read .*{name}: Permission denied; .*runAsUser"):
        finish(publisher, with_model=True)
    assert published_steps(job) == []


def test_one_that_changes_meanwhile_is_dropped(job, folders, monkeypatch):
    publisher = publisher_of(job, folders)
    save(folders, 3)
    publish = storage.publish

    def slow(*args, **more):
        found = publish(*args, **more)
        save(folders, 3, "other")
        return found

    monkeypatch.setattr(storage, "publish", slow)
    with pytest.raises(UserError, match="another process still writes there"):
        finish(publisher)
    assert published_steps(job) == []
    monkeypatch.undo()
    finish(publisher)
    assert published_steps(job) == [3]


def test_a_folder_that_is_read_meanwhile_is_added_to(job, folders, tmp_path):
    publisher = publisher_of(job, folders)
    save(folders, 3)
    uri = finish(publisher)
    other = TaskFolders(folder=tmp_path / "other")
    other.make()
    (other.checkpoints / "own.txt").touch()
    fill(other, uri, keeps=True)
    assert "own.txt" in names(other.checkpoints)
    assert "checkpoint" in names(other.checkpoints)
    fill(other, uri)
    assert "own.txt" not in names(other.checkpoints)
