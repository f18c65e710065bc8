"""What the first step leaves for KFP where there is nothing to do."""

from pathlib import Path

from components import prepare_data
from components.records.record import Step
from components.resolve_config import Resolved
from tests.components.called_steps import artifact_in


def test_where_nothing_is_new_every_output_has_a_file(tmp_path, monkeypatch):
    found = Resolved(config="{}", root="gs://b/r", run_id="digits-2", is_unchanged=True)
    monkeypatch.setattr(Step, "stage", lambda *_: found)
    made = {name: artifact_in(tmp_path) for name in ("dataset", "validation", "page")}
    (tmp_path / "kfp").mkdir()
    prepared = prepare_data.work(Step(at="", published="", **made))
    assert (prepared.Output, prepared.dataset_uri) == ("unchanged", "")
    assert all(Path(each.path).stat().st_size for each in made.values())
