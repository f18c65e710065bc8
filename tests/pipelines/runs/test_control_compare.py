"""Tests `flotilla compare`, which shows runs side by side."""

import json

import pytest

from flotilla.pipelines.cli import app
from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from tests.pipelines.step_events import done, write

RUNS = ("digits-20260101-000000-aaaa", "digits-20260102-000000-bbbb")


@pytest.fixture
def workdir(tmp_path):
    """Create two runs that differ in steps and accuracy; the second run has no decision."""
    for number, run in enumerate(RUNS):
        folder = tmp_path / "runs" / run
        (folder / "made").mkdir(parents=True)
        config = parse_config({"training": {"steps": 100 * (number + 1)}})
        (folder / "config.json").write_text(config.model_dump_json())
        metrics = {"metrics": {"accuracy": 0.9 + number / 100}}
        (folder / "made" / "metrics.json").write_text(json.dumps(metrics))
        uri = storage.uri_of(folder / "evaluation" / "step-1")
        storage.publish(folder / "made", uri, kind="evaluation")
        write(folder, [*done("train_model"), *done("evaluate_model", uri=uri)])
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir()
        row = {"global_step": 100 * (number + 1), "loss": 0.5, "seconds": 2.0}
        (checkpoints / "history.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path / "runs"


@pytest.fixture
def compare(workdir, capsys):
    def call(*words):
        code = app.call(["compare", *words, "--workdir", str(workdir)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_metrics_are_side_by_side_and_settings_where_they_differ(compare):
    code, out, text = compare(*RUNS, "--json")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found["runs"] == list(RUNS)
    table = found["comparison"]
    assert table["verdict"] == {"verdict": ["done", "done"]}
    assert table["test"] == {"accuracy": [0.9, 0.91]}
    assert table["training"]["global_step"] == [100, 200]
    assert table["settings"] == {"training.steps": [100, 200]}
    assert table["cost"]["tasks"] == [{"ps": 1, "worker": 2, "chief": 1}] * 2
    lines = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines()}
    assert lines["test: accuracy"] == ["(+0.0100)", "best"]
    assert (found["main_metric"], found["best"]) == ("accuracy", [RUNS[1]])
    assert lines["training.steps"] == ["100", "200"]
