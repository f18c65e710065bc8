"""What a step does around its stage: URIs in, a URI out, artifacts filled, one line of an error."""

import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from kfp import dsl

from components import steps, ui
from tests.components.called_steps import RUN, ended, refused, text_of
from tests.trainer.page import Page
from tests.trainer.small_run import GLOBAL_STEP, TEST_EXAMPLES, small_run
from trainer import events, storage

pytestmark = pytest.mark.usefixtures("happened")


@contextmanager
def no_larger_files_than(size):
    """Let no file grow beyond `size` bytes, as on a disk that is full; events go nowhere."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.dict(os.environ, {events.VARIABLE: os.devnull}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestJudging:
    """Evaluation, gate, export and report of a small model, one after another."""

    def evaluated(self, run, root):
        metrics, confusion = dsl.Metrics(), dsl.ClassificationMetrics()
        roc = dsl.ClassificationMetrics()
        uri = steps.evaluate_model(
            text_of(run), root, RUN, run.dataset, run.checkpoint, metrics, confusion, roc
        )
        return uri, metrics, confusion, roc

    def gated(self, run, root, folder, accuracy):
        evaluation, *_ = self.evaluated(run, root)
        path = folder / "decision.txt"
        config = text_of(run, accuracy=accuracy)
        word = steps.check_gate(config, root, RUN, evaluation, str(path))
        return word, path.read_text(encoding="utf-8")

    def test_an_evaluation_fills_what_the_ui_shows(self, run, root, happened):
        uri, metrics, confusion, roc = self.evaluated(run, root)
        assert uri.startswith(storage.join(root, RUN, "evaluation", f"step-{GLOBAL_STEP:08d}-"))
        written = json.loads(storage.read_file(uri, "metrics.json"))
        assert {**written["metrics"], "uri": uri} == metrics.metadata
        assert happened()[-1]["figures"] == written["metrics"]
        assert happened()[0]["inputs"] == {"dataset": run.dataset}
        matrix = confusion.metadata["confusionMatrix"]
        names = [each["displayName"] for each in matrix["annotationSpecs"]]
        assert names == [str(digit) for digit in range(10)]
        assert sum(sum(row["row"]) for row in matrix["rows"]) == TEST_EXAMPLES
        points = roc.metadata["confidenceMetrics"]
        assert [
            [each[key] for key in ("falsePositiveRate", "recall", "confidenceThreshold")]
            for each in points
        ] == written["roc"]
        assert (points[0]["recall"], points[-1]["recall"]) == (0, 1)

    def test_a_matrix_that_is_too_large_for_the_ui_is_left_out(self, run, root, monkeypatch):
        monkeypatch.setattr(ui, "MOST_CLASSES", 9)
        uri, metrics, confusion, _ = self.evaluated(run, root)
        assert confusion.metadata == {"left_out": "10 classes are more than 9"}
        assert metrics.metadata["uri"] == uri
        assert len(json.loads(storage.read_file(uri, "metrics.json"))["confusion_matrix"]) == 10

    @pytest.mark.parametrize("size", [0, 6000])
    def test_a_disk_that_is_full_for_an_evaluation_is_one_line(self, run, root, capsys, size):
        given = (text_of(run), root, "full", run.dataset, run.checkpoint)
        with no_larger_files_than(size):
            code, line = refused(
                steps.evaluate_model, *given, dsl.Metrics(), dsl.ClassificationMetrics(),
                dsl.ClassificationMetrics(), capsys=capsys,
            )  # fmt: skip
        assert (code, "File too large" in line) == (1, True)
        assert not storage.children(storage.join(root, "full"))

    @pytest.mark.parametrize("size", [0, 3000, 30_000])
    def test_a_disk_that_is_full_for_an_export_is_one_line(self, run, root, tmp_path, capsys, size):
        _, decision = self.gated(run, root, tmp_path, accuracy=0.1)
        given = (text_of(run, accuracy=0.1), root, "full", run.dataset, run.checkpoint)
        with no_larger_files_than(size):
            code, line = refused(steps.export_model, *given, decision, dsl.Model(), capsys=capsys)
        assert (code, "File too large" in line) == (1, True)
        assert not storage.children(storage.join(root, "full"))

    def test_a_second_evaluation_is_the_first(self, run, root):
        assert self.evaluated(run, root)[0] == self.evaluated(run, root)[0]

    def test_a_checkpoint_that_is_not_there(self, run, root, capsys):
        artifacts = (dsl.Metrics(), dsl.ClassificationMetrics(), dsl.ClassificationMetrics())
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
        begins = [each for each in happened() if each["event"] == "step_begin"]
        assert begins[-1]["inputs"] == {"dataset": run.dataset}
        differences = happened()[-1]["figures"]
        assert set(differences) == {"saved_model", "keras"}
        assert artifact.metadata == {"uri": uri, **differences}

    def test_other_forms_are_published_beside_the_first(self, run, root, tmp_path):
        _, decision = self.gated(run, root, tmp_path, 0.1)
        found = []
        for formats in (["saved_model"], ["saved_model", "keras"], ["saved_model"]):
            tree = {**json.loads(text_of(run)), "export": {"formats": formats}}
            given = (json.dumps(tree), root, RUN, run.dataset, run.checkpoint, decision)
            found.append(steps.export_model(*given, dsl.Model()))
        assert found[0] == found[2] != found[1]
        assert storage.read_manifest(found[1]).fields["formats"] == ["saved_model", "keras"]

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

    @pytest.fixture
    def glance(self, tmp_path):
        return dsl.Markdown(uri=str(tmp_path / "summary"))

    def test_the_report_stands_with_the_run_in_the_ui_and_on_this_machine(
        self, root, artifact, glance, tmp_path, happened
    ):
        steps.finish(ended("SUCCEEDED"), root, "local", "{}", RUN, artifact, glance)
        uri = storage.join(root, RUN, "report.html")
        assert happened()[-1]["uri"] == uri
        page = storage.read_bytes(uri)
        assert page == Path(artifact.path).read_bytes()
        assert page == (tmp_path / "folder" / "report.html").read_bytes()
        assert Page(page.decode()).words[1] == "done"
        summary = Path(glance.path).read_text(encoding="utf-8")
        assert summary.startswith(f"# {RUN}: done\n")
        assert f"The whole report: `{uri}`" in summary

    def test_a_failure_before_there_is_a_root_is_not_hidden(self, artifact, glance, happened):
        steps.finish(ended("FAILED"), "", "local", "{}", RUN, artifact, glance)
        assert happened()[-1]["status"] == "done"
        assert Page(Path(artifact.path).read_text(encoding="utf-8")).words[1] == "failed"

    def test_a_root_that_cannot_be_written_is_told_in_one_line(
        self, artifact, glance, tmp_path, capsys
    ):
        (tmp_path / "root").write_text("", encoding="utf-8")
        root = storage.uri_of(tmp_path / "root")
        given = (ended("FAILED"), root, "local", "{}", RUN, artifact, glance)
        code, line = refused(steps.finish, *given, capsys=capsys)
        assert code == 1
        assert line.startswith("cannot write ")
        # There is a report all the same.
        assert Page((tmp_path / "folder" / "report.html").read_text(encoding="utf-8")).words
