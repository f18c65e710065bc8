"""A night on which nothing came: a run of two steps, which asks for no cluster."""

import pytest

from components import resolve_config
from components.records import run_store
from tests.pipelines.called import call, setting
from trainer import storage
from trainer.config.load import load_config
from trainer.promotion import trained

pytestmark = pytest.mark.slow


def test_a_night_without_news_asks_for_no_cluster(tmp_path, monkeypatch):
    monkeypatch.delenv(run_store.RUN_FOLDER, raising=False)
    (tmp_path / "s-1.csv").write_text("a,b\n1,2\n")
    source, workdir = tmp_path / "s-{SPAN}.csv", tmp_path / "runs"
    root = storage.uri_of(workdir)
    config = resolve_config.with_listing(load_config(None, [f"data.source={source}"]), root)
    trained.begin(config, root, "first")
    trained.end(root, "first", "promoted")
    again = call("run", workdir, *setting(data__source=source), cwd=tmp_path)
    assert (again.code, again.answer["status"]) == (0, "unchanged"), again.err
    assert again.answer["message"].endswith("those of first, which has finished")
    assert again.statuses() == {"resolve_config": "done", "finish": "done"}
    assert not (again.folder / "cluster").exists()
    assert "There is nothing new" in (again.folder / "report.html").read_text()
