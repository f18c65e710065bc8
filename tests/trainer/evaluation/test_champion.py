"""Tests the champion on the challenger's examples, and that the challenger keeps its classes."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.thresholds import ChampionRule
from flotilla.trainer.evaluation.champion import (
    MOST_ROWS,
    Recalls,
    _judge,
    compare_classes,
    load_champion,
    verdicts,
)
from flotilla.trainer.evaluation.comparison import Opponents
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.evaluation.signature import describe_inputs, list_labels
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.promotion import gate
from flotilla.trainer.report.headline import CLASS_MARGIN, MARGIN
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks import registry as tasks
from flotilla.trainer.tasks.classification import (
    BinaryClassification,
    Classification,
    MultilabelClassification,
)
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.regression import Regression
from flotilla.trainer.tasks.sequences import SequenceLabelling
from tests.trainer import small_run
from tests.trainer.tasks.measuring import InParts, target
from tests.trainer.tasks.test_multi_output import created

GATE = parse_config({"gate": {"champion": {"margin": 0.07}}}).gate

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def champion(run):
    decision = small_run.decide(run, run.root, accuracy=0.5)
    output = storage.uri_of(run.root / "model")
    return small_run.export_model(run, decision, output, run.root / "scratch").uri


def measured(run, champion, folder):
    """Evaluate a run with a champion; return the URI, the metrics and the decision."""
    (folder / "scratch").mkdir(parents=True, exist_ok=True)
    output = storage.uri_of(folder / "evaluation")
    evaluate(run.config, run.dataset, run.checkpoint, output, folder / "scratch", champion)
    config = run.config.model_copy(update={"gate": GATE})
    decision = gate.check(config, output, storage.uri_of(folder / "decision"))
    return output, json.loads(storage.read_file(output, "metrics.json")), decision


def predictions(output, name):
    return storage.local_path(output) / "predictions" / f"{name}.npy"


@pytest.fixture(scope="module")
def unchanged(run, champion, tmp_path_factory):
    return measured(run, champion, tmp_path_factory.mktemp("unchanged"))


def test_an_unchanged_model_is_blessed(champion, unchanged):
    output, text, decision = unchanged
    assert decision.blessed
    assert text["champion"]["uri"] == champion
    assert text["champion"]["metrics"]["accuracy"] == text["metrics"]["accuracy"]
    assert text["champion"]["paired"]["pairs"]["only_champion_right"] == 0
    there, here = (np.load(predictions(output, name)) for name in ("champion_output", "output"))
    np.testing.assert_allclose(there, here, atol=1e-4)


def test_a_model_that_was_made_worse_is_refused(run, champion, tmp_path):
    model = small_run.template_model(run.config, *small_run.digits())
    kernel = model.variables[0].numpy()
    model.variables[0].assign(np.roll(kernel, 1, axis=1))
    checkpoint = small_run.publish_checkpoint(tmp_path / "checkpoints", model)
    worse = dataclasses.replace(run, checkpoint=checkpoint)
    _, text, decision = measured(worse, champion, tmp_path)
    assert not decision.blessed
    assert all(f"({key})" in "".join(decision.reasons) for key in (MARGIN, CLASS_MARGIN))
    assert text["champion"]["class_counts"]["lost"] > 1
    assert text["champion"]["metrics"]["accuracy"] > text["metrics"]["accuracy"]


def test_another_champion_makes_another_evaluation(run, unchanged, tmp_path):
    output, _, _ = unchanged
    with pytest.raises(storage.Conflict):
        evaluate(run.config, run.dataset, run.checkpoint, output, tmp_path)


def test_a_champion_of_other_classes_refuses_and_is_not_asked(run, champion, tmp_path):
    images, labels = small_run.digits()
    dataset = small_run.publish_dataset(tmp_path / "dataset", (images, labels), classes=11)
    spec = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(11,))
    model = registry.build(run.config.model, spec, 0)
    checkpoint = small_run.publish_checkpoint(tmp_path / "checkpoints", model)
    other = dataclasses.replace(run, dataset=dataset, checkpoint=checkpoint)
    output, text, decision = measured(other, champion, tmp_path)
    assert text["champion"]["incomparable"] == "it has 10 classes, but this model has 11"
    assert not decision.blessed
    assert not predictions(output, "champion_output").exists()


def test_what_is_no_model_can_be_no_champion(run, tmp_path):
    with pytest.raises(UserError, match="is a dataset, but the champion must be a model"):
        measured(run, run.dataset, tmp_path)


def test_a_damaged_champion_is_not_asked(run, champion, tmp_path):
    copy = changed(champion, tmp_path, lambda *_: None)
    path = next(storage.local_path(copy).rglob("saved_model.pb"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(storage.Corrupt, match=r"saved_model\.pb has"):
        measured(run, copy, tmp_path)


def changed(champion, folder, change):
    storage.fetch(champion, folder / "fetched")
    fields = storage.read_manifest(champion).fields
    change(folder / "fetched", fields["saved_model"])
    copy = storage.uri_of(folder / "copy")
    storage.publish(folder / "fetched", copy, kind="model", fields=fields)
    return copy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"owns": None}, "it has the outputs income, city, but this model has income, city, owns"),
        ({"city": ["0", "1"]}, "it has 2 classes of city, but this model has 3"),
        ({"city": ["a", "1", "2"]}, "its class 0 of city is 'a', but in this model it is '0'"),
    ],
)
def test_a_champion_of_other_outputs_is_not_asked(run, tmp_path, change, words):
    task = created()
    spec = DatasetSpec.from_manifest(storage.read_manifest(run.dataset))
    labels = {**list_labels(task), **change}
    fields = {
        "inputs": describe_inputs(spec),
        "task": task.name,
        "labels": {name: each for name, each in labels.items() if each is not None},
    }
    uri = described(tmp_path, fields)
    assert load_champion(uri, task, spec, tmp_path).incomparable == words


def test_a_champion_of_other_labels_or_classes_of_an_input_is_not_asked(run, champion, tmp_path):
    spec = DatasetSpec.from_manifest(storage.read_manifest(run.dataset))
    task = tasks.make_objective(run.config, spec).task
    text = "\n".join("1023456789")
    copy = changed(champion, tmp_path, lambda at, _: (at / "labels.txt").write_text(text))
    found = load_champion(copy, task, spec, tmp_path)
    assert found.incomparable == "its class 0 is '1', but in this model it is '0'"
    fields = {**storage.read_manifest(champion).fields}
    fields["reads"] = [{**each, "labels": ["new", "old"]} for each in fields["reads"]]
    found = load_champion(described(tmp_path, fields), task, spec, tmp_path)
    assert found.incomparable.startswith(
        "its input 'image' has other classes than the input of this"
    )


def described(folder, fields):
    """Publish an empty model with these fields."""
    (folder / "model").mkdir()
    uri = storage.uri_of(folder / "published")
    storage.publish(folder / "model", uri, kind="model", fields=fields)
    return uri


@pytest.mark.parametrize("wrong", [{"name": "other"}, {"key": "scores"}])
def test_a_champion_with_a_wrong_signature_is_named(run, champion, tmp_path, wrong):
    copy = served(champion, tmp_path, **wrong)
    with pytest.raises(UserError) as error:
        measured(run, copy, tmp_path)
    assert str(error.value).startswith(f"the champion {copy} cannot be evaluated: ")
    assert "\n" not in str(error.value)


def test_a_champion_without_finite_answers_is_not_compared(run, champion, tmp_path):
    copy = served(champion, tmp_path, value=float("nan"))
    _, text, decision = measured(run, copy, tmp_path)
    assert text["champion"]["incomparable"] == "it returns non-finite numbers for 97 of 97 examples"
    assert not decision.blessed


def served(champion, folder, *, name="serving_default", key="logits", value=0.0):
    """Publish the champion with a SavedModel that returns the same value for every example."""

    class Constant(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 1), tf.uint8, name="image")])
        def answer(self, image):
            return {key: tf.fill([tf.shape(image)[0], 10], value)}

    own = Constant()
    return changed(
        champion,
        folder,
        lambda at, place: tf.saved_model.save(own, str(at / place), signatures={name: own.answer}),
    )


RULE = ChampionRule()


def found(task, labels, own, other, **more):
    own, other = (InParts(labels, each, more.get("weights")) for each in (own, other))
    opponents = Opponents(objective=Objective(task), own=own, other=other)
    return compare_classes(opponents, more.get("rule", RULE))


def logits(predicted, count):
    return np.eye(count, dtype="float32")[predicted] * 5


def classified(labels, own, other, count, **more):
    task = Classification(target(labels, num_classes=count))
    return found(task, labels, logits(own, count), logits(other, count), **more)


def rows(result):
    return {row["label"]: row for row in result["classes"]}


def some(generator, labels, wrong, count):
    """Return the labels as predictions, with a share of them replaced by wrong classes."""
    other = (labels + generator.integers(1, count, len(labels))) % count
    return np.where(generator.random(len(labels)) < wrong, other, labels)


LABELS = np.repeat([0, 1, 2], [400, 150, 50])


def test_equal_models_lose_nothing():
    generator = np.random.default_rng(0)
    own, other = (some(generator, LABELS, 0.1, 3) for _ in range(2))
    result = classified(LABELS, own, other, 3)
    assert result["class_counts"] == {"judged": 3, "not_judged": 0, "lost": 0}
    row = rows(result)["2"]
    assert row["examples"] == 50
    assert row["own"] == (own == 2)[LABELS == 2].mean()
    assert row["champion"] == (other == 2)[LABELS == 2].mean()
    assert row["margin"] == pytest.approx(row["champion"] / 2)
    assert -row["margin"] < row["bound"] < row["own"] - row["champion"]


def test_a_class_that_is_not_found_any_more_is_lost_whatever_the_others_gain():
    other = some(np.random.default_rng(0), LABELS, 0.1, 3)
    own = np.where(LABELS == 2, 1, LABELS)
    result = classified(LABELS, own, other, 3)
    assert result["class_counts"]["lost"] == 1
    assert (result["classes"][0]["label"], result["classes"][0]["lost"]) == ("2", True)


def test_a_class_that_the_champion_does_not_find_cannot_be_lost():
    generator = np.random.default_rng(0)
    other = np.where(LABELS == 2, generator.integers(0, 3, 600), LABELS)
    other[:200] = 2
    result = classified(LABELS, np.zeros(600, int), other, 3)
    assert "2" not in rows(result)
    assert rows(result)["1"]["lost"]


def test_nothing_is_lost_by_a_champion_that_is_constant():
    result = classified(LABELS, np.ones(600, int), np.zeros(600, int), 3)
    assert result == {"classes": [], "class_counts": {"judged": 0, "not_judged": 0, "lost": 0}}


def test_too_few_examples_judge_nothing_unless_the_loss_is_proved():
    labels = np.repeat([0, 1, 2], [400, 3, 12])
    own = np.where(labels > 0, 0, labels)
    other = np.where(np.arange(415) == 414, 0, labels)
    result = classified(labels, own, other, 3)
    assert not rows(result)["1"]["judged"]
    assert not rows(result)["1"]["lost"], "three lost of three may be chance"
    assert rows(result)["2"]["lost"]


def test_a_margin_is_a_number_or_a_share_and_one_of_all_loses_nothing():
    fifth = np.where(np.arange(600) % 5 == 0, (LABELS + 1) % 3, LABELS)
    for own, margin, lost in ((0 * LABELS, "100%", 0), (fifth, 0.1, 3), (fifth, 0.45, 0)):
        found = classified(LABELS, own, LABELS, 3, rule=ChampionRule(class_margin=margin))
        assert found["class_counts"]["lost"] == lost


def test_equal_weights_are_none_and_one_heavy_example_is_one():
    generator = np.random.default_rng(0)
    own, other = (some(generator, LABELS, 0.3, 3) for _ in range(2))
    plain = classified(LABELS, own, other, 3)
    same = classified(LABELS, own, other, 3, weights=np.full(600, 0.2, "float32"))
    for a, b in zip(plain["classes"], same["classes"], strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    heavy = np.where(np.arange(600) == 599, 1e6, 1).astype("float32")
    assert not rows(classified(LABELS, LABELS, LABELS, 3, weights=heavy))["2"]["judged"]


def test_both_classes_of_two_are_kept():
    labels = (np.arange(2000) % 50 == 0).astype("int64")
    other = np.where(labels[:, None] == 1, 3, -3).astype("float32")
    none = np.full((2000, 1), -3, "float32")
    task = BinaryClassification(target(labels, num_classes=2, labels=("stays", "leaves")))
    result = found(task, labels, none, other)
    assert result["classes"][0]["label"] == "leaves"
    assert result["class_counts"]["lost"] == 1


def test_each_label_of_several_is_kept():
    generator = np.random.default_rng(0)
    labels = (generator.random((600, 3)) < 0.2).astype("int64")
    other = np.where(labels == 1, 3, -3).astype("float32")
    own = other.copy()
    own[:, 1] = -3
    result = found(MultilabelClassification(target(labels)), labels, own, other)
    assert [row["label"] for row in result["classes"] if row["lost"]] == ["1"]


def test_places_of_one_example_count_as_one():
    labels = np.repeat([[0, 0, 1, 1, -1]], 40, axis=0)
    task = SequenceLabelling(target(np.maximum(labels, 0), num_classes=2))
    right, wrong = (logits(np.maximum(each, 0), 2) for each in (labels, 0 * labels))
    result = found(task, labels, wrong, right)
    assert rows(result)["1"]["examples"] == 80
    assert rows(result)["1"]["lost"]
    few = found(task, labels[:3], wrong[:3], right[:3])
    assert not rows(few)["1"]["judged"], "six places of three examples"


def test_classes_of_several_outputs_have_their_names_before_them():
    labels = {"kind": LABELS, "size": np.arange(600).astype("float32")}
    task = MultiOutput(
        {
            "kind": Classification(target(LABELS, num_classes=3)),
            "size": Regression(target(labels["size"])),
        },
        {"kind": 1.0, "size": 1.0},
    )
    size = labels["size"][:, None]
    right, wrong = (
        {"kind": logits(each, 3), "size": size}
        for each in (LABELS, np.where(LABELS == 1, 0, LABELS))
    )
    assert [r["label"] for r in found(task, labels, wrong, right)["classes"] if r["lost"]] == [
        "kind=1"
    ]


def test_a_task_without_classes_says_nothing_of_them():
    values = np.arange(30).astype("float32")
    assert found(Regression(target(values)), values, values[:, None], values[:, None]) == {}


def test_of_thousands_of_classes_few_are_listed_and_all_are_counted():
    count = 10_000
    labels = np.repeat(np.arange(count), 12)
    recalls = Recalls(
        **{name: np.full(count, 12.0) for name in ("examples", "worth")},
        own=np.zeros(count), champion=np.ones(count), alone=np.zeros(count),
        lost=np.full(count, 12.0) * (np.arange(count) % 2), chance=np.full(count, 1e-4),
    )  # fmt: skip
    result = _judge([str(each) for each in labels[::12]], recalls, RULE)
    assert len(result["classes"]) == MOST_ROWS
    assert sum(result["class_counts"][name] for name in ("judged", "not_judged")) == count


def test_a_class_that_lost_the_margin_is_seldom_kept_and_an_equal_one_seldom_lost():
    generator, nights, worth, recall = np.random.default_rng(0), 4000, 60, 0.95
    # The models share half of their random draws, so their predictions are correlated.
    first, second = generator.random((2, nights, worth))
    second = np.where(generator.random((nights, worth)) < 0.5, second, first)
    other = first < recall
    kept = []
    for own in (second < recall / 2, second < recall):
        sums = [each.sum(axis=1).astype(float) for each in (own, other, own & ~other, other & ~own)]
        same = np.full(nights, float(worth))
        each = Recalls(same, same, sums[0] / worth, sums[1] / worth, *sums[2:], same / 1200)
        kept.append(1 - verdicts(each, RULE, 2).lost.mean())
    assert kept[0] <= 0.015
    assert kept[1] >= 0.9
