"""The recommender of `configs/clicks.yaml` from generated clicks to a model that answers alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.launched import launched
from trainer import storage
from trainer.checkpoints.index import newest_checkpoint
from trainer.config.load import load_config
from trainer.data.embedded import generated as clicks
from trainer.data.prepare import prepare
from trainer.evaluation.evaluate import evaluate
from trainer.export.export import export
from trainer.promotion import gate

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.timeout(1200),
    # Keras's `save` hands TensorFlow's tensors to NumPy 2 in the old way.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

CONFIG = load_config(Path(__file__).parents[2] / "configs" / "clicks.yaml")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder of the exported model, the evaluation and the export."""
    folder = tmp_path_factory.mktemp("clicks")
    dataset = prepare(CONFIG.data, storage.uri_of(folder), folder / "scratch").uri
    with launched(CONFIG.model_dump(mode="json"), dataset, folder) as run:
        code, said = run.end()
    assert code == 0, said
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
    users, items, labels = (column[clicks.TRAINING :] for column in clicks.draw())
    answers = serve(user=tf.constant(users), item=tf.constant(items))
    found = answers["probability"].numpy() > 0.5
    assert (found == labels).mean() >= CONFIG.gate.min["accuracy"]
    np.testing.assert_array_equal(answers["logit"].numpy() > 0, found)
    with pytest.raises(tf.errors.InvalidArgumentError, match="user_embedding: ids outside of 0"):
        serve(user=tf.constant([clicks.USERS], tf.int64), item=tf.constant([0], tf.int64))
