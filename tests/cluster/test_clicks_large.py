"""Two nights of a recommender, tiny: the second begins where the first ended, with new ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.launched import launched
from trainer import storage
from trainer.checkpoints.index import newest_checkpoint
from trainer.config.load import load_config
from trainer.data.prepare import prepare
from trainer.evaluation.evaluate import evaluate
from trainer.events import WarmStart
from trainer.export.export import export
from trainer.promotion import gate

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    # Keras's `save` hands TensorFlow's tensors to NumPy 2 in the old way.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

FILE = Path(__file__).parents[2] / "configs" / "clicks_large.yaml"
TINY = (
    "data.builder_args={users: 500, items: 300, new_users: 20, new_items: 10, events: 8000, "
    "test_events: 1500, drift: 0.02}",
    "data.shards=2",
    "data.validation=0",
    "model.args.rows={user: 1024, item: 1024}",
    "training.steps=40",
    "training.batch_size=200",
    "training.validate_every=0",
    "training.checkpoint_every=40",
    "cluster={parameter_servers: 1, workers: 1}",
    "gate.min={query_auc: 0.4, recall_at_100: 0.2}",
    "gate.champion={metric: recall_at_100, margin: 0.3}",
    "export.formats=[saved_model, keras]",
)


def night(folder, day, *assignments, champion=""):
    """Train, evaluate, judge and export; return the run, its evaluation and the model's URI."""
    given = [*TINY, f"data.builder_args.day={day}", *assignments]
    config = load_config(FILE, given)
    folder.mkdir()
    dataset = prepare(config.data, storage.uri_of(folder), folder / "scratch")
    assert dataset.manifest.fields["version"] == f"1.1.{day}"
    with launched(config.model_dump(mode="json"), dataset.uri, folder) as run:
        code, said = run.end()
    assert code == 0, said
    checkpoint, _ = newest_checkpoint(run.checkpoints)
    places = [storage.uri_of(folder / name) for name in ("evaluation", "decision", "model")]
    scratch = folder / "scratch"
    evaluation = evaluate(config, dataset.uri, checkpoint, places[0], scratch, champion)
    decision = gate.check(config, places[0], places[1])
    assert decision.blessed, decision
    export(config, dataset.uri, checkpoint, decision.uri, places[2], scratch)
    return run, checkpoint, evaluation, places[2]


def test_the_second_night_begins_with_the_champion_of_the_first(tmp_path):
    _, checkpoint, first, champion = night(
        tmp_path / "first", 0, "training.strategy=single", "training.warm_start=''"
    )
    assert {"recall_at_10", "recall_at_100", "query_auc"} <= set(first.metrics)
    run, _, second, _ = night(
        tmp_path / "second", 1, f"training.warm_start={checkpoint}", champion=champion
    )
    (started,) = run.events(WarmStart)
    assert (started.uri, started.left) == (checkpoint, {})
    assert second.metrics["recall_at_100"] > 0.3
