"""Which features are kept, which is the label, and what is refused before any download."""

import logging

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.trainer.data import builders
from trainer.data.features import select
from trainer.data.spec import FeatureSpec
from trainer.errors import UserError


@pytest.fixture
def selected(tmp_path):
    def make(name):
        return select(name, getattr(builders, name)(data_dir=tmp_path).info)

    return make


def of(features, keys, tmp_path):
    """Select from features that no builder of ours has."""

    class Made(builders.Small, skip_registration=True):
        def features(self):
            return features

    Made.keys = keys
    return select("made", Made(data_dir=tmp_path).info)


def test_supervised_keys_name_inputs_and_label(selected):
    found = selected("Pictures")
    assert (found.inputs, found.targets) == (("image",), ("label",))
    label = found.specs["label"]
    assert (label.labels, label.num_classes) == (("cat", "dog", "eel"), 3)


def test_what_is_neither_is_kept_too(selected):
    assert set(selected("Pictures").specs) == {"image", "name", "label"}


def test_nested_features_are_named_by_their_path(selected):
    found = selected("Everything")
    assert found.inputs == ("image", "nested/inner", "nested/deep/er")
    assert set(found.specs) == set(builders.flat(builders.example(0)))


def test_specs_of_every_kind(selected):
    specs = selected("Everything").specs
    assert specs["image"] == FeatureSpec(shape=(4, 5, 3), dtype="uint8", stored="raw")
    assert specs["words"] == FeatureSpec(shape=(2,), dtype="string", stored="bytes")
    assert specs["steps"] == FeatureSpec(shape=(2,), dtype="int32", stored="raw")
    assert specs["nested/inner"] == FeatureSpec(shape=(), dtype="int8", stored="int")
    assert specs["exact"] == FeatureSpec(shape=(), dtype="float64", stored="raw")


def test_without_supervised_keys_the_label_is_the_feature_of_that_name(selected):
    found = selected("Small")
    assert (found.inputs, found.targets) == (("x", "number"), ("label",))


def test_an_integer_may_be_the_label(selected):
    found = selected("IntegerLabel")
    rating = found.specs["rating"]
    assert (found.targets, rating.labels, rating.num_classes) == (("rating",), (), 0)


def test_a_class_label_without_classes_is_an_integer(tmp_path):
    features = {"x": np.float32, "label": tfds.features.ClassLabel()}
    label = of(features, None, tmp_path).specs["label"]
    assert (label.labels, label.num_classes) == ((), 0)


def test_numbered_classes_are_named_by_their_numbers(tmp_path):
    features = {"x": np.float32, "label": tfds.features.ClassLabel(num_classes=3)}
    assert of(features, None, tmp_path).specs["label"].labels == ("0", "1", "2")


def test_an_example_weight_is_no_input(tmp_path):
    features = {"x": np.float32, "weight": np.float32, "y": np.int64}
    found = of(features, ("x", "y", "weight"), tmp_path)
    assert (found.inputs, found.targets) == (("x",), ("y",))
    assert "weight" in found.specs


def test_a_name_with_a_slash_is_no_nesting(tmp_path):
    features = {"image/id": np.int64, "image": np.float32, "label": np.int64}
    assert set(of(features, ("image", "label"), tmp_path).specs) == {"image", "image/id", "label"}


def test_a_variable_shape_where_it_does_not_matter_is_left_out(selected, caplog):
    caplog.set_level(logging.INFO)
    assert set(selected("VariableExtra").specs) == {"x", "number", "label"}
    assert "VariableExtra: picture left out" in caplog.text


@pytest.mark.parametrize(
    ("feature", "form"),
    [
        (tfds.features.Image(shape=(None, None, 3)), "uint8 of shape (None, None, 3)"),
        (tfds.features.Sequence(np.int32), "int32 of shape (None,)"),
        (tfds.features.Audio(), "int64 of shape (None,)"),
        (tfds.features.Dataset(np.float32), "float32 of shape ()"),
        (tfds.features.Sequence({"a": np.int32}), "int32 of shape (None,)"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_input_of_a_variable_shape_is_refused(feature, form, tmp_path):
    with pytest.raises(UserError) as caught:
        of({"x": feature, "label": np.int64}, ("x", "label"), tmp_path)
    message = str(caught.value)
    assert message.startswith("data.dataset: the feature 'x")
    assert form in message
    assert "package.module:Builder" in message
    assert "resizes" in message


def test_a_variable_shape_is_refused_by_the_name_of_the_dataset(selected):
    with pytest.raises(UserError, match="feature 'picture' of VariableImage"):
        selected("VariableImage")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoLabel", ["does not say what its label is", "x, y", "supervised_keys"]),
        ("TwoLabels", ["supervised_keys", "one label"]),
        ("FloatLabel", ["label 'rating'", "float32", "ClassLabel"]),
    ],
)
def test_a_dataset_without_a_label_is_refused(selected, name, words):
    with pytest.raises(UserError) as caught:
        selected(name)
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    assert not [word for word in words if word not in message]


@pytest.mark.parametrize(
    ("label", "form"),
    [
        (tfds.features.Text(), "string of shape ()"),
        (tfds.features.Tensor(shape=(3,), dtype=np.int64), "int64 of shape (3,)"),
    ],
    ids=["text", "vector"],
)
def test_a_label_that_is_not_one_integer_is_refused(label, form, tmp_path):
    with pytest.raises(UserError) as caught:
        of({"x": np.float32, "label": label}, ("x", "label"), tmp_path)
    assert f"is {form} and not one integer" in str(caught.value)


def test_a_label_alone_is_no_dataset(tmp_path):
    with pytest.raises(UserError, match="does not say what its label is"):
        of({"label": np.int64}, None, tmp_path)


def test_keys_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(UserError, match="do not name inputs and one label"):
        of({"x": np.float32, "label": np.int64}, ("y", "label"), tmp_path)


def test_features_without_names_are_refused(tmp_path):
    class Made(builders.Small, skip_registration=True):
        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.Sequence(np.int32))

    with pytest.raises(UserError, match="made gives Sequence and no named features"):
        select("made", Made(data_dir=tmp_path).info)
