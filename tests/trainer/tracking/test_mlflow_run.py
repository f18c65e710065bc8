"""Tests runs in a real MLflow server: created, resumed, failed, nested and registered."""

import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import pytest

from flotilla.trainer import events, storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.events import AttemptBegin, StepEnd, Validation
from flotilla.trainer.tracking import addresses, mlflow_run, promotions, tracker
from flotilla.trainer.tracking.promotions import PromotedModel
from flotilla.trainer.tracking.tracker import LocalRun
from tests.ports import held_port
from tests.trainer.tracking.test_tracker import progress

_READY = re.compile(r"Uvicorn running on (http://127\.0\.0\.1:\d+)")


class MlflowServer:
    """An MLflow server that can be killed and restarted on the same port."""

    def __init__(self, folder, port):
        self.folder, self.url, self._process = folder, "", None
        self._port = str(port)

    def start(self):
        store, files = self.folder / "mlflow.db", self.folder / "artifacts"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", self._port, "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{store}", "--artifacts-destination"]
        quiet = {name: value for name, value in os.environ.items() if name[:7] != "MLFLOW_"}
        quiet["MLFLOW_DISABLE_TELEMETRY"] = "true"
        self._process = subprocess.Popen(
            [*command, str(files)], env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if found := _READY.search(line):
                self.url = found[1]
                break
        else:
            raise RuntimeError("".join(lines))
        # Read the output, because the server would block if the pipe were full.
        self._drain = threading.Thread(target=self._process.stdout.read, daemon=True)
        self._drain.start()

    def kill(self):
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._drain.join()
            self._process.stdout.close()
            self._process = None

    def client(self):
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.url)

    def name_in(self, environment):
        """Set the server's address with a monkeypatch."""
        for name in addresses.VARIABLES:
            environment.delenv(name, raising=False)
        environment.setenv(addresses.URI, self.url)
        # On a busy machine, the server may be slow, but it must not count as unavailable.
        environment.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
        environment.setattr(tracker, "CLOSE_SECONDS", 120.0)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    """Import MLflow without the warnings of its dependencies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow

    return mlflow


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with held_port() as port:
        server = MlflowServer(tmp_path_factory.mktemp("mlflow"), port)
        server.start()
        yield server
        server.kill()


@pytest.fixture
def server(running, monkeypatch):
    running.name_in(monkeypatch)
    monkeypatch.delenv(events.VARIABLE, raising=False)
    return running


def tracked(tmp_path, name, run_id, **training):
    config = parse_config({"name": name, "training": {"steps": 100, **training}})
    return LocalRun(config, run_id, tmp_path / f"{run_id}.jsonl")


def runs_of(server, name):
    client = server.client()
    experiment = client.get_experiment_by_name(name)
    runs = client.search_runs([experiment.experiment_id], order_by=["start_time ASC"])
    return client, [client.get_run(each.info.run_id) for each in runs]


def curve(client, run, name):
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]


def attempt(steps, start=0, loss=0.5):
    yield AttemptBegin(global_step=start, steps=100, resumed=start > 0)
    for step in steps:
        yield replace(progress(step), loss=loss)
        if step % 50 == 0:
            yield Validation(global_step=step, metrics={"loss": loss})


def test_a_run_its_repeated_steps_and_its_resumption_are_one_run_of_mlflow(server, tmp_path):
    first = tracked(tmp_path, "one", "one-1")
    for event in (*attempt([20, 50, 70]), *attempt([60, 70, 90], start=50, loss=0.4)):
        first.hear(event)
    first.end("interrupted", "")
    client, (run,) = runs_of(server, "one")
    assert run.info.status == "KILLED"
    assert curve(client, run, "loss") == [(20, 0.5), (50, 0.5), (70, 0.5), (90, 0.4)]
    again = tracked(tmp_path, "one", "one-1", batch_size=32)
    for event in attempt([80, 100], start=50, loss=0.3):
        again.hear(event)
    again.end("blessed", "")
    client, (run,) = runs_of(server, "one")
    assert run.info.status == "FINISHED"
    assert [step for step, _ in curve(client, run, "loss")] == [20, 50, 70, 90, 100]
    assert curve(client, run, "validation_loss") == [(50, 0.5), (100, 0.3)]
    assert run.data.params["training.batch_size"] == "64"
    assert run.data.tags["flotilla.resumed_with.training.batch_size"] == "32"
    assert run.data.tags["flotilla.verdict"] == "blessed"
    assert run.info.run_name == "one-1"


def test_a_second_run_a_refused_one_and_a_failed_one(server, tmp_path):
    for number, (status, message) in enumerate(
        [("blessed", ""), ("refused", "accuracy 0.1"), ("failed", "train_model: no disk")]
    ):
        run = tracked(tmp_path, "several", f"several-{number}")
        metrics = {"accuracy": 0.1 * number, "labels": ["a"]}
        end = {"status": "done", "uri": "s3://e", "output": "evaluation"}
        run.hear(StepEnd(step="evaluate_model", metrics=metrics, **end))
        run.end(status, message)
    _, found = runs_of(server, "several")
    assert [each.info.status for each in found] == ["FINISHED", "FINISHED", "FAILED"]
    verdicts = [each.data.tags["flotilla.verdict"] for each in found]
    assert verdicts == ["blessed", "refused", "failed"]
    assert [each.data.metrics["test_accuracy"] for each in found] == [0, 0.1, 0.2]
    assert found[1].data.tags["flotilla.message"] == "accuracy 0.1"
    assert found[2].data.tags["flotilla.evaluate_model.uri"] == "s3://e"


def test_a_given_run_is_taken_and_a_second_run_is_below_it(server, tmp_path, monkeypatch):
    client = server.client()
    experiment = client.create_experiment("given")
    given = client.create_run(experiment, run_name="of a notebook").info.run_id
    monkeypatch.setenv(addresses.RUN, given)
    for number in (1, 2):
        run = tracked(tmp_path, "ignored", f"given-{number}")
        run.hear(progress(20))
        run.end("blessed", "")
    _, (first, second) = runs_of(server, "given")
    assert (first.info.run_id, first.data.tags["flotilla.run_id"]) == (given, "given-1")
    assert second.data.tags["mlflow.parentRunId"] == given
    assert client.get_experiment_by_name("ignored") is None


def promoted(folder, version, **changes):
    uri = folder if isinstance(folder, str) else storage.uri_of(folder)
    values = {"name": "kept", "run_id": "kept-1", "is_champion": True}
    properties = {"test_accuracy": 0.97, "dataset": "s3://d"}
    return PromotedModel(
        uri=uri, version=version, **{**values, "properties": properties, **changes}
    )


def test_a_promoted_model_is_registered_once_with_its_run_its_files_and_an_alias(server, tmp_path):
    run = tracked(tmp_path, "kept", "kept-1")
    run.hear(progress(20))
    run.end("blessed", "")
    (tmp_path / "000001" / "serving").mkdir(parents=True)
    (tmp_path / "000001" / "serving" / "saved_model.pb").write_bytes(b"model")
    model = promoted(tmp_path / "000001", 1)
    assert [promotions.register_in_mlflow(model) for _ in range(2)] == ["1", "1"]
    client, (found,) = runs_of(server, "kept")
    (version,) = client.search_model_versions("name = 'kept'")
    assert version.run_id == found.info.run_id
    assert version.tags["flotilla.test_accuracy"] == "0.97"
    assert client.get_model_version_by_alias("kept", "champion").version == "1"
    artifact = client.download_artifacts(found.info.run_id, "models/1", str(tmp_path))
    with open(f"{artifact}/serving/saved_model.pb", "rb") as file:
        assert file.read() == b"model"
    # A model in a bucket is not copied, and an old promotion does not move the alias.
    bucket = "s3://models/registry/kept/000002?endpoint=http://s3:9000"
    later = promoted(bucket, 2, is_champion=False)
    assert promotions.register_in_mlflow(later) == "2"
    assert client.get_model_version("kept", "2").source == "s3://models/registry/kept/000002"
    assert client.get_model_version_by_alias("kept", "champion").version == "1"
    # Version 3 was created and deleted, so that version 4 has Flotilla's number.
    newest = promoted(f"{bucket}4", 4, is_champion=True)
    assert not promotions.is_champion_known("kept", newest.uri)
    assert promotions.register_in_mlflow(newest) == "4"
    assert promotions.is_champion_known("kept", newest.uri)
    numbers = {each.version for each in client.search_model_versions("name = 'kept'")}
    assert numbers == {"1", "2", "4"}
    assert not promotions.is_champion_known("nobody", newest.uri)


def test_the_trials_of_a_sweep_are_below_one_run(server, tmp_path):
    config = parse_config({"name": "swept"})
    for folder in ("sweep", "t1", "t2"):
        (tmp_path / folder).mkdir()
    sweep = LocalRun(config, "sweep-1", tmp_path / "sweep" / "events.jsonl")
    trials = [
        LocalRun(config, name, tmp_path / name / "events.jsonl", parent="sweep-1")
        for name in ("t1", "t2")
    ]
    for trial in trials:
        trial.hear(progress(20))
    for trial in trials:
        trial.end("done", "")
    sweep.tag(best_trial=2)
    sweep.end("blessed", "")
    _, found = runs_of(server, "swept")
    by_name = {each.info.run_name: each for each in found}
    assert set(by_name) == {"sweep-1", "t1", "t2"}
    parent = by_name["sweep-1"]
    assert (parent.info.status, parent.data.tags["flotilla.best_trial"]) == ("FINISHED", "2")
    for name in ("t1", "t2"):
        assert by_name[name].data.tags["mlflow.parentRunId"] == parent.info.run_id


def test_the_server_is_seen_before_a_run(server):
    assert mlflow_run.health() == f"MLflow responds at {server.url}"


def test_a_server_that_is_away_is_one_warning_and_the_promotion_holds(monkeypatch, caplog):
    for name in addresses.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(addresses.URI, "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    promotions.announce(promoted("s3://models/1", 1), "http://127.0.0.1:1")
    lines = [each.getMessage() for each in caplog.records if each.name == promotions.log.name]
    assert [line.partition(" that version")[0] for line in lines] == [
        "cannot tell MLflow", "cannot tell the model registry",
    ]  # fmt: skip
    assert all("; the promotion is valid, and the next run" in line for line in lines)
