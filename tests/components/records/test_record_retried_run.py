"""A run that is retried in the KFP UI after its end: its exit step does not run again."""

from types import SimpleNamespace

import pytest
from kfp import dsl

from components import check_gate, evaluate_model, export_model, finish, register_model
from components.records import run_store
from components.records.record import recorded
from tests.components.called_steps import RUN, artifact_in, ended, text_of
from tests.trainer.page import Page
from trainer import events, storage
from trainer.errors import UserError
from trainer.evaluation import evaluate

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
NO_SPACE = "no space is left on the node"


class Run:
    """A run of which every step is a pod: its end as failed, and its retry."""

    def __init__(self, trained, root, folder):
        self.trained, self.root, self._folder = trained, root, folder

    def given(self, accuracy=0.1):
        return text_of(self.trained, accuracy=accuracy), self.root, RUN

    def output(self, kind=dsl.Model):
        return artifact_in(self._folder, kind)

    def evaluated(self):
        kinds = (dsl.Metrics, dsl.ClassificationMetrics, dsl.ClassificationMetrics)
        displayed = [self.output(kind) for kind in kinds]
        inputs = (self.trained.dataset, self.trained.checkpoint)
        return evaluate_model.evaluate_model.python_func(*self.given(), *inputs, *displayed)

    def judged(self, accuracy):
        """Return the word and the URI of the decision."""
        path = self._folder / "decision"
        given = (*self.given(accuracy), self.evaluated(), str(path))
        word = check_gate.check_gate.python_func(*given, self.output())
        return word, path.read_text(encoding="utf-8")

    def finished(self):
        """Run the exit step, as KFP does once: after the first failure."""
        artifacts = [
            SimpleNamespace(uri=storage.uri_of(self._folder / name), path=str(self._folder / name))
            for name in ("report", "summary")
        ]
        finish.finish.python_func(ended("FAILED"), self.root, "local", "{}", RUN, *artifacts)

    def page(self):
        published = storage.read_bytes(storage.join(self.root, RUN, "report.html"))
        # The one that the UI shows.
        assert (self._folder / "report").read_bytes() == published
        page = Page(published.decode())
        assert f"{RUN}: {page.words[1]}" in (self._folder / "summary").read_text(encoding="utf-8")
        return page


@pytest.fixture
def failed(run, root, tmp_path, monkeypatch):
    """Return a run that has failed while it evaluated, and whose report says so."""
    for name in (run_store.RUN_ID, run_store.RUN_FOLDER, events.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    made = Run(run, root, tmp_path)

    def fail(*_):
        raise UserError(NO_SPACE)

    with monkeypatch.context() as broken:
        broken.setattr(evaluate, "evaluate", fail)
        with pytest.raises(SystemExit):
            made.evaluated()
    made.finished()
    page = made.page()
    assert page.words[1] == "failed"
    assert f"evaluate_model: {NO_SPACE}" in page.text
    return made


@pytest.mark.slow
def test_a_run_that_is_promoted_then_has_a_report_that_says_so(failed):
    word, decision = failed.judged(0.1)
    assert word == "blessed"
    # It goes on.
    assert failed.page().words[1] == "running"
    inputs = (failed.trained.dataset, failed.trained.checkpoint, decision)
    model = export_model.export_model.python_func(*failed.given(), *inputs, failed.output())
    given = (*failed.given(), model, "our/image:2")
    assert register_model.register_model.python_func(*given, failed.output()) == "promoted"
    page = failed.page()
    assert page.words[1] == "blessed"
    assert NO_SPACE not in page.text
    assert "in 1 earlier try" in page.text


def test_both_tries_are_on_the_time_line(failed):
    failed.judged(0.1)
    page = failed.page()
    line = page.words[page.words.index("Time line") :]
    assert line[: line.index("check_gate")].count("evaluate_model") == 2
    # The first bar alone.
    assert page.attributes.count(("class", "bad")) == 1


def test_a_refusal_is_an_end(failed):
    assert failed.judged(1.0)[0] == "refused"
    assert failed.page().words[1] == "refused"


def test_while_a_step_works_the_report_says_failed_no_more(failed):
    with recorded("evaluate_model", run_store.run_at(failed.root, RUN)):
        page = failed.page()
        assert page.words[1] == "running"
        assert NO_SPACE not in page.text


def test_another_failure_replaces_the_first(failed):
    with pytest.raises(SystemExit), recorded("evaluate_model", run_store.run_at(failed.root, RUN)):
        raise UserError("no memory")
    page = failed.page()
    assert page.words[1] == "failed"
    assert "evaluate_model: no memory" in page.text
    assert NO_SPACE not in page.text


def test_a_report_that_cannot_be_written_does_not_fail_the_step(failed, capsys):
    page = storage.local_path(storage.join(failed.root, RUN, "report.html"))
    page.unlink()
    page.mkdir()
    assert failed.judged(1.0)[0] == "refused"
    assert "flotilla: the report could not be published: cannot write " in capsys.readouterr().err


def test_in_a_run_that_goes_on_no_step_writes_a_report(failed):
    other = f"{RUN}-2"
    with recorded("evaluate_model", run_store.run_at(failed.root, other)):
        pass
    assert storage.names(storage.join(failed.root, other)) == ["steps"]
