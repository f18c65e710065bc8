"""Tests that the classes of targets are counted and that values unfit for training are rejected."""

import ml_dtypes
import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.data.preparation.shards import Target
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.data import made_builders as builders


def target(dtype, shape=(), num_classes=0):
    stored = "raw" if shape else "int"
    spec = FeatureSpec(shape=shape, dtype=dtype, stored=stored, num_classes=num_classes)
    return Target("y", spec)


@pytest.mark.parametrize(
    ("spec", "batches", "counts"),
    [
        (("bool",), [[True, False, True], [True]], [1, 3]),
        (("bool", (3,), 3), [[[1, 0, 0], [1, 1, 0]], [[0, 1, 0]]], [2, 2, 0]),
        # The end of a sequence is not counted.
        (("int64", (3,), 4), [[[1, 1, -1], [3, -1, -1]]], [0, 2, 0, 1]),
    ],
)
def test_classes_are_counted(spec, batches, counts):
    found = target(*spec)
    for batch in batches:
        found.add("train", np.array(batch, spec[0]))
    assert found.counts() == {"train": counts}
    found.add("test", np.array(batches[-1], spec[0])[:0])
    assert found.counts() == {"train": counts, "test": [0] * len(counts)}


def test_roles_are_in_the_manifest(prepared):
    fields = prepared("Weighted", label=("price", "sold"), weight="times", group="shop").manifest
    spec = DatasetSpec.from_manifest(fields)
    assert spec.targets == ("price", "sold")
    assert (spec.weight, spec.group, spec.inputs) == ("times", "shop", ("x", "sizes"))
    assert set(spec.target_counts) == set(spec.target_moments) == {"price", "sold"}
    assert set(spec.target_moments["price"]) == {"mean", "std", "min", "max"}
    assert spec.target_counts["price"] == {}
    assert sum(map(sum, spec.target_counts["sold"].values())) == 50


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"price": np.nan},
            "data.label: the split 'train' of {name} has an example whose 'price' is nan; write",
        ),
        (
            {"sizes": [0, np.inf, 0]},
            "data.label: the split 'train' of {name} has an example whose 'sizes' is inf; write",
        ),
        (
            {"times": -2},
            "data.weight: the split 'train' of {name} has an example with the weight -2.0 "
            "('times'); a weight must be at least 0",
        ),
        (
            {"times": np.nan},
            "data.weight: the split 'train' of {name} has an example whose 'times' is nan; write",
        ),
    ],
)
def test_no_number_is_refused_and_nothing_published(bad, message, prepared, monkeypatch, root):
    monkeypatch.setattr(builders.Weighted, "bad", bad)
    with pytest.raises(UserError) as caught:
        prepared("Weighted", label=("price", "sizes"), weight="times")
    assert str(caught.value).startswith(
        message.replace("{name}", "tests.trainer.data.made_builders:Weighted")
    )
    assert storage.list_published(storage.join(root, "datasets")) == []


def test_classes_of_which_nothing_is_learnt_are_said():
    spec = FeatureSpec(
        shape=(), dtype="int64", stored="int", num_classes=4, labels=("a", "b", "c", "d")
    )
    target = Target("y", spec)
    target.add("train", np.array([0, 0, 0, 1]))
    assert list(target.notes()) == [
        "the label 'y' has only one example of 'b'; correct the spelling, merge classes, or add "
        "examples"
    ]
    target.add("test", np.array([0, 1, 2, 2]))
    (note,) = target.notes()
    assert note.startswith("the label 'y' has 'c' only in validation or test")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_label_that_is_not_a_number_is_refused(dtype):
    found = target("float32")
    found.refuse("data", "train", np.array([1, 2], dtype))
    with pytest.raises(UserError, match="whose 'y' is nan"):
        found.refuse("data", "train", np.array([1, np.nan], dtype))
