"""Real runs of digits in MLflow's own server: shown by it, and not lost with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.runs import local
from tests.trainer.tracking.mlflow_server import MlflowServer
from trainer import events
from trainer.events import Progress

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

CONFIG = Path(__file__).parents[3] / "configs" / "digits.yaml"
STEPS = 200
FEW = [
    f"training.steps={STEPS}",
    "training.checkpoint_every=100",
    "training.validate_every=100",
    "gate.min.accuracy=0.5",
]


@pytest.fixture
def server(tmp_path, monkeypatch, port):
    made = MlflowServer(tmp_path / "mlflow server", port)
    made.folder.mkdir()
    made.start()
    made.name_in(monkeypatch)
    monkeypatch.delenv(events.VARIABLE, raising=False)
    yield made
    made.kill()


def found(server):
    client = server.client()
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, client.get_run(run.info.run_id)


def steps_of(client, run, name):
    return [each.step for each in client.get_metric_history(run.info.run_id, name)]


@pytest.mark.slow
def test_a_real_run_has_its_parameters_curves_metrics_and_model_in_mlflow(server, tmp_path):
    result = local.run(CONFIG, settings=FEW, workdir=tmp_path / "runs")
    assert result.status == "blessed", result.message
    client, run = found(server)
    assert (run.info.status, run.info.run_name) == ("FINISHED", result.run_id)
    assert run.data.params["training.steps"] == str(STEPS)
    curve = steps_of(client, run, "loss")
    assert curve == sorted(set(curve))
    assert curve[-1] == STEPS
    assert steps_of(client, run, "validation_accuracy") == [100, 200]
    assert run.data.metrics["test_accuracy"] == pytest.approx(result.metrics["accuracy"])
    assert run.data.tags["flotilla.verdict"] == "blessed"
    for step in result.steps:
        assert run.data.tags.get(f"flotilla.{step.step}.uri", "") == step.uri
    version = client.get_model_version_by_alias("digits", "champion")
    assert (version.version, version.run_id) == ("1", run.info.run_id)
    listed = [each.path for each in client.list_artifacts(run.info.run_id, "models/1")]
    assert "models/1/MANIFEST.json" in listed


@pytest.mark.long
def test_a_server_that_is_killed_in_mid_run_costs_no_run_and_learns_of_it_later(server, tmp_path):
    killed = []

    def kill(event):
        if isinstance(event, Progress) and not killed:
            killed.append(event)
            server.kill()

    workdir = tmp_path / "runs"
    result = local.train(CONFIG, settings=FEW, workdir=workdir, on_event=kill)
    assert (result.status, result.exit_code, result.global_step) == ("done", 0, STEPS)
    assert killed
    server.start()
    resumed = local.train(workdir=workdir, resume=result.run_id)
    assert resumed.status == "done"
    client, run = found(server)
    curve = steps_of(client, run, "loss")
    assert curve == sorted(set(curve))
    assert curve[-1] == STEPS
    assert run.info.status == "FINISHED"
