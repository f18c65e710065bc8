"""The generated clicks: the same ones everywhere, of the sizes they say, with something to find."""

from __future__ import annotations

import hashlib

import numpy as np

from trainer.config.data import DataConfig
from trainer.data.builders import datasets
from trainer.data.embedded import clicks
from trainer.data.features import select


def rate_by(column, count):
    """Return how often each user, or item, of the training examples saw a click."""
    _, _, labels = clicks.draw()
    train = slice(0, clicks.TRAINING)
    seen = np.bincount(column[train], minlength=count)
    return (np.bincount(column[train], labels[train], count) + 0.5) / (seen + 1)


def accuracy_by(column, count):
    """Return how often one is right who goes by one column alone."""
    _, _, labels = clicks.draw()
    test = slice(clicks.TRAINING, None)
    return ((rate_by(column, count)[column[test]] > 0.5) == labels[test]).mean()


def test_they_are_the_same_everywhere():
    drawn = b"".join(column.tobytes() for column in clicks.draw())
    assert hashlib.sha256(drawn).hexdigest()[:16] == "65349d118813665a"


def test_ids_fit_their_tables():
    users, items, labels = clicks.draw()
    assert {len(users), len(items), len(labels)} == {clicks.EXAMPLES}
    assert set(users) == set(range(clicks.USERS))
    assert set(items) == set(range(clicks.ITEMS))


def test_both_answers_are_as_frequent():
    assert 0.48 < clicks.draw()[2].mean() < 0.52


def test_one_column_alone_tells_next_to_nothing():
    users, items, _ = clicks.draw()
    assert accuracy_by(users, clicks.USERS) < 0.54
    assert accuracy_by(items, clicks.ITEMS) < 0.54


def test_the_pair_is_the_input_and_the_click_the_label(tmp_path):
    config = DataConfig(dataset="clicks")
    chosen = select(config, datasets.builder(config, tmp_path).info)
    assert set(chosen.inputs) == {"user", "item"}
    assert (chosen.targets, chosen.specs["label"].labels) == (("label",), ("no_click", "click"))
    assert {spec.stored for spec in chosen.specs.values()} == {"int"}
