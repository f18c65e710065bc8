"""Tests which features are kept, their roles, and examples of varying shape."""

import logging

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.builders.batches import fit_value
from flotilla.trainer.data.features import Fit, select
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


# Shapes of all features of `Ragged`. A set of tags becomes one bool per class.
SHAPES = {
    "picture": (4, 2, 3),
    "mask": (4, 2, 1),
    "clip": (3, 2, 2, 1),
    "sound": (3,),
    "words": (3,),
    "grid": (3, 2),
    "boxes/size": (3,),
    "kinds": (3,),
    "flags": (3,),
}


@pytest.fixture
def ragged(tmp_path):
    def make(**section):
        return select(
            DataConfig(dataset="Ragged", **section), builders.Ragged(data_dir=tmp_path).info
        )

    return make


@pytest.mark.parametrize(
    ("feature", "form", "example"),
    [
        (
            tfds.features.Image(shape=(None, None, 3)),
            "'x' (uint8 of shape (None, None, 3))",
            "{x: [64, 64, 3]}",
        ),
        (tfds.features.Image(shape=(None, 32, 1)), "(None, 32, 1)", "{x: [64, 32, 1]}"),
        (tfds.features.Video(shape=(None, 8, 8, 3)), "(None, 8, 8, 3)", "{x: [16, 8, 8, 3]}"),
        (tfds.features.Audio(), "'x' (int64 of shape (None,))", "{x: [16000]}"),
        (tfds.features.Audio(sample_rate=8000), "(None,)", "{x: [8000]}"),
        (tfds.features.Sequence(np.int32), "'x' (int32 of shape (None,))", "{x: [64]}"),
        (tfds.features.Sequence({"a": np.int32}), "'x/a' (int32", "{x/a: [64]}"),
        (
            {"a": tfds.features.Sequence(np.int32), "b": tfds.features.Sequence(np.int8)},
            "'x/a' (int32 of shape (None,)), 'x/b' (int8 of shape (None,))",
            "{x/a: [64], x/b: [64]}",
        ),
    ],
)
def test_a_shape_that_is_not_fixed_is_asked_for_with_an_example(feature, form, example, tmp_path):
    with pytest.raises(ConfigError) as caught:
        of({"x": feature, "label": np.int64}, ("x", "label"), tmp_path)
    message = str(caught.value)
    assert message.startswith("data.shapes: examples of made differ in the shape of 'x")
    assert form in message
    assert message.endswith(f"; set data.shapes to {example} or other sizes")


@pytest.mark.parametrize(("set_", "asked"), [({}, 10), ({"sound": (5,)}, 5)])
def test_what_is_asked_for_is_taken_and_what_is_set_stays_in_the_example(ragged, set_, asked):
    roles = {"inputs": ("sound", "words"), "label": "tags"}
    expected = (
        rf"\{{sound: \[{asked}\], words: \[64\]\}} or other sizes; 'tags' is read as a set of "
        "classes or, if you set a length, as one class at each position$"
    )
    with pytest.raises(ConfigError, match=expected):
        ragged(**roles, shapes=set_)
    found = ragged(**roles, shapes={"sound": (asked,), "words": (64,)})
    assert found.specs["sound"].shape == (asked,)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"pictur": (8, 8, 3)},
            "data.shapes: there is no feature 'pictur' in Ragged; did you mean 'picture'?",
        ),
        (
            {"picture": (8, 8)},
            "data.shapes: picture: [8, 8] does not match uint8 of shape (None, None, 3); set a "
            "shape such as [64, 64, 3]",
        ),
        ({"picture": (8, 8, 1)}, "data.shapes: picture: [8, 8, 1] does not match uint8 of shape "),
        ({"sound": (5, 5)}, "data.shapes: sound: [5, 5] does not match int64 of shape (None,); "),
    ],
)
def test_a_shape_that_does_not_suit_is_refused(ragged, shapes, message):
    with pytest.raises(ConfigError) as caught:
        ragged(shapes=shapes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("feature", "what"),
    [(tfds.features.Text(), "a single value"), (tfds.features.Dataset(np.int32), "a dataset in")],
    ids=["text", "dataset"],
)
def test_what_has_no_shape_of_its_own_gets_none(feature, what, tmp_path):
    features = {"x": np.float32, "more": feature, "label": np.int64}
    with pytest.raises(ConfigError, match=f"the feature 'more' of made is {what}"):
        of(features, ("x", "label"), tmp_path, shapes={"more": (3,)})


def test_a_dataset_in_each_example_is_no_input(tmp_path):
    features = {"x": tfds.features.Dataset(np.float32), "y": np.float32, "label": np.int64}
    with pytest.raises(ConfigError, match=r"data.inputs: 'x' of made is a nested dataset"):
        of(features, ("x", "label"), tmp_path)
    assert of(features, ("x", "label"), tmp_path, inputs="y").inputs == ("y",)


def test_a_fixed_shape_may_become_another_one(tmp_path):
    image = tfds.features.Image(shape=(4, 4, 3))
    found = of({"x": image, "label": np.int64}, ("x", "label"), tmp_path, shapes={"x": (2, 2, 3)})
    assert found.specs["x"].shape == (2, 2, 3)


def test_a_set_of_classes_becomes_a_bool_for_each(ragged, caplog):
    caplog.set_level(logging.INFO)
    found = ragged(inputs="sound", label="tags", shapes={"sound": (3,)})
    tags = found.specs["tags"]
    assert (tags.shape, tags.dtype, tags.num_classes) == ((3,), "bool", 3)
    assert "Ragged: tags is stored as [3] by multi_hot" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "stored"), [(np.int32, "int32"), (np.uint8, "int64"), (np.bool_, "int64")]
)
def test_a_sequence_of_labels_can_hold_what_is_no_label(dtype, stored, tmp_path):
    features = {"x": np.float32, "y": tfds.features.Sequence(dtype)}
    found = of(features, ("x", "y"), tmp_path, shapes={"y": (4,)})
    assert (found.specs["y"].dtype, found.fits["y"].fill) == (stored, -1)


@pytest.mark.slow
def test_of_every_kind_it_is_what_is_expected(prepared, contents):
    """Every stored record equals what NumPy computes from the example."""
    section = {"shapes": SHAPES, "label": ("kinds", "tags"), "validation": 0}
    values = contents(prepared("Ragged", **section), "train")
    order = values["sound"].argsort(axis=0)[:, 0]
    assert len(order) == 40
    expected = [by_numpy(builders.ragged(number)) for number in range(40)]
    for name in ("clip", "sound", "words", "grid", "boxes/size", "kinds", "flags", "tags"):
        found = sorted(each.tolist() for each in values[name])
        assert found == sorted(each[name] for each in expected), name
    assert values["picture"].shape == (40, 4, 2, 3)
    assert values["picture"].dtype == np.uint8
    # Resizing a mask must not create new values.
    assert set(np.unique(values["mask"])) == {0, 1, 2}


def by_numpy(example):
    def padded(values, fill):
        return [*values[:3], *[fill] * (3 - len(values))]

    rows = [[*row, 0, 0][:2] for row in example["grid"]]
    return {
        "clip": padded([frame.tolist() for frame in example["clip"]], np.zeros((2, 2, 1)).tolist()),
        "sound": padded(example["sound"].tolist(), 0),
        "words": padded([word.encode() for word in example["words"]], b""),
        "grid": padded(rows, [0, 0]),
        "boxes/size": padded(example["boxes"]["size"], 0.0),
        "kinds": padded(example["kinds"], -1),
        "flags": padded(example["flags"], False),
        "tags": [number in example["tags"] for number in range(3)],
    }


def resized(image, *shape, method="resize"):
    fit = Fit(method=method, shape=shape, dtype=image.dtype.name)
    return fit_value(fit, tf.constant(image)).numpy()


def test_an_image_keeps_its_brightness():
    image = np.full((7, 5, 3), 200, np.uint8)
    image[:, :2] = 100
    assert abs(resized(image, 14, 10, 3).mean() - image.mean()) < 2
    # At a quarter of the size, each pixel is the mean of sixteen pixels.
    checks = np.indices((16, 16)).sum(0)[..., None] % 2 * np.uint8(255)
    small = resized(checks.astype(np.uint8), 4, 4, 1)
    assert abs(small.astype(int) - 128).max() < 20


@pytest.mark.parametrize(("dtype", "top"), [("uint8", 255), ("uint16", 65535), ("float32", 1.0)])
def test_an_image_keeps_its_type_and_its_range(dtype, top):
    found = resized(np.full((2, 2, 1), top, dtype), 3, 5, 1)
    assert (found.dtype, found.min(), found.max()) == (np.dtype(dtype), top, top)


def test_a_mask_takes_the_nearest_class():
    mask = np.array([[0, 9], [0, 9]], np.uint8)[..., None]
    found = resized(mask, 4, 4, 1, method="nearest")
    np.testing.assert_array_equal(found[..., 0], [[0, 0, 9, 9]] * 4)
