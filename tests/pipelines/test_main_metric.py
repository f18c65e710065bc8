"""Tests that a run's main metric has the same name and value wherever it is shown.

The models of these runs also have an accuracy, which could be shown by mistake.
"""

import json
from types import SimpleNamespace

import pytest

from flotilla.components import descriptor
from flotilla.pipelines.cli import app, display, live
from flotilla.pipelines.cli.run import make_answer
from flotilla.pipelines.runs.outcome import judge_outcome
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import select_checkpoint
from flotilla.trainer.config.main_metric import main_first
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import Validation, read
from flotilla.trainer.events.progress import LogLines
from flotilla.trainer.events.run_state import reduce_events
from flotilla.trainer.promotion import registry
from flotilla.trainer.report import views
from flotilla.trainer.report.wording import spell_metric
from flotilla.trainer.tracking.tracker import Reader
from tests.pipelines.conftest import publish_model
from tests.pipelines.step_events import done, write

RUN, OTHER = "churn-20260101-000000-aaaa", "churn-20260102-000000-bbbb"
NAMES = {"auc": "higher", "log_loss": "lower"}
# Each run's value on the test split, and its two checkpoints' values on the validation split.
VALUES = {"higher": {RUN: 0.75, OTHER: 0.5}, "lower": {RUN: 0.5, OTHER: 0.75}}
STEPS = {"higher": {10: 0.75, 20: 0.5}, "lower": {10: 0.5, 20: 0.75}}


def measured(name, value, accuracy=0.9):
    return main_first({"loss": 0.25, "accuracy": accuracy, name: value}, name)


def publish_run(folder, name, better, value):
    """Write the records of a trained and evaluated run; its second checkpoint is worse."""
    directions = {"loss": "lower", "accuracy": "higher", name: better}
    said = {"main_metric": name, "directions": directions}
    source, metrics = folder / "made", measured(name, value)
    source.mkdir(parents=True)
    (folder / "config.json").write_text(Config().model_dump_json())
    evaluation = {**said, "task": "any", "examples": 9, "metrics": metrics, "slices": {}}
    (source / "metrics.json").write_text(json.dumps(evaluation))
    uri = storage.uri_of(folder / "evaluation" / "step-1")
    storage.publish(source, uri, kind="evaluation")
    by = {"main_metric": name, "better": better}
    trained = done("train_model", metrics={"global_step": 20}, **by)
    evaluated = done("evaluate_model", uri=uri, output="evaluation", metrics=metrics, **by)
    write(folder, [*trained, *evaluated])
    for step, each in STEPS[better].items():
        row = {f"validation_{key}": n for key, n in measured(name, each, accuracy=step).items()}
        uri = storage.uri_of(folder / "checkpoints" / f"step-{step:08d}")
        fields = {"global_step": step, "metrics": row, **said}
        storage.publish(source, uri, kind="checkpoint", fields=fields)
    return evaluation


@pytest.fixture(params=NAMES)
def made(request, tmp_path, capsys):
    """Return a run, a second run for comparison, and the JSON output of commands."""
    name, workdir = request.param, tmp_path / "runs"
    better = NAMES[name]
    evaluation, _ = (
        publish_run(workdir / run, name, better, value) for run, value in VALUES[better].items()
    )

    def answer(*words):
        assert app.call([*words, "--workdir", str(workdir), "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    events = [*read(workdir / RUN / "events.jsonl")]
    return SimpleNamespace(
        name=name, root=storage.uri_of(workdir), folder=workdir / RUN, answer=answer,
        evaluation=evaluation, metrics=evaluation["metrics"], events=events,
        checkpoints=storage.uri_of(workdir / RUN / "checkpoints"),
        result=judge_outcome(reduce_events(events), 0, interrupted=False),
    )  # fmt: skip


def in_live_view(made):
    on_terminal = live.Display()
    on_terminal._validation = Validation(global_step=9, metrics=made.metrics)
    return on_terminal._metric_lines()[-1].split()[1]


def in_closing_table(made):
    rows = display.closing_table(made.result).rows
    metrics = next(row["metrics"] for row in rows if row["stage"] == "evaluate_model")
    return str(metrics).partition("=")[0]


def in_registry(made, *words):
    said = {key: made.evaluation[key] for key in ("main_metric", "directions")}
    uri = publish_model(made.folder, 1, global_step=20, **said)
    lineage = {"run_id": RUN, "metrics": made.metrics}
    registry.register(made.root, "churn", uri, lineage=lineage, scratch=made.folder)
    return made.answer("models", *words)


def in_report(made):
    rows = views.metric_rows(made.evaluation, made.metrics)
    return views.tiles(made.evaluation, rows)[0]["name"]


def in_curves(made):
    history = [{f"validation_{each}": 1 for each in ("loss", "accuracy", made.name)}]
    return next(iter(views.training(history, made.name)))


def in_tracker(made):
    reader, tags = Reader(), {}
    for event in made.events:
        tags |= reader.read(event).tags
    return tags["flotilla.main_metric"]


PLACES = {
    "live view": in_live_view,
    "log": lambda made: LogLines().take(Validation(global_step=9, metrics=made.metrics)).split()[5],
    "headline": lambda made: spell_metric(made.name) in made.result.headline and made.name,
    "answer of a run": lambda made: make_answer(made.result).more["main_metric"],
    "closing table": in_closing_table,
    "runs": lambda made: made.answer("runs")["runs"][0]["main_metric"],
    "status": lambda made: made.answer("status", RUN)["main_metric"],
    "compare": lambda made: next(iter(made.answer("compare", RUN, OTHER)["comparison"]["test"])),
    "models list": lambda made: in_registry(made, "list")["models"][0]["main_metric"],
    "models show": lambda made: in_registry(made, "show", "churn", "1")["model"]["main_metric"],
    "tiles of the report": in_report,
    "curves of the report": in_curves,
    "tracker": in_tracker,
    "scalars of KFP": lambda made: next(iter(descriptor.scalars(made.metrics))),
    "checkpoint": lambda made: (
        select_checkpoint(made.checkpoints, "best").why.endswith(f" {spell_metric(made.name)}")
        and made.name
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_names_the_main_metric(made, place):
    assert PLACES[place](made) == made.name


def test_the_best_run_and_the_best_checkpoint_are_those_of_the_main_metric(made):
    assert made.answer("compare", OTHER, RUN)["best"] == [RUN]
    assert select_checkpoint(made.checkpoints, "best").global_step == 10
