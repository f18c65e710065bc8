"""What a step does around its stage: URIs in, a URI out, artifacts filled, one line of an error."""

import json
from pathlib import Path

import pytest
from kfp import dsl

from components import launching, steps
from tests.trainer.page import Page
from tests.trainer.small_run import GLOBAL_STEP, TEST_EXAMPLES, small_run
from trainer import events, storage
from trainer.config import Config, DataConfig
from trainer.errors import RunInterruptedError, UserError
from trainer.launcher import Job
from trainer.parameters import run_parameters, to_parameters

RUN = "digits-1"


@pytest.fixture(autouse=True)
def happened(tmp_path, monkeypatch):
    """Be the process of a step, and return what was written to the events."""
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))
    monkeypatch.setenv(steps.RUN_FOLDER, str(tmp_path / "folder"))
    (tmp_path / "folder").mkdir()
    return lambda: list(events.read(path))


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run"))


def text_of(run, **gate):
    tree = {**run.config.model_dump(mode="json"), "gate": {"min": gate, "max": {}}}
    return json.dumps(tree)


def refused(step, *given, capsys):
    """Call a step that has to end with one line; return its exit code and the line."""
    with pytest.raises(SystemExit) as ended:
        step(*given)
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return ended.value.code, err.removeprefix(f"flotilla: {step.__name__}: ").strip()


class TestResolveConfig:
    @pytest.fixture
    def values(self):
        given = {parameter.name: parameter.default for parameter in run_parameters()}
        return {**given, "storage_root": "file:///r", "kfp_run_id": "123"}

    def test_it_passes_on_what_the_others_need(self, values):
        resolved = steps.resolve_config({**values, "steps": steps, "data_seed": 5})
        config = Config.model_validate_json(resolved.config)
        assert config.data == DataConfig(seed=5)
        assert config.model_copy(update={"storage": Config().storage, "data": DataConfig()}) == (
            Config()
        )
        assert DataConfig.model_validate_json(resolved.data) == config.data
        assert (resolved.root, resolved.run_id) == ("file:///r", "123")

    def test_what_another_section_says_does_not_change_the_data(self, values):
        first = steps.resolve_config(values)
        second = steps.resolve_config({**values, "training_steps": 7, "kfp_run_id": "124"})
        assert first.data == second.data
        assert first.config != second.config

    def test_the_command_line_names_the_run(self, values, monkeypatch):
        monkeypatch.setenv(steps.RUN_ID, RUN)
        assert steps.resolve_config(values).run_id == RUN

    def test_without_a_root_nothing_can_be_published(self, values, capsys):
        code, line = refused(steps.resolve_config, {**values, "storage_root": ""}, capsys=capsys)
        assert code == 1
        assert line.startswith("storage.root is empty: set it to the URI")

    def test_a_wrong_value_is_the_users(self, values, capsys, happened):
        wrong = {**values, "training_steps": 0}
        code, line = refused(steps.resolve_config, wrong, capsys=capsys)
        assert code == 2
        assert line.startswith("training.steps: 0 is not allowed")
        assert happened()[-1]["exit_code"] == 2

    def test_what_is_no_json_is_the_users(self, values, capsys):
        wrong = {**values, "model_args": "{hidden"}
        code, line = refused(steps.resolve_config, wrong, capsys=capsys)
        assert code == 2
        assert "model.args" in line

    def test_it_takes_what_a_configuration_gives(self, values):
        config = Config()
        resolved = steps.resolve_config(
            {**values, **to_parameters(config), "storage_root": "gs://b"}
        )
        assert Config.model_validate_json(resolved.config).training == config.training


class TestTrainModel:
    """With a launcher of its own: what a step makes of what a launcher leaves."""

    @pytest.fixture
    def launched(self, monkeypatch, tmp_path):
        """Return the jobs that were launched; each publishes two checkpoints."""
        jobs = []

        def launch(job: Job) -> None:
            jobs.append(job)
            for step in (10, 9):
                folder = tmp_path / f"checkpoint-{step}"
                folder.mkdir()
                (folder / "variables.index").write_text(str(step), encoding="utf-8")
                fields = {"global_step": step, "metrics": {"loss": 1 / step}}
                uri = storage.join(job.checkpoints, f"step-{step:08d}")
                storage.publish(folder, uri, kind="checkpoint", fields=fields)

        monkeypatch.setitem(launching.LAUNCHERS, "local", launch)
        return jobs

    def test_it_gives_the_newest_checkpoint(self, launched, root, run, happened, tmp_path):
        artifact = dsl.Model()
        uri = steps.train_model(text_of(run), root, RUN, run.dataset, artifact)
        assert uri == storage.join(root, RUN, "checkpoints", "step-00000010")
        assert artifact.metadata == {"uri": uri, "global_step": 10, "loss": 0.1}
        assert happened()[-1]["figures"] == {"global_step": 10, "loss": 0.1}
        assert happened()[-1]["uri"] == uri
        (job,) = launched
        assert (job.dataset, job.workdir) == (run.dataset, tmp_path / "folder" / "cluster")
        assert job.config.model == run.config.model

    def test_a_launcher_that_fails_is_told(self, monkeypatch, root, run, capsys):
        def fail(_job):
            raise UserError("worker-0 ended with exit code 1")

        monkeypatch.setitem(launching.LAUNCHERS, "local", fail)
        given = (text_of(run), root, RUN, run.dataset, dsl.Model())
        assert refused(steps.train_model, *given, capsys=capsys) == (
            1,
            "worker-0 ended with exit code 1",
        )

    def test_an_interrupted_launcher_is_told(self, monkeypatch, root, run, capsys, happened):
        def end(_job):
            raise RunInterruptedError("interrupted at global step 7")

        monkeypatch.setitem(launching.LAUNCHERS, "local", end)
        given = (text_of(run), root, RUN, run.dataset, dsl.Model())
        assert refused(steps.train_model, *given, capsys=capsys)[0] == 130
        assert happened()[-1]["status"] == "interrupted"

    def test_a_launcher_that_leaves_nothing_is_told(self, monkeypatch, root, run, capsys):
        monkeypatch.setitem(launching.LAUNCHERS, "local", lambda _job: None)
        given = (text_of(run), root, RUN, run.dataset, dsl.Model())
        _, line = refused(steps.train_model, *given, capsys=capsys)
        assert line.startswith("no checkpoint is published below ")

    def test_there_is_a_launcher_for_every_one_that_can_be_named(self):
        assert "local" in launching.LAUNCHERS


class TestJudging:
    """Evaluation, gate, export and report of a small model, one after another."""

    def evaluated(self, run, root):
        metrics, confusion = dsl.Metrics(), dsl.ClassificationMetrics()
        uri = steps.evaluate_model(
            text_of(run), root, RUN, run.dataset, run.checkpoint, metrics, confusion
        )
        return uri, metrics, confusion

    def gated(self, run, root, folder, accuracy):
        evaluation, *_ = self.evaluated(run, root)
        path = folder / "decision.txt"
        config = text_of(run, accuracy=accuracy)
        word = steps.check_gate(config, root, RUN, evaluation, str(path))
        return word, path.read_text(encoding="utf-8")

    def test_an_evaluation_fills_what_the_ui_shows(self, run, root, happened):
        uri, metrics, confusion = self.evaluated(run, root)
        assert uri.startswith(storage.join(root, RUN, "evaluation", f"step-{GLOBAL_STEP:08d}-"))
        written = json.loads(storage.read_file(uri, "metrics.json"))
        assert {**written["metrics"], "uri": uri} == metrics.metadata
        assert happened()[-1]["figures"] == written["metrics"]
        matrix = confusion.metadata["confusionMatrix"]
        names = [each["displayName"] for each in matrix["annotationSpecs"]]
        assert names == [str(digit) for digit in range(10)]
        assert sum(sum(row["row"]) for row in matrix["rows"]) == TEST_EXAMPLES

    def test_a_second_evaluation_is_the_first(self, run, root):
        assert self.evaluated(run, root)[0] == self.evaluated(run, root)[0]

    def test_a_checkpoint_that_is_not_there(self, run, root, capsys):
        artifacts = (dsl.Metrics(), dsl.ClassificationMetrics())
        given = (text_of(run), root, RUN, run.dataset, f"{run.checkpoint}9", *artifacts)
        code, line = refused(steps.evaluate_model, *given, capsys=capsys)
        assert code == 1
        assert f"{run.checkpoint}9 is not published" in line

    def test_a_blessing(self, run, root, tmp_path, happened):
        word, uri = self.gated(run, root, tmp_path, 0.1)
        assert word == "blessed"
        assert json.loads(storage.read_file(uri, "decision.json"))["decision"] == "blessed"
        end = happened()[-1]
        assert (end["uri"], end["figures"]["decision"]) == (uri, "blessed")

    def test_a_refusal_gives_its_reasons(self, run, root, tmp_path, happened):
        word, uri = self.gated(run, root, tmp_path, 1.0)
        assert word == "refused"
        written = json.loads(storage.read_file(uri, "decision.json"))
        assert written["reasons"] == happened()[-1]["figures"]["reasons"]
        assert written["reasons"][0].endswith("is below gate.min 1.0")

    def test_under_another_policy_the_same_run_is_judged_anew(self, run, root, tmp_path):
        refusal = self.gated(run, root, tmp_path, 1.0)
        blessing = self.gated(run, root, tmp_path, 0.1)
        assert [refusal[0], blessing[0]] == ["refused", "blessed"]
        assert self.gated(run, root, tmp_path, 1.0) == refusal

    def test_a_blessed_model_is_exported(self, run, root, tmp_path, happened):
        _, decision = self.gated(run, root, tmp_path, 0.1)
        artifact = dsl.Model()
        config = text_of(run, accuracy=0.1)
        given = (config, root, RUN, run.dataset, run.checkpoint, decision, artifact)
        uri = steps.export_model(*given)
        assert uri.startswith(storage.join(root, RUN, "model", f"step-{GLOBAL_STEP:08d}-"))
        storage.verify(uri)
        differences = happened()[-1]["figures"]
        assert set(differences) == {"saved_model", "keras"}
        assert artifact.metadata == {"uri": uri, **differences}

    def test_other_forms_are_published_beside_the_first(self, run, root, tmp_path):
        _, decision = self.gated(run, root, tmp_path, 0.1)
        found = []
        for formats in (["keras"], ["saved_model"], ["keras"]):
            tree = {**json.loads(text_of(run)), "export": {"formats": formats}}
            given = (json.dumps(tree), root, RUN, run.dataset, run.checkpoint, decision)
            found.append(steps.export_model(*given, dsl.Model()))
        assert found[0] == found[2] != found[1]
        assert storage.read_manifest(found[1]).fields["formats"] == ["saved_model"]

    def test_a_checkpoint_that_was_made_again_is_judged_anew(self, root, tmp_path):
        run = small_run(tmp_path / "run")
        first, *_ = self.evaluated(run, root)
        storage.fetch(run.checkpoint, tmp_path / "again")
        fields = storage.read_manifest(run.checkpoint).fields
        storage.delete(run.checkpoint)
        storage.publish(tmp_path / "again", run.checkpoint, kind="checkpoint", fields=fields)
        second, *_ = self.evaluated(run, root)
        assert first != second
        assert len(storage.published(storage.join(root, RUN, "evaluation"))) == 2

    def test_a_refused_model_is_not_exported(self, run, root, tmp_path, capsys):
        _, decision = self.gated(run, root, tmp_path, 1.0)
        given = (text_of(run), root, RUN, run.dataset, run.checkpoint, decision, dsl.Model())
        code, line = refused(steps.export_model, *given, capsys=capsys)
        assert code == 1
        assert line.startswith("nothing is exported: the gate refused the model")
        assert not storage.published(storage.join(root, RUN, "model"))


class TestFinish:
    @pytest.fixture
    def artifact(self, tmp_path):
        return dsl.HTML(uri=str(tmp_path / "report"))

    def test_the_report_stands_with_the_run_in_the_ui_and_on_this_machine(
        self, root, artifact, tmp_path, happened
    ):
        steps.finish("SUCCEEDED", root, RUN, artifact)
        uri = storage.join(root, RUN, "report.html")
        assert happened()[-1]["uri"] == uri
        page = storage.read_bytes(uri)
        assert page == Path(artifact.path).read_bytes()
        assert page == (tmp_path / "folder" / "report.html").read_bytes()
        assert Page(page.decode()).words[1] == "done"

    def test_a_failure_before_there_is_a_root_is_not_hidden(self, artifact, happened):
        steps.finish("FAILED", "", RUN, artifact)
        assert happened()[-1]["status"] == "done"
        assert Page(Path(artifact.path).read_text(encoding="utf-8")).words[1] == "failed"

    def test_a_root_that_cannot_be_written_is_told_in_one_line(self, artifact, tmp_path, capsys):
        (tmp_path / "root").write_text("", encoding="utf-8")
        given = ("FAILED", storage.uri_of(tmp_path / "root"), RUN, artifact)
        code, line = refused(steps.finish, *given, capsys=capsys)
        assert code == 1
        assert line.startswith("cannot write ")
        # There is a report all the same.
        assert Page((tmp_path / "folder" / "report.html").read_text(encoding="utf-8")).words
