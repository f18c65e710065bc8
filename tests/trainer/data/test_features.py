"""Tests which features are kept, which is the label, and which are rejected."""

import logging

import numpy as np
import pytest
import tensorflow_datasets as tfds

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.features import select
from flotilla.trainer.data.roles import find
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.data import made_builders as builders


@pytest.fixture
def selected(tmp_path):
    def make(name):
        return select(DataConfig(dataset=name), getattr(builders, name)(data_dir=tmp_path).info)

    return make


def of(features, keys, tmp_path, **section):
    """Select from a builder that has exactly these features."""

    class Made(builders.Small, skip_registration=True):
        def features(self):
            return features

    Made.keys = keys
    return select(DataConfig(dataset="made", **section), Made(data_dir=tmp_path).info)


def test_supervised_keys_name_inputs_and_label(selected):
    found = selected("Pictures")
    assert (found.inputs, found.targets) == (("image",), ("label",))
    assert set(found.specs) == {"image", "name", "label"}
    label = found.specs["label"]
    assert (label.labels, label.num_classes) == (("cat", "dog", "eel"), 3)


def test_specs_of_every_kind(selected):
    found = selected("Everything")
    assert found.inputs == ("image", "nested/inner", "nested/deep/er")
    assert set(found.specs) == set(builders.flat(builders.example(0)))
    specs = found.specs
    assert specs["image"] == FeatureSpec(shape=(4, 5, 3), dtype="uint8", stored="raw")
    assert specs["words"] == FeatureSpec(shape=(2,), dtype="string", stored="bytes")
    assert specs["steps"] == FeatureSpec(shape=(2,), dtype="int32", stored="raw")
    assert specs["nested/inner"] == FeatureSpec(shape=(), dtype="int8", stored="int")
    assert specs["exact"] == FeatureSpec(shape=(), dtype="float64", stored="raw")


def test_a_variable_shape_where_it_does_not_matter_is_left_out(selected, caplog):
    caplog.set_level(logging.INFO)
    assert set(selected("VariableExtra").specs) == {"x", "number", "label"}
    assert "VariableExtra: ignoring picture" in caplog.text


RICH = {
    "rows": {"age": np.int64, "fare": np.float32, "name": tfds.features.Text()},
    "price": np.float64,
    "sold": np.bool_,
    "times": np.int32,
    "shop": tfds.features.Text(),
    "words": tfds.features.Sequence(np.int64),
}
FIXED = {name: each for name, each in RICH.items() if name != "words"}
KEYS = ("rows", "sold")
ROWS = ("rows/age", "rows/fare", "rows/name")
WEIGHTED = {"x": np.float32, "weight": np.float32, "y": np.int64}
SLASHED = {"image/id": np.int64, "image": np.float32, "label": np.int64}


@pytest.mark.parametrize(
    ("features", "keys", "section", "inputs", "targets"),
    [
        # Without supervised keys, the label is the feature of that name.
        ({"x": np.float32, "label": np.int64}, None, {}, ("x",), ("label",)),
        (WEIGHTED, ("x", "y", "weight"), {}, ("x",), ("y",)),
        (WEIGHTED, ("x", ("y", "weight")), {}, ("x",), ("y", "weight")),
        # A name with a slash is not nested.
        (SLASHED, ("image", "label"), {}, ("image",), ("label",)),
        (RICH, KEYS, {"inputs": ("rows/fare",), "label": "price"}, ("rows/fare",), ("price",)),
        (RICH, None, {"inputs": "rows", "label": ("price", "sold")}, ROWS, ("price", "sold")),
        (RICH, KEYS, {"label": "price"}, ROWS, ("price",)),
        # A label that was an input is none anymore.
        (RICH, KEYS, {"label": "rows/fare", "weight": "rows/age"}, ROWS[2:], ("rows/fare",)),
        (FIXED, None, {"label": "price", "weight": "times"}, (*ROWS, "sold", "shop"), ("price",)),
        (FIXED, None, {"label": "price", "group": "shop"}, (*ROWS, "sold", "times"), ("price",)),
        (RICH, KEYS, {"inputs": ("times",), "weight": "times"}, ("times",), ("sold",)),
        (RICH, KEYS, {"inputs": ("shop",), "group": "shop"}, ("shop",), ("sold",)),
    ],
)
def test_roles_are_those_of_the_keys_and_of_the_configuration(  # noqa: PLR0913, PLR0917
    features, keys, section, inputs, targets, tmp_path
):
    found = of(features, keys, tmp_path, **section)
    assert (found.inputs, found.targets) == (inputs, targets)
    weight = "weight" if keys == ("x", "y", "weight") else ""
    assert found.weight == section.get("weight", weight)
    assert found.group == section.get("group", "")


def test_a_feature_is_itself_before_those_below_it():
    names = ["a", "a/b", "c/d"]
    assert find("label", ["a"], names, "t.csv") == ("a",)
    assert find("inputs", ["c", "a/b"], names, "t.csv") == ("c/d", "a/b")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"label": "prize"},
            "data.label: there is no feature 'prize' in made; did you mean 'price'?",
        ),
        (
            {"inputs": ("rows/fair",)},
            "data.inputs: there is no feature 'rows/fair' in made; did you mean 'rows/fare'?",
        ),
        (
            {"weight": "zz"},
            "data.weight: there is no feature 'zz' in made (one of rows/age, rows/fare, rows/name, "
            "price, sold, times, shop, words)",
        ),
        (
            {"group": "rows"},
            "data.group: 'rows' of made matches rows/age, rows/fare, rows/name; name one of them",
        ),
        (
            {"label": "price", "inputs": ("price", "sold")},
            "data.inputs: 'price' of made is also its label; remove it from data.inputs, or set "
            "data.label to another feature",
        ),
        (
            {"weight": "sold"},
            "data.weight: 'sold' of made is also its label; remove it from data.weight, or set "
            "data.label to another feature",
        ),
        (
            {"weight": "shop"},
            "data.weight: 'shop' of made is string of shape (), but it must be one number per "
            "example",
        ),
        (
            {"weight": "rows/name", "inputs": ("sold",), "label": "price"},
            "data.weight: 'rows/name' of made is string of shape (), but it must be one number "
            "per example",
        ),
        (
            {"group": "words"},
            "data.group: 'words' of made is int64 of shape (None,), but it must be one value per "
            "example",
        ),
        (
            {"label": "shop"},
            "data.label: 'shop' of made is a string, but a label must be a class or a number; "
            "set data.label to one or more of its features (rows/age, rows/fare, price, sold, "
            "times, words)",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_role_is_named_with_its_remedy(section, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        of(RICH, KEYS, tmp_path, **section)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            None,
            "data.label: made has no label (it has no supervised_keys); set data.label to one or "
            "more of its features (x, y)",
        ),
        (
            ("x", "z"),
            "data.label: made has no label (none in supervised_keys ('x', 'z')); ",
        ),
        (("z", "y"), "data.inputs: the supervised_keys ('z', 'y') of made name no input; set "),
        (("x", "x"), "data.inputs: 'x' of made is also its label; remove it from data.inputs, "),
    ],
)
def test_a_dataset_that_leaves_a_role_open_asks_for_its_key(keys, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        of({"x": np.float32, "y": np.float32}, keys, tmp_path)
    assert str(caught.value).startswith(message)


TEXTS = {"text": tfds.features.Text(), "summary": tfds.features.Text()}


@pytest.mark.parametrize(
    ("features", "keys", "message"),
    [
        (TEXTS, (*TEXTS,), r"'summary' of made is a string.*package.module:Builder"),
        ({"label": np.int64}, None, "made has only label, so no input remains"),
        ({f"f{n}": np.float32 for n in range(50)}, None, r"f0, f1, .*, f19 and 30 more\)"),
    ],
)
def test_features_that_are_no_dataset_are_refused(features, keys, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        of(features, keys, tmp_path)


LABELS = {
    "class": (tfds.features.ClassLabel(names=["a", "b"]), ((), "int64", "int", 2)),
    "numbered": (tfds.features.ClassLabel(num_classes=2), ((), "int64", "int", 2)),
    "without classes": (tfds.features.ClassLabel(), ((), "int64", "int", 0)),
    "whole": (np.int32, ((), "int32", "int", 0)),
    "bool": (np.bool_, ((), "bool", "int", 0)),
    "float": (np.float32, ((), "float32", "float", 0)),
    "double": (np.float64, ((), "float64", "raw", 0)),
    "numbers": (tfds.features.Tensor(shape=(3,), dtype=np.float32), ((3,), "float32", "raw", 0)),
    "image": (tfds.features.Image(shape=(4, 4, 1)), ((4, 4, 1), "uint8", "raw", 0)),
    "mask": (
        tfds.features.LabeledImage(labels=["a", "b"], shape=(4, 4, 1)),
        ((4, 4, 1), "uint8", "raw", 2),
    ),
    "tags": (
        tfds.features.Sequence(tfds.features.ClassLabel(names=["a", "b"]), length=5),
        ((5,), "int64", "raw", 2),
    ),
    "set": (
        tfds.features.Sequence(tfds.features.ClassLabel(names=["a", "b"])),
        ((2,), "bool", "raw", 2),
    ),
}


@pytest.mark.parametrize(("label", "expected"), LABELS.values(), ids=LABELS.keys())
def test_a_label_may_have_any_form(label, expected, tmp_path):
    spec = of({"x": np.float32, "label": label}, ("x", "label"), tmp_path).specs["label"]
    assert (spec.shape, spec.dtype, spec.stored, spec.num_classes) == expected
    names = ("0", "1") if label is LABELS["numbered"][0] else ("a", "b")
    assert spec.labels == (names if spec.num_classes else ())


def test_features_without_names_are_refused(tmp_path):
    class Made(builders.Small, skip_registration=True):
        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.Sequence(np.int32))

    with pytest.raises(UserError, match="made has Sequence instead of named features"):
        select(DataConfig(dataset="made"), Made(data_dir=tmp_path).info)
