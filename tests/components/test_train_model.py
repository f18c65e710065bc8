"""Tests the step that trains, with a fake launcher: its outputs, records and metrics."""

import json
import os
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
from kfp import dsl

from flotilla.components import launchers, train_model
from flotilla.components.image import PodDefaults
from flotilla.components.records import run_store
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import Validations
from flotilla.trainer.cluster import fitting
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.cluster import Launcher
from flotilla.trainer.runtime.errors import ConfigError, RunInterruptedError, UserError
from tests.components.called_steps import RUN, artifact_in, refused, text_of

pytestmark = pytest.mark.usefixtures("emitted")

# The image and the secret that the run passes on to its pods.
PODS = ("registry.example/flotilla:2", "our-store")


@pytest.fixture
def outputs(tmp_path):
    viewers = dsl.Artifact(name="mlpipeline_ui_metadata", uri=str(tmp_path / "viewers"))
    return artifact_in(tmp_path, dsl.Model), viewers


@pytest.fixture
def train(root, run, outputs):
    """Return a function that runs the step, with changed values in sections of its settings."""

    def call(**sections):
        tree = json.loads(text_of(run))
        for name, values in sections.items():
            tree[name] = {**tree[name], **values} if name in tree else values
        return train_model.train_model.python_func(
            json.dumps(tree), root, RUN, run.dataset, *PODS, *outputs
        )

    return call


class TestTrainModel:
    @pytest.fixture
    def launched(self, monkeypatch, tmp_path):
        """Return the jobs that were launched, each of which publishes two checkpoints."""
        jobs = []

        def launch(job: Job, defaults: PodDefaults) -> None:
            jobs.append((job, defaults))
            for step in (10, 9):
                folder = tmp_path / f"checkpoint-{step}"
                folder.mkdir()
                (folder / "variables.index").write_text(str(step), encoding="utf-8")
                fields = {"global_step": step, "metrics": {"loss": 1 / step}}
                uri = storage.join(job.checkpoints, f"step-{step:08d}")
                storage.publish(folder, uri, kind="checkpoint", fields=fields)

        monkeypatch.setattr(launchers, "launch", launch)
        return jobs

    def test_it_gives_the_newest_checkpoint(self, launched, root, run, outputs, emitted):
        artifact, viewers = outputs
        uri = train_model.train_model.python_func(
            text_of(run), root, RUN, run.dataset, *PODS, *outputs
        )
        assert uri == storage.join(root, RUN, "checkpoints", "step-00000010")
        logs = storage.join(root, RUN, "checkpoints", "logs")
        metrics = {
            "global_step": 10,
            "handed_on_step": 10,
            "handed_on_as": "the last, because no checkpoint was validated",
            "loss": 0.1,
        }
        assert artifact.metadata == {"uri": uri, "tensorboard": logs, **metrics}
        assert emitted()[-1].metrics == metrics
        assert emitted()[-1].uri == uri
        written = json.loads(Path(viewers.path).read_text(encoding="utf-8"))
        assert written["outputs"][-1] == {"type": "tensorboard", "source": logs}
        ((job, defaults),) = launched
        assert defaults == PodDefaults(image=PODS[0], store_secret=PODS[1])
        workdir = Path(os.environ[run_store.RUN_FOLDER], "cluster")
        assert (job.dataset, job.workdir) == (run.dataset, workdir)
        assert job.config.model == run.config.model

    @pytest.mark.usefixtures("launched")
    def test_a_checkpoint_that_was_damaged_since_is_not_handed_on(self, monkeypatch, train, capsys):
        launch = launchers.launch

        def damaging(job, defaults):
            launch(job, defaults)
            uri = storage.join(job.checkpoints, "step-00000010", "variables.index")
            storage.local_path(uri).write_text("11", encoding="utf-8")

        monkeypatch.setattr(launchers, "launch", damaging)
        code, line = refused(train, capsys=capsys)
        assert code == 1
        assert "step-00000010 is damaged: variables.index has crc32c" in line

    @pytest.fixture
    def validated(self, monkeypatch, launched):
        """Return the jobs that were launched; the earlier checkpoint of each is the better one."""
        launch = launchers.launch

        def measured(job, defaults):
            launch(job, defaults)
            for _, manifest in storage.list_published(job.checkpoints):
                loss = manifest.fields["global_step"] / 10
                Validations(job.checkpoints).add(manifest, {"loss": loss})

        monkeypatch.setattr(launchers, "launch", measured)
        return launched

    @pytest.mark.usefixtures("validated")
    @pytest.mark.parametrize(
        ("hand_on", "step", "why"), [("best", 9, "best by validation loss"), ("last", 10, "")]
    )
    def test_the_best_is_handed_on_or_the_last(self, train, emitted, hand_on, step, why):
        uri = train(training={"hand_on": hand_on})
        assert uri.endswith(f"/step-{step:08d}")
        metrics = emitted()[-1].metrics
        assert (metrics["global_step"], metrics["handed_on_step"]) == (10, step)
        assert why in metrics["handed_on_as"]
        assert metrics["loss"] == 1 / step
        assert (metrics["best_global_step"], metrics["best_validation_loss"]) == (9, 0.9)

    @pytest.mark.parametrize(
        ("sections", "words"),
        [
            (
                {"evaluation": {"slices": ["writer"]}},
                "evaluation.slices: 'writer' is not a feature of the dataset",
            ),
            (
                {"training": {"warm_start": "file:///none/pretrained.keras"}},
                "training.warm_start: nothing exists at file:///none/pretrained.keras",
            ),
        ],
    )
    def test_what_cannot_be_trained_is_refused_before_anything_is_launched(
        self, launched, train, capsys, sections, words
    ):
        code, line = refused(lambda: train(**sections), capsys=capsys)
        assert code == 2
        assert line.startswith(words)
        assert launched == []

    def test_what_does_not_fit_the_dataset_is_refused_before_a_cluster_is_made(
        self, launched, train, run, monkeypatch, capsys
    ):
        def refuse(_config, dataset):
            raise ConfigError(f"task classification: the split 'test' of {dataset} has one class")

        monkeypatch.setattr(fitting, "try_fit", refuse)
        code, line = refused(lambda: train(cluster={"launcher": "tfjob"}), capsys=capsys)
        assert (code, line) == (
            2,
            f"task classification: the split 'test' of {run.dataset} has one class",
        )
        assert launched == []
        # If the chief runs on this machine, it detects the mistake itself.
        train()
        assert len(launched) == 1

    @pytest.mark.parametrize(
        "error",
        [
            UserError("worker-0 ended with exit code 1"),
            RunInterruptedError("interrupted at global step 7"),
        ],
    )
    def test_a_launcher_that_fails_is_one_line(self, monkeypatch, train, capsys, emitted, error):
        monkeypatch.setattr(launchers, "launch", mock.Mock(side_effect=error))
        assert refused(train, capsys=capsys) == (error.exit_code, str(error))
        assert emitted()[-1].status == ("interrupted" if error.exit_code == 130 else "failed")

    def test_a_launcher_that_leaves_nothing_is_one_line(self, monkeypatch, train, capsys):
        monkeypatch.setattr(launchers, "launch", lambda _job, _defaults: None)
        _, line = refused(train, capsys=capsys)
        assert line.startswith("no checkpoint is published below ")

    def test_there_is_a_launcher_for_every_one_that_can_be_named(self):
        assert {"local", "auto", *launchers.ENGINES} == set(get_args(Launcher))
        assert [launchers.engine(name).name for name in launchers.ENGINES] == [*launchers.ENGINES]


class TestProgram:
    @pytest.fixture
    def launched(self, monkeypatch, tmp_path):
        """Return a dict for tests to fill: the checkpoints to publish, from step to model path."""
        made = {}

        def launch(job: Job, _defaults: PodDefaults) -> None:
            for step, model in made.items():
                folder = tmp_path / f"checkpoint-{step}"
                folder.mkdir()
                (folder / "weights").write_text(str(step), encoding="utf-8")
                program = {"checkpoint": "checkpoint", "model": model, "layout": "keras"}
                fields = {"global_step": step, "metrics": {"loss": 0.5}, "program": program}
                uri = storage.join(job.checkpoints, f"step-{step:08d}")
                storage.publish(folder, uri, kind="checkpoint", fields=fields)

        monkeypatch.setattr(launchers, "launch", launch)
        return made

    @pytest.fixture
    def train(self, run, root, outputs):
        def call(**program):
            tree = json.loads(text_of(run))
            tree["model"], tree["program"] = {}, {"command": ["python", "train.py"], **program}
            return train_model.train_model.python_func(
                json.dumps(tree), root, RUN, run.dataset, *PODS, *outputs
            )

        return call

    def test_the_run_ends_with_its_checkpoint(self, launched, train, root, outputs, emitted):
        launched.update({5: "", 9: ""})
        assert not train(), "nothing follows"
        last = emitted()[-1]
        assert last.uri == storage.join(root, RUN, "checkpoints", "step-00000009")
        assert (last.metrics["decision"], last.metrics["global_step"]) == ("trained", 9)
        assert "program.after_training=stop" in last.metrics["reasons"][0]
        assert outputs[0].metadata["uri"] == last.uri

    @pytest.mark.usefixtures("launched")
    def test_a_program_may_end_without_a_checkpoint(self, train, emitted):
        assert not train()
        assert (emitted()[-1].status, emitted()[-1].uri) == ("done", "")

    def test_the_last_checkpoint_with_a_model_is_evaluated(self, launched, train, root):
        launched.update({5: "model", 8: "model", 9: ""})
        uri = train(after_training="evaluate")
        assert uri == storage.join(root, RUN, "checkpoints", "step-00000008")

    def test_without_a_model_it_says_where_one_is_looked_for(self, launched, train, capsys):
        launched[5] = ""
        code, line = refused(lambda: train(after_training="evaluate"), capsys=capsys)
        assert code == 1
        assert "has a model: let the program write a SavedModel or a .keras file to" in line
