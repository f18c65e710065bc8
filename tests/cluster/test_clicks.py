"""Tests two small recommenders: with fixed tables, and with tables that grow over two nights."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from clicks_large import Clickstream

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.config.load import load_config
from flotilla.trainer.data.builders import embedded as clicks
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.events import WarmStart
from flotilla.trainer.export.export import export
from flotilla.trainer.promotion import gate
from tests.cluster.launched import run_to_end

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

CONFIG = load_config(Path(__file__).parents[2] / "configs" / "clicks.yaml")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the folder with the exported model, the evaluation and the export."""
    folder = tmp_path_factory.mktemp("clicks")
    dataset = prepare(CONFIG.data, storage.uri_of(folder), folder / "scratch").uri
    run = run_to_end(CONFIG.model_dump(mode="json"), dataset, folder)
    checkpoint, _ = newest_checkpoint(run.checkpoints)
    places = {name: storage.uri_of(folder / name) for name in ("evaluation", "decision", "model")}
    scratch = folder / "scratch"
    evaluation = evaluate(CONFIG, dataset, checkpoint, places["evaluation"], scratch)
    decision = gate.check(CONFIG, places["evaluation"], places["decision"])
    assert decision.blessed
    made = export(CONFIG, dataset, checkpoint, decision.uri, places["model"], scratch)
    return folder / "model", evaluation, made


def test_it_finds_tastes_that_no_column_shows_alone(exported):
    _, evaluation, _ = exported
    assert evaluation.metrics["accuracy"] >= CONFIG.gate.min["accuracy"] == 0.75


def test_every_form_gives_the_same_answers(exported):
    _, _, made = exported
    assert set(made.parity["formats"]) == {"saved_model", "keras"}
    assert all(form["max_difference"] <= 1e-5 for form in made.parity["formats"].values())


def test_the_saved_model_takes_both_ids_by_name(exported):
    folder, _, _ = exported
    serve = tf.saved_model.load(next(folder.glob("serving/clicks/*"))).signatures["serving_default"]
    users, items, labels = (column[clicks.TRAINING :] for column in clicks.draw_clicks())
    answers = serve(user=tf.constant(users), item=tf.constant(items))
    found = answers["probability"].numpy() > 0.5
    assert (found == labels).mean() >= CONFIG.gate.min["accuracy"]
    np.testing.assert_array_equal(answers["logit"].numpy() > 0, found)
    with pytest.raises(tf.errors.InvalidArgumentError, match="user_embedding: ids outside of 0"):
        serve(user=tf.constant([clicks.USERS], tf.int64), item=tf.constant([0], tf.int64))


FILE = Path(__file__).parents[2] / "examples" / "clicks_large" / "clicks_large.yaml"
TRUTH = {"users": 500, "items": 300, "new_users": 20, "new_items": 10, "events": 8000}
SHARDS = 2
TINY = (
    f"data.builder_args={json.dumps(TRUTH | {'test_events': 1500})}",
    "data.shards=2",
    "data.validation=0",
    "model.args.tables={user: {capacity: 2048}, item: {capacity: 2048}, "
    "segment: {capacity: 256}, category: {capacity: 1024}}",
    f"model.args.shards={SHARDS}",
    "training.steps=40",
    "training.batch_size=200",
    "training.validate_every=0",
    "training.checkpoint_every=40",
    "cluster={parameter_servers: 1, workers: 1}",
    "gate.min={query_auc: 0.4, recall_at_100: 0.2}",
    "gate.constant=reported",
    "gate.champion={metric: recall_at_100, margin: 0.3}",
    "export.formats=[saved_model, keras]",
)


def night(folder, day, *assignments, champion=""):
    """Train, evaluate, decide and export; return the run, its evaluation and the model's URI."""
    given = [*TINY, f"data.builder_args.day={day}", *assignments]
    config = load_config(FILE, given)
    folder.mkdir()
    dataset = prepare(config.data, storage.uri_of(folder), folder / "scratch")
    assert dataset.manifest.fields["version"] == f"1.1.{day}"
    run = run_to_end(config.model_dump(mode="json"), dataset.uri, folder)
    checkpoint, _ = newest_checkpoint(run.checkpoints)
    places = [storage.uri_of(folder / name) for name in ("evaluation", "decision", "model")]
    scratch = folder / "scratch"
    evaluation = evaluate(config, dataset.uri, checkpoint, places[0], scratch, champion)
    decision = gate.check(config, places[0], places[1])
    assert decision.blessed, decision
    export(config, dataset.uri, checkpoint, decision.uri, places[2], scratch)
    return run, checkpoint, evaluation, places[2]


def rows_of(uri, table):
    reader = tf.train.load_checkpoint(f"{storage.local_path(uri)}/variables")
    found = {}
    for shard in range(SHARDS):
        ids, used, rows = (
            reader.get_tensor(
                f"variables/model.S{table}_embedding.Sshard_{shard}_{name}/.ATTRIBUTES/VARIABLE_VALUE"
            )
            for name in ("ids", "used", "rows")
        )
        live = np.flatnonzero(used[:-1] >= 0)
        found |= dict(zip(ids[live].tolist(), rows[live], strict=True))
    return found


def ids_of(day, feature):
    return set(Clickstream(**TRUTH).draw(day, 0, 0)[feature][: TRUTH["events"]].tolist())


def answered(model, inputs):
    served = tf.saved_model.load(str(next(storage.local_path(model).glob("serving/*/*"))))
    given = {name: tf.constant(values, tf.int64) for name, values in inputs.items()}
    return served.signatures["serving_default"](**given)


def test_the_second_night_begins_with_the_champion_of_the_first(tmp_path):
    _, checkpoint, first, champion = night(
        tmp_path / "first", 0, "training.strategy=single", "training.warm_start=''"
    )
    assert {"recall_at_10", "recall_at_100", "query_auc"} <= set(first.metrics)
    run, later, second, model = night(
        tmp_path / "second", 1, f"training.warm_start={checkpoint}", champion=champion
    )
    (started,) = run.events(WarmStart)
    assert (started.uri, started.left) == (checkpoint, {})
    assert second.metrics["recall_at_100"] > 0.3
    for feature in ("user", "item"):
        before, after = rows_of(checkpoint, feature), rows_of(later, feature)
        days = [ids_of(day, feature) for day in (0, 1)]
        assert before.keys() == days[0]
        assert after.keys() == days[0] | days[1]
        assert days[1] - days[0]
        gone = days[0] - days[1]
        assert gone
        for each in gone:
            np.testing.assert_array_equal(after[each], before[each])
        assert any((after[each] != before[each]).any() for each in days[0] & days[1])
    known = min(ids_of(1, "user"))
    pairs = {
        "user": [-1, -2, known],
        "item": [-1, -2, -3],
        "segment": [3] * 3,
        "category": [5] * 3,
        "shown": [0] * 3,
    }
    found = answered(model, pairs)
    strangers = found["user_vector"].numpy()
    # Unseen IDs share one row, so the first two examples have the same vector.
    np.testing.assert_array_equal(strangers[0], strangers[1])
    assert (strangers[0] != strangers[2]).any()
    assert len(np.unique(found["item_vector"].numpy(), axis=0)) == 1
