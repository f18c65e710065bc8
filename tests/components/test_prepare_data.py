"""The outputs of the first step for KFP when the dataset already exists."""

from pathlib import Path

import pytest

from flotilla.components import prepare_data, resolve_config
from flotilla.components.records.record import Step
from flotilla.components.resolve_config import Resolved
from tests.components.called_steps import artifact_in, no_larger_files_than, refused


@pytest.fixture
def unchanged(tmp_path, monkeypatch):
    """Return the first step of a run that finds nothing new."""
    found = Resolved(config="{}", root="gs://b/r", run_id="digits-2", is_unchanged=True)
    monkeypatch.setattr(resolve_config, "work", lambda _step: found)
    made = {name: artifact_in(tmp_path) for name in ("dataset", "validation", "page")}
    return Step(at="", published="", **made)


def test_where_nothing_is_new_every_output_has_a_file(unchanged, tmp_path):
    (tmp_path / "kfp").mkdir()
    prepared = prepare_data.work(unchanged)
    assert (prepared.Output, prepared.dataset_uri) == ("unchanged", "")
    made = (unchanged.dataset, unchanged.validation, unchanged.page)
    assert all(Path(each.path).stat().st_size for each in made)


def test_on_a_full_disk_it_is_one_line(unchanged, capsys):
    with no_larger_files_than(0):
        code, line = refused(prepare_data.work, unchanged, capsys=capsys)
    assert (code, "File too large; free some space" in line) == (1, True)
