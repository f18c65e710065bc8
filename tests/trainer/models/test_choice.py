"""Tests which model is selected for the inputs of a dataset."""

import pytest

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.model import ModelConfig
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.models import choice

NUMBER = FeatureSpec(shape=(), dtype="float32", stored="float")
ID = FeatureSpec(shape=(), dtype="int64", stored="int")
TEXT = FeatureSpec(shape=(), dtype="string", stored="bytes")
IMAGE = FeatureSpec(shape=(8, 9, 3), dtype="uint8", stored="image")
TEXTS = FeatureSpec(shape=(None,), dtype="string", stored="sequence")
MOVES = FeatureSpec(shape=(30, 3), dtype="float32", stored="raw")
CLASSES = FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=3)


def a_dataset(label=NUMBER, **inputs) -> DatasetSpec:
    features = {**inputs, "label": label}
    return DatasetSpec(features=features, inputs=tuple(inputs), targets=("label",), shards={})


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (a_dataset(age=NUMBER, town=TEXT), "tabular"),
        (a_dataset(age=NUMBER), "tabular"),
        (a_dataset(picture=IMAGE), "cnn"),
        (a_dataset(picture=IMAGE, age=NUMBER), "tabular"),
        (a_dataset(pages=TEXTS), "sequence"),
        (a_dataset(pages=TEXTS, age=NUMBER), "sequence"),
        (a_dataset(moves=MOVES), "sequence"),
        (a_dataset(vector=FeatureSpec(shape=(9,), dtype="float32", stored="raw")), "tabular"),
        (a_dataset(pages=TEXTS, picture=IMAGE), "tabular"),
        (a_dataset(user_id=ID, movieId=ID), "two_tower"),
        (a_dataset(userid=TEXT, item=TEXT), "two_tower"),
        (a_dataset(label=CLASSES, user_id=ID, movie_id=ID), "tabular"),
        (a_dataset(user_id=NUMBER, movie_id=ID), "tabular"),
        (a_dataset(user_age=ID, movie_id=ID), "tabular"),
        (a_dataset(user_id=ID, customer_id=ID), "tabular"),
    ],
)
def test_the_model_of_some_inputs(dataset, name):
    assert choice.of_dataset(dataset).name == name


def test_a_model_that_is_named_stays():
    assert choice.named(ModelConfig(name="mlp"), a_dataset(picture=IMAGE)).name == "mlp"
    kept = choice.named(ModelConfig(name="auto", args={"dropout": 0.1}), a_dataset(picture=IMAGE))
    assert (kept.name, kept.args) == ("cnn", {"dropout": 0.1})


@pytest.mark.parametrize(
    ("given", "augment"),
    [
        ({"model": {"name": "auto"}}, {"augment": True}),
        ({"model": {"name": "auto", "args": {"augment": False}}}, {"augment": False}),
        ({"model": {"name": "auto"}, "training": {"jit_compile": True}}, {"augment": False}),
        ({"model": {"name": "cnn"}}, {}),
    ],
)
def test_images_of_a_chosen_model_are_augmented(given, augment):
    found = choice.with_model(parse_config(given), a_dataset(picture=IMAGE))
    assert (found.model.name, found.model.args) == ("cnn", augment)


def test_ids_by_name():
    ids = ["id", "ID", "customer ID", "userId", "passengerid", "order_no"]
    others = ["paid", "grid", "idle", "notes", "PAID"]
    assert [name for name in [*ids, *others] if choice.is_id(name)] == ids


def test_a_chosen_recommender_is_a_configuration_that_is_read_again():
    given = {"data": {"source": "/t.csv", "label": "y"}, "model": {"name": "auto"}}
    found = choice.with_model(parse_config(given), a_dataset(user_id=ID, item_id=ID))
    assert parse_config(found.model_dump(mode="json")) == found
    assert found.data.inputs == ("user_id", "item_id")
