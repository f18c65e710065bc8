"""Tests which tasks are reported as alive and as restarted."""

import json

import pytest

from flotilla.trainer.cluster.liveness import Peers
from flotilla.trainer.cluster.process import STARTS
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.telemetry import metrics
from flotilla.trainer.telemetry.metrics import TaskWatch

CHIEF = Task(role="chief", index=0)
SERVER, FIRST, SECOND = (
    Task(role="ps", index=0), Task(role="worker", index=0), Task(role="worker", index=1),
)  # fmt: skip
CLUSTER = Cluster(addresses={"chief": ("h:1",), "ps": ("h:2",), "worker": ("h:3", "h:4")})


class Reports:
    def __init__(self, folder):
        self.folder, self.last = folder, None

    def watch(self):
        def report(*counts):
            self.last = [dict(each) for each in counts]

        return TaskWatch(CLUSTER, CHIEF, self.folder, report)


@pytest.fixture
def reports(tmp_path):
    return Reports(tmp_path)


def test_those_that_are_gone_or_silent_are_not_alive(reports):
    reports.watch().note(Peers(gone=(SERVER,), silent=(FIRST,)))
    alive, expected, restarts = reports.last
    assert alive == {"chief": 1, "worker": 1}
    assert expected == {"chief": 1, "ps": 1, "worker": 2}
    assert restarts == {}


def test_a_task_that_has_not_started_yet_has_not_begun_again(reports):
    watch = reports.watch()
    watch.note(Peers(gone=(SERVER, FIRST, SECOND)))
    watch.note(Peers())
    assert reports.last[2] == {}


def test_a_task_that_comes_back_has_begun_again_once(reports):
    watch = reports.watch()
    for gone in [(), (FIRST,), (FIRST, SECOND), (), (FIRST,), ()]:
        watch.note(Peers(gone=gone))
    assert reports.last[2] == {"worker": 3}


@pytest.mark.parametrize(
    ("rounds", "restarts"),
    [
        ([Peers(), Peers(silent=(FIRST,)), Peers()], {}),
        ([Peers(), Peers(gone=(FIRST,)), Peers(silent=(FIRST,)), Peers()], {"worker": 1}),
    ],
)
def test_a_task_that_is_only_slow_has_not_begun_again(reports, rounds, restarts):
    watch = reports.watch()
    for peers in rounds:
        watch.note(peers)
    assert reports.last[2] == restarts


def started(folder, **counts):
    """Write how often the launcher has started each task, once by default."""
    for task in (CHIEF, SERVER, FIRST, SECOND):
        path = folder / str(task) / STARTS
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(counts.get(str(task).replace("-", "_"), 1)))


def test_a_task_that_is_back_before_it_is_asked_again_is_counted_by_its_launcher(tmp_path):
    reports = Reports(tmp_path / str(CHIEF))
    started(tmp_path)
    watch = reports.watch()
    watch.note(Peers())
    assert sum(reports.last[2].values()) == 0
    started(tmp_path, worker_1=3, chief_0=2)
    watch.note(Peers())
    # The watch never saw these tasks absent, but the launcher counted their restarts.
    assert {role: n for role, n in reports.last[2].items() if n} == {"worker": 2, "chief": 1}


def test_the_count_of_the_launcher_becomes_no_less(tmp_path, monkeypatch):
    reports = Reports(tmp_path / str(CHIEF))
    started(tmp_path, worker_1=3, chief_0=2)
    # The watch's own file counts no restarts.
    watch = reports.watch()
    begun(watch, monkeypatch)
    assert reports.last[2] == {"worker": 2, "chief": 1, "ps": 0}
    # The launcher is just rewriting this file.
    (tmp_path / str(SECOND) / STARTS).write_text("")
    watch.note(Peers())
    assert reports.last[2] == {"worker": 2, "chief": 1, "ps": 0}


@pytest.mark.parametrize("text", ["", "x", None])
def test_without_the_count_of_a_task_those_that_were_away_are_counted(tmp_path, text):
    reports = Reports(tmp_path / str(CHIEF))
    started(tmp_path, worker_1=3)
    path = tmp_path / str(FIRST) / STARTS
    path.unlink() if text is None else path.write_text(text)
    watch = reports.watch()
    for gone in [(), (FIRST,), ()]:
        watch.note(Peers(gone=gone))
    assert reports.last[2] == {"worker": 1}


def begun(watch, monkeypatch):
    monkeypatch.setattr(watch, "_watch", lambda: None)
    with watch.watching():
        pass


def test_the_next_attempt_of_the_same_launcher_counts_on(reports, monkeypatch):
    first = reports.watch()
    begun(first, monkeypatch)
    assert reports.last == [{"chief": 1}, {"chief": 1, "ps": 1, "worker": 2}, {}]
    for gone in [(), (FIRST,), (), (SERVER,)]:
        first.note(Peers(gone=gone))
    second = reports.watch()
    begun(second, monkeypatch)
    assert reports.last[2] == {"worker": 1, "chief": 1}
    # This task was absent when the previous attempt ended.
    second.note(Peers())
    assert reports.last[2] == {"worker": 1, "chief": 1, "ps": 1}


@pytest.mark.parametrize("text", ["{", "[]", '{"launcher": "1 2"}', '{"launcher": 3}', None])
def test_another_launcher_or_a_damaged_file_begins_at_zero(reports, monkeypatch, text):
    first = reports.watch()
    begun(first, monkeypatch)
    path = reports.folder / metrics.FILE
    if text is None:
        kept = json.loads(path.read_text())
        text = json.dumps({**kept, "launcher": "1 2"})
    path.write_text(text)
    begun(reports.watch(), monkeypatch)
    assert reports.last[2] == {}


def test_a_folder_that_takes_no_file_ends_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    reports = Reports(tmp_path / "file")
    begun(reports.watch(), monkeypatch)
    assert reports.last[2] == {}


def test_an_attempt_that_fails_looks_once_more(reports, monkeypatch):
    watch = reports.watch()
    watch.note(Peers())
    monkeypatch.setattr(watch, "_watch", lambda: None)
    monkeypatch.setattr(metrics, "probe_peers", lambda *_: Peers(gone=(SERVER,)))
    with pytest.raises(KeyError), watch.watching():
        raise KeyError
    assert reports.last[0] == {"chief": 1, "worker": 2}
    assert json.loads((reports.folder / metrics.FILE).read_text())["lost"] == ["ps-0"]
