"""Tests the checks of an exported model before its promotion."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.promotion import registration, registry
from flotilla.trainer.promotion.gate import Decision, Rule
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.promotion.test_registry import race

INPUTS = [{"feature": "image", "name": "image", "shape": [8, 8, 1], "dtype": "uint8"}]
PARITY = {
    "formats": {
        "keras": {"max_difference": 1e-7, "tolerance": 1e-5},
        "tflite_int8": {
            "max_difference": 0.4, "tolerance": 0.01, "metric": "accuracy", "value": 0.96,
            "original": 0.965, "lost": 0.005, "examples": 1000,
        },
    },
    "smoke": {"max_difference": 0.0, "milliseconds": 2.5},
}  # fmt: skip
LOSSY = {"tflite_int8": {**PARITY["formats"]["tflite_int8"], "lost": 0.065}}


class Run:
    def __init__(self, folder):
        self.folder = folder
        self.root = storage.uri_of(folder / "root")
        (folder / "scratch").mkdir()
        self.worse, self.gain = False, 0.0
        self.compared: list[str] = []

    def compare(self, champion):
        """Compare the model with another champion, as the gate does."""
        self.compared.append(champion.uri)
        rule = Rule(
            metric="accuracy_difference", bound="min", threshold=-0.02, key="gate.champion.margin",
            value=-0.5 if self.worse else self.gain, found={"metric": "accuracy", "own": 0.9},
        )  # fmt: skip
        uri = f"file:///decision/{champion.number}"
        # This rule does not depend on the champion, and the gate has already checked it.
        constant = replace(rule, metric="accuracy_over_constant", key="gate.constant", value=-1.0)
        return Decision(uri=uri, blessed=rule.passed, rules=(rule, constant))

    def exported(self, number, champion="", **changed):
        """Publish a decision and the model that it blessed."""
        empty = self.folder / f"empty-{number}"
        empty.mkdir()
        decision = storage.uri_of(self.folder / f"decision-{number}")
        storage.publish(empty, decision, kind="decision", fields={"champion": champion})
        source = self.folder / f"source-{number}"
        (source / "serving" / "digits" / "7").mkdir(parents=True)
        (source / "serving" / "digits" / "7" / "saved_model.pb").write_bytes(bytes(2 << 20))
        labels = changed.get("labels", list("0123456789"))
        if labels:
            (source / "labels.txt").write_text("\n".join(labels))
        (source / "parity.json").write_text(json.dumps(changed.get("parity", PARITY)))
        fields = {
            "saved_model": "serving/digits/7", "decision": decision, "global_step": number,
            "num_labels": changed.get("num_labels", 10), "inputs": changed.get("inputs", INPUTS),
            "task": changed.get("task", "classification"),
            **{key: changed[key] for key in ("positive", "kinds") if key in changed},
        }  # fmt: skip
        uri = storage.uri_of(self.folder / f"model-{number}")
        storage.publish(source, uri, kind="model", fields=fields)
        return uri

    def register(self, model, **limits):
        request = registration.Request(
            config=parse_config({"registry": limits}),
            root=self.root,
            model=model,
            output=f"{model}-registration-{len(limits)}",
            lineage={"run_id": "r"},
            by=f"run of {model}",
            compare=self.compare,
        )
        return registration.register(request, self.folder / "scratch")

    def champion(self):
        return registry.champion(self.root, "digits")


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def refused(made):
    assert not made.promoted
    assert (made.version, made.promotion) == (0, 0)
    [reason] = made.reasons
    return reason


def test_the_first_model_becomes_champion(run):
    made = run.register(run.exported(1))
    assert (made.promoted, made.version, made.promotion, made.reasons) == (True, 1, 1, ())
    assert run.champion().number == 1
    tree = json.loads(storage.read_file(made.uri, "registration.json"))
    assert (tree["decision"], tree["predecessor"]) == ("promoted", "")
    assert all(rule["passed"] for rule in tree["rules"])
    assert [rule["metric"] for rule in tree["rules"]] == [
        "difference of keras", "difference of tflite_int8", "labelled",
    ]  # fmt: skip


def test_the_next_one_names_the_one_before(run):
    run.register(run.exported(1))
    before = run.champion()
    made = run.register(run.exported(2, champion=before.uri))
    assert (made.version, made.promotion) == (2, 2)
    tree = json.loads(storage.read_file(made.uri, "registration.json"))
    assert tree["predecessor"] == before.uri


def after(run, number, **changed):
    """Register a model that the gate compared with the current champion."""
    return run.register(run.exported(number, champion=run.champion().uri, **changed))


def rules_of(made):
    found = storage.read_json(made.uri, "registration.json")["rules"]
    return [rule for rule in found if "_difference" in rule["metric"]]


def test_small_losses_do_not_add_up_over_many_promotions(run):
    run.register(run.exported(1))
    first = run.champion()
    assert not rules_of(after(run, 2)), "the gate has compared them"
    made = after(run, 3)
    assert run.compared == [first.uri], "of which the one before was not better for sure"
    [rule] = rules_of(made)
    assert rule["found"] == {"metric": "accuracy", "own": 0.9, "opponent": "version 1"}
    assert rule["note"] == "no gain has been proved since version 1"
    run.worse = True
    champion = run.champion()
    assert champion.number == 3
    reason = refused(run.register(run.exported(4, champion=champion.uri)))
    assert reason.startswith("Accuracy may be up to 0.50 lower than for version 1, but only")


def test_a_gain_beyond_the_margin_begins_anew(run):
    run.register(run.exported(1))
    after(run, 2)
    run.gain = 0.02
    after(run, 3)
    run.compared.clear()
    assert not rules_of(after(run, 4))
    assert not run.compared, "the third is the one to lose against, and it is the champion"
    run.gain = 0.0
    [rule] = rules_of(after(run, 5))
    assert rule["found"]["opponent"] == "version 3"


def test_a_reference_that_is_gone_is_not_compared_with(run):
    run.register(run.exported(1))
    first = run.champion()
    after(run, 2)
    storage.delete(first.uri)
    assert after(run, 3).promoted
    assert not run.compared


def test_the_same_again_is_a_no_op(run):
    model = run.exported(1)
    assert run.register(model) == run.register(model)
    assert registry.newest(run.root, "digits") == 1


def test_a_step_that_died_after_the_promotion_ends_as_it_would_have(run):
    model = run.exported(1)
    made = run.register(model)
    storage.delete(made.uri)
    again = run.register(model)
    assert again == made
    assert registry.newest(run.root, "digits") == 1


@pytest.mark.parametrize("worse", [False, True])
def test_a_champion_that_changed_meanwhile_is_compared_with(run, worse):
    first, second = run.exported(1), run.exported(2)
    run.register(first)
    newest = run.champion()
    run.worse = worse
    made = run.register(second)
    assert run.compared == [newest.uri]
    assert made.promoted is not worse
    tree = json.loads(storage.read_file(made.uri, "registration.json"))
    assert tree["predecessor"] == newest.uri
    assert tree["lineage"]["decision"] == f"file:///decision/{newest.number}"
    assert tree["rules"][-1]["metric"] == "accuracy_difference"
    assert run.champion().number == (1 if worse else 2)
    if worse:
        assert made.reasons[0].startswith("Accuracy may be up to 0.50 lower than for the cham")
        assert len(registry.versions(run.root, "digits")) == 1, "what is refused is not registered"


@pytest.mark.parametrize("worse", [False, True])
def test_a_race_that_is_lost_at_the_last_moment_is_judged_by_the_winner(run, monkeypatch, worse):
    genuine = registry.register

    def overtaken(root, name, model, **rest):
        monkeypatch.setattr(registry, "register", genuine)
        assert run.register(other).promoted
        run.worse = worse
        return genuine(root, name, model, **rest)

    mine, other = run.exported(1), run.exported(2)
    monkeypatch.setattr(registry, "register", overtaken)
    made = run.register(mine)
    assert made.promoted is not worse
    champion = run.champion()
    assert champion.manifest.fields["source"]["uri"] == (other if worse else mine)
    assert len(run.compared) == 1


def test_of_several_that_register_at_once_all_but_the_first_are_compared(run):
    models = [run.exported(number) for number in (1, 2, 3)]
    made = sorted(race(run.register, models), key=lambda each: each.promotion)
    assert [each.promotion for each in made] == [1, 2, 3]
    for before, each in pairwise(made):
        judged = json.loads(storage.read_file(each.uri, "registration.json"))
        last = registry.version(run.root, "digits", before.version)
        assert judged["predecessor"] == last.uri
        assert judged["rules"][-1]["metric"] == "accuracy_difference"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"labels": None}, "labels.txt has 0 lines, but there are 10 labels"),
        (
            {"parity": {**PARITY, "formats": {"keras": {"max_difference": 1, "tolerance": 0.5}}}},
            "exported keras model and the checkpoint is 1; it must be at most 0.5",
        ),
        (
            {"parity": {**PARITY, "formats": LOSSY}},
            "exported tflite_int8 model and the checkpoint is 0.065",
        ),
    ],
)
def test_a_model_that_is_not_whole_is_refused(run, changed, words):
    assert words in refused(run.register(run.exported(1, **changed)))
    assert registry.names(run.root) == []


BINARY = {"task": "binary_classification", "num_labels": 2, "labels": ["no", "yes"]}
YES, NO = {**BINARY, "positive": "yes"}, {**BINARY, "labels": ["yes", "no"], "positive": "no"}
OTHER = "of {uri} is 'yes', but that of this model is 'no'; set task.positive: 'yes', or"
ONE = (
    "the task{of} has one output, but {{uri}} has one for each class; set {key}.name: "
    "classification, or give this model another name"
)
OF_A = {"task": "multi_output", "kinds": {"a": "binary_classification"}, "positive": {"a": "yes"}}
SINCE = "changed since {uri}; give this model"


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({}, {"inputs": []}, f"inputs {SINCE}"),
        ({}, {"num_labels": 9, "labels": list("012345678")}, f"num_labels {SINCE}"),
        ({}, {"labels": list("1023456789")}, f"labels ('0' is '1' now, '1' is '0' now) {SINCE}"),
        ({}, {"task": "ranking"}, f"task {SINCE}"),
        (YES, NO, OTHER),
        # Earlier versions always used the second class as the positive one.
        (BINARY, NO, OTHER),
        ({"num_labels": 2, "labels": ["no", "yes"]}, YES, ONE.format(of="", key="task")),
        (
            {"task": "multi_output", "kinds": {"a": "classification"}},
            OF_A,
            ONE.format(of=" of 'a'", key="task.outputs.a"),
        ),
    ],
)
def test_another_signature_or_meaning_of_the_probability_is_refused(run, before, now, words):
    run.register(run.exported(1, **before))
    reason = refused(after(run, 2, **now))
    assert words.format(uri=run.champion().uri) in reason


def test_the_same_positive_class_in_another_spelling_is_the_same(run):
    run.register(run.exported(1, **BINARY))
    assert registry.champion_positive(run.root, "digits") == {"": "yes"}
    found = after(run, 2, **BINARY, positive="Yes ")
    assert found.promoted, found.reasons


def test_limits(run):
    model = run.exported(1)
    assert "the model in megabytes is 2; it" in refused(run.register(model, max_megabytes=1.5))
    reasons = run.register(model, max_megabytes=9, max_milliseconds=2).reasons
    assert reasons == (
        "The time to predict one example in milliseconds is 2.5; it must be at most 2 "
        "(registry.max_milliseconds).",
    )
    assert run.register(model).promoted


def test_a_truncated_export_is_found(run):
    model = run.exported(1)
    folder = storage.local_path(model)
    path = next(folder.rglob("saved_model.pb"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(storage.Corrupt, match=r"saved_model\.pb has 2097151 bytes"):
        run.register(model)
    assert run.champion() is None


def test_something_else_at_its_place_is_named(run):
    model = run.exported(1)
    storage.publish(run.folder / "empty-1", f"{model}-registration-0", kind="other")
    with pytest.raises(UserError, match="is of kind 'other', not 'registration'"):
        run.register(model)


def test_a_champion_that_is_gone_is_named_with_the_remedy(run):
    run.register(run.exported(1))
    champion = run.champion()
    second = run.exported(2, champion=champion.uri)
    storage.delete(champion.uri)
    with pytest.raises(UserError) as error:
        run.register(second)
    assert str(error.value).startswith(
        "the champion no longer exists: digits has no version 1 below "
    )
    assert str(error.value).endswith("with `flotilla models promote`")


def test_a_try_that_died_before_its_promotion_was_published_is_taken_up(run, monkeypatch):
    model = run.exported(1)
    genuine = storage.publish

    def dying(folder, uri, **rest):
        if "/promotions/" in uri:
            raise KeyboardInterrupt
        return genuine(folder, uri, **rest)

    monkeypatch.setattr(storage, "publish", dying)
    with pytest.raises(KeyboardInterrupt):
        run.register(model)
    monkeypatch.undo()
    # The promotion was decided, so the next reader completes it.
    assert run.champion().number == 1
    made = run.register(model)
    assert (made.promoted, made.version, made.promotion) == (True, 1, 1)
    assert registry.newest(run.root, "digits") == 1
