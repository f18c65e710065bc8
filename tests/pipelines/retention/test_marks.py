"""Tests marks of use and removal that are damaged, from another clock or from a killed process."""

import pytest

from flotilla.components import in_use
from flotilla.pipelines.cli import app
from flotilla.pipelines.retention import removal
from flotilla.trainer import storage
from tests.pipelines.retention.roots import manifest
from tests.pipelines.retention.test_removal import swept

PATH = "datasets/d"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def dataset(root):
    return manifest(root / "datasets" / "d", "dataset", 90)


def marked(root, name, content):
    storage.write_bytes(in_use._place(storage.uri_of(root), PATH, name), content)


@pytest.mark.parametrize("mark", [b"", b"{", b'{"at": "soon"}', b'{"at": 1e11}', b'{"at": 1.0}'])
def test_a_mark_of_removal_that_says_nothing_makes_nobody_wait(root, dataset, clock, mark):
    marked(root, "removing-1.json", mark)
    assert in_use.use(dataset)
    assert clock.passed == 0


def test_a_removal_is_waited_for_no_longer_than_it_may_last(root, dataset, clock, caplog):
    with in_use.removing(storage.uri_of(root), PATH, 0.0):
        # In each pause, another `gc` marks the dataset for removal.
        clock.each = lambda: in_use._write(storage.uri_of(root), PATH, "removing-2.json")
        assert in_use.use(dataset)
    assert clock.passed == pytest.approx(600, abs=1)
    assert len(caplog.messages) == 59
    assert caplog.messages[0].startswith("waiting up to 590 s more for `flotilla gc`, which")
    assert f"about to remove {dataset}" in caplog.messages[0]


@pytest.mark.parametrize("mark", [b"{", b'{"at": 1e11}'])
def test_what_an_unclear_mark_says_is_used_stays(root, dataset, mark):
    marked(root, "used.json", mark)
    assert swept(root) == []
    assert storage.verify(dataset)


@pytest.mark.parametrize("ahead", [-7200, 3000, 7200, 2 * 86400])
@pytest.mark.parametrize("words", [(), ("--keep-runs", "1d", "--yes")])
def test_nothing_is_removed_by_a_clock_that_is_ahead(root, dataset, monkeypatch, ahead, words):
    now = removal.time.time()
    monkeypatch.setattr(removal.time, "time", lambda: now + ahead)
    code = app.call(["gc", "--workdir", str(root), *words])
    assert (code, storage.is_published(dataset)) == ((1, True) if ahead > 3600 else (0, not words))
