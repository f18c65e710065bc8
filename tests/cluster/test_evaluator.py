"""Tests that the evaluator evaluates every checkpoint, and that training continues if it dies."""

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.checkpoints import restore_model
from flotilla.trainer.checkpoints.history import read_validations
from flotilla.trainer.checkpoints.index import best_first, read_index
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.data.read import evaluation_batches, stage_shards
from flotilla.trainer.evaluation import evaluate
from flotilla.trainer.events import AttemptBegin, Restart, Validation
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.tasks import registry as tasks
from tests.cluster.launched import launched, run_to_end

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS, EVERY, KEEP = 1500, 200, 2
SETTINGS = {
    "training": {"steps": STEPS, "checkpoint_every": EVERY, "keep": KEEP},
    "cluster": {"workers": 2, "evaluator": True, "max_restarts": 0},
}


def measured(dataset, uri, folder):
    spec = DatasetSpec.from_manifest(storage.read_manifest(dataset))
    config = parse_config({})
    objective = tasks.make_objective(config, spec)
    model = evaluate.build_model(config, spec, objective)
    restore_model(uri, model, folder / "scratch")
    files = stage_shards(dataset, folder / "validation", "validation")
    batches = evaluation_batches(spec, files, batch_size=1000)
    return objective.means(objective.totals(model, batches).numpy())["loss"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_an_evaluator_that_is_killed_five_times_is_never_noticed(dataset, tmp_path):
    with launched(SETTINGS, dataset, tmp_path) as run:
        for _ in range(5):
            run.wait_for(lambda event: isinstance(event, Validation))
            run.kill("evaluator-0")
        code, said = run.end()
    assert code == 0, said
    assert [e.task for e in run.events(Restart)] == ["evaluator-0"] * 5
    assert len(run.events(AttemptBegin)) == 1
    assert run.newest() == STEPS
    rows = read_validations(run.checkpoints)
    steps = [row["global_step"] for row in rows]
    assert steps == [*range(0, STEPS, EVERY), STEPS]
    best = min(rows, key=MainMetric(name="accuracy", better="higher").order)
    found = read_index(run.checkpoints)
    assert best_first(found)[0].global_step == best["global_step"]
    assert {each.global_step for each in found[-KEEP:]} == {STEPS, steps[-2]}
    loss = measured(dataset, best_first(found)[0].uri, tmp_path)
    assert loss == pytest.approx(best["validation_loss"], rel=1e-4)


def test_training_ends_early_when_the_evaluator_sees_no_gain(dataset, tmp_path):
    training = {
        "strategy": "single",
        "steps": 10**7,
        "checkpoint_every": EVERY,
        "optimizer": {"name": "sgd", "learning_rate": 1e-30},
        "patience": 2,
    }
    run = run_to_end({**SETTINGS, "training": training}, dataset, tmp_path)
    losses = [row["validation_loss"] for row in read_validations(run.checkpoints)]
    assert len(losses) >= 3
    assert len(set(losses)) == 1
    assert run.newest() < 10**7
