"""Tests how the dataset or the configuration selects the task."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import TaskConfig
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks import registry
from tests.trainer.refusal import refusal


def feature(dtype="int64", shape=(), classes=0):
    return FeatureSpec(shape=shape, dtype=dtype, stored="raw", num_classes=classes)


def dataset(inputs=None, **targets):
    given = inputs or {"x": feature("float32", (4,))}
    return SimpleNamespace(
        features={**given, **targets},
        inputs=tuple(given),
        targets=tuple(targets),
        group="",
        target_counts={},
        target_moments={},
    )


DONE = nullcontext()
CHOICES = {
    "classification": {"label": feature(classes=3)},
    "binary_classification": {"label": feature("bool")},
    "multilabel_classification": {"label": feature("int64", (5,))},
    "regression": {"label": feature("float32")},
    "sequence_labelling": {"label": feature("int64", (5,), classes=3)},
    "multi_output": {"a": feature("float32"), "b": feature("bool")},
}


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_the_task_is_chosen_by_what_the_label_is(name, is_prepared):
    found = dataset(**CHOICES[name])
    for label, target in CHOICES[name].items() if is_prepared else ():
        found.target_moments[label] = {"mean": 0.5, "std": 0.5, "min": 0.0, "max": 1.0}
        found.target_counts[label] = {} if target.dtype == "float32" else {"train": [4, 6]}
    assert registry.create(TaskConfig(), found).name == name
    assert registry.describe_task(TaskConfig(), found).startswith(f"the task is {name}, because")


def test_a_row_of_whole_numbers_goes_with_the_places_of_an_input():
    as_long = dataset({"x": feature("int64", (5,))}, label=feature("int64", (5,)))
    image = dataset({"x": feature("uint8", (8, 8, 3))}, label=feature("uint8", (8, 8, 1)))
    for found in (as_long, image):
        assert registry.create(TaskConfig(), found).name == "sequence_labelling"


def test_a_bool_for_each_named_class_is_a_set_of_classes():
    label = SimpleNamespace(shape=(3,), dtype="bool", num_classes=3, labels=("a", "b", "c"))
    task = registry.create(TaskConfig(), dataset(label=label))
    assert (task.name, task.labels) == ("multilabel_classification", ("a", "b", "c"))


COUNTS = {"train": [40, 60], "test": [4, 6]}
MOMENTS = {"mean": 0.6, "std": 0.5, "min": 0.0, "max": 1.0}


def two(names=(), dtype="int64", counts=COUNTS, classes=2):
    label = FeatureSpec(shape=(), dtype=dtype, stored="raw", num_classes=classes, labels=names)
    return DatasetSpec(
        features={"x": feature("float32", (4,)), "label": label},
        inputs=("x",),
        targets=("label",),
        shards={},
        target_counts={"label": counts} if counts else {},
        target_moments={"label": MOMENTS} if counts else {},
    )


def positive(found, **config):
    """Return the positive class, whether the classes were swapped, and the resulting dataset."""
    found = registry.set_positive(TaskConfig(**config), found)
    assert registry.set_positive(TaskConfig(**config), found) == found, "it is said once"
    return registry.create(TaskConfig(**config), found).labels[1], bool(found.swapped), found


@pytest.mark.parametrize(
    ("names", "dtype", "counts", "said", "expected"),
    [
        (("no", "yes"), "int64", [60, 40], "", "yes"),
        (("no", "yes"), "int64", [40, 60], "", "no"),
        (("no", "yes"), "int64", [50, 50], "", "yes"),
        (("no", "yes"), "int64", [40, 60], "yes", "yes"),
        (("no", "yes"), "int64", [60, 40], "NO", "no"),
        (("2", "7"), "int64", [60, 40], 2, "2"),
        (("2", "7"), "int64", [60, 40], "2.0", "2"),
        (("é", "z"), "int64", [60, 40], "e\u0301", "é"),
        ((), "int64", [60, 40], 0, "0"),
        ((), "bool", [40, 60], "", "false"),
        ((), "bool", [40, 60], "1", "true"),
    ],
)
def test_the_positive_class_is_the_named_one_else_the_rarer(names, dtype, counts, said, expected):
    found = two(names, dtype, {"train": counts, "test": [3, 4]})
    name, swapped, read = positive(found, positive=said)
    assert name == expected
    assert swapped == (
        read.features["label"].labels[1]
        != (names or {"bool": ("false", "true")}.get(dtype, ("0", "1")))[1]
    )
    assert read.target_counts["label"]["train"] == (counts[::-1] if swapped else counts)


@pytest.mark.parametrize(
    ("names", "classes", "name"),
    [
        (("no", "yes"), 2, "binary_classification"),
        ((), 2, "binary_classification"),
        ((), 0, "classification"),
        (("a", "b", "c"), 3, "classification"),
        (("a",), 1, "classification"),
    ],
)
def test_two_classes_are_binary_before_and_after_a_dataset_is_prepared(names, classes, name):
    for counts in (COUNTS, {}):
        label = two(names, counts=counts, classes=classes)
        assert registry.choose_task(TaskConfig(), label).name == name


def test_the_task_and_why_a_class_is_positive_are_one_line():
    def said(found, **config):
        config = TaskConfig(**config)
        return registry.describe_task(config, registry.set_positive(config, found))

    begin = "the task is binary_classification, because the label 'label' (one int64 of 2 classes)"
    assert said(two(("no", "yes"))) == (
        f"{begin} has two classes; the positive class is 'no', the rarer one, 40 of 100 training "
        "examples"
    )
    assert said(two(("no", "yes")), positive="yes").endswith("is 'yes', as set in task.positive")
    assert "or the other class if that is rarer" in said(two(counts={}))
    assert "the second of two classes with 5 training" in said(two(counts={"train": [5, 5]}))
    assert said(two(), name="ranking").endswith("the positive class is '1', the second one")
    assert "set task.name to binary_classification" in said(two(classes=0))


def test_what_is_taken_is_the_second_class_however_rare_it_is():
    found = two(("no", "yes"))
    assert positive(found, name="ranking")[0] == "yes"
    assert positive(found, name="ranking", positive="no")[0] == "no"
    assert positive(found, name="classification")[:2] == ("yes", False)


def test_each_of_several_labels_has_its_own_positive_class():
    found = two(("no", "yes"))
    other = replace(found.features["label"], labels=("a", "b"))
    found = replace(
        found,
        features={**found.features, "other": other},
        targets=("label", "other"),
        target_counts={**found.target_counts, "other": {"train": [60, 40], "test": [1, 1]}},
    )
    config = TaskConfig(outputs={"other": {"positive": "a"}})
    task = registry.create(config, registry.set_positive(config, found))
    assert {name: part.labels[1] for name, part in task.parts.items()} == {
        "label": "no",
        "other": "a",
    }
    with pytest.raises(ConfigError, match=r"task\.positive: there are several outputs"):
        registry.set_positive(TaskConfig(positive="a"), found)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"positive": "yse"}, "task.positive: 'label' has no class 'yse'; did you mean 'yes'?"),
        ({"positive": "1.5"}, "has no class '1.5' (the classes are 'no' and 'yes'); if you"),
        (
            {"positive": "yes", "name": "classification"},
            "task.positive: classification of 'label' has no positive class; leave the key empty",
        ),
    ],
)
def test_a_positive_class_that_there_is_not_is_refused(config, words):
    assert words in refusal(registry.set_positive, TaskConfig(**config), two(("no", "yes")))


@pytest.mark.parametrize(
    ("config", "dtype", "words"),
    [
        ({}, "string", "no built-in task supports the label 'label' (one string)"),
        (
            {"name": "classification"},
            "float32",
            "task classification: the label must be one class number per example, not 'label' (one",
        ),
        (
            {"name": "regression", "args": {"standardise": True}},
            "float32",
            "task.args: regression has no argument 'standardise' (it takes standardize)",
        ),
    ],
)
def test_a_task_that_does_not_fit_is_refused_by_name(config, dtype, words):
    assert words in refusal(registry.create, TaskConfig(**config), dataset(label=feature(dtype)))


@pytest.mark.parametrize(
    ("counts", "least", "words"),
    [
        (
            {"train": [4, 4, 0], "test": [0, 3]},
            0.0,
            "all examples of the split 'test' have the same 'label', '1'; the split needs examples "
            "of at least two classes",
        ),
        (
            {"train": [4, 4, 0], "test": [1, 1, 2]},
            0.0,
            "the split 'test' has examples whose 'label' is '2', but the training split has none",
        ),
        ({}, -1.0, "has values from -1, but classification needs class"),
        # A class without any example is no error.
        ({"train": [4, 0, 4], "test": [1, 0, 1]}, 0.0, ""),
    ],
)
def test_a_split_that_says_nothing_of_a_model_is_refused(counts, least, words):
    found = dataset(label=feature(classes=3))
    found.target_counts["label"] = counts
    # Without moments, the dataset counts as not prepared, and the split is not checked.
    registry.create(TaskConfig(), found)
    found.target_moments["label"] = {"min": least}
    with pytest.raises(ConfigError, match=f"^task classification: .*{words}") if words else DONE:
        registry.create(TaskConfig(), found)


BOOL, CLASS = feature("bool"), feature(classes=3)
OF_PLACES = feature("int64", (5,), classes=3)


@pytest.mark.parametrize(
    ("name", "label", "counts", "group", "expected"),
    [
        ("binary_classification", BOOL, [90, 10], "", "auc"),
        ("binary_classification", BOOL, [91, 9], "", "average_precision"),
        ("binary_classification", BOOL, [], "", "auc"),
        ("ranking", BOOL, [91, 9], "", "average_precision"),
        ("ranking", BOOL, [91, 9], "x", "ndcg"),
        ("classification", CLASS, [40, 30, 20], "", "accuracy"),
        ("classification", CLASS, [50, 46, 4], "", "macro_f1"),
        # A class without examples does not count as a rare class.
        ("classification", CLASS, [50, 46, 0], "", "accuracy"),
        ("sequence_labelling", OF_PLACES, [500, 460, 40], "", "macro_f1"),
        ("sequence_labelling", OF_PLACES, [500, 460, 400], "", "accuracy"),
        ("multilabel_classification", feature("int64", (5,)), [], "", "macro_f1"),
        ("regression", feature("float32"), [], "", "mean_absolute_error"),
    ],
)
def test_the_main_metric_is_chosen_by_the_training_examples(name, label, counts, group, expected):
    found = dataset(label=label)
    found.group = group
    if counts:
        found.target_counts["label"] = {"train": counts, "validation": [9, 1]}
    assert registry.create(TaskConfig(name=name), found).main_metric == expected


@pytest.mark.parametrize("setting", [{}, {"metric": "log_loss"}])
def test_the_configured_main_metric_replaces_that_of_the_task(setting):
    tree = {"task": {"main_metric": "log_loss"}, "gate": {"champion": setting}}
    objective = registry.make_objective(parse_config(tree), dataset(label=BOOL))
    assert objective.main_metric == "log_loss"
    assert objective.judged_by["directions"]["log_loss"] == "lower"
