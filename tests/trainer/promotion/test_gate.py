import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.evaluation.comparison import Pairs, compare_shares
from flotilla.trainer.promotion import gate
from flotilla.trainer.promotion.gate import Rule
from flotilla.trainer.runtime.errors import ConfigError, UserError

MEASURED = {"loss": 0.21, "accuracy": 0.953125, "macro_precision": 0.95, "macro_f1": 0.9}


def config_of(lowest, highest=None):
    return parse_config({"gate": {"min": lowest, "max": highest or {}}})


def evaluated(folder, metrics, kind="evaluation", **more):
    # A test may publish several evaluations.
    number = len([*folder.iterdir()])
    source = folder / f"measured-{number}"
    source.mkdir()
    tree = {"split": "test", "examples": 360, "metrics": metrics, "global_step": 1500, **more}
    (source / "metrics.json").write_text(json.dumps(tree))
    uri = storage.uri_of(folder / f"the evaluation {number}")
    storage.publish(source, uri, kind=kind)
    return uri


def decided(uri):
    """Read a decision and check that it is strict JSON."""

    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    tree = json.loads(storage.read_file(uri, "decision.json"), parse_constant=refuse)
    assert isinstance(tree, dict)
    return tree


def test_a_good_model_is_blessed(tmp_path):
    evaluation, output = evaluated(tmp_path, MEASURED), storage.uri_of(tmp_path / "ö d")
    config = config_of({"accuracy": 0.95}, {"loss": 0.5})
    decision = gate.check(config, evaluation, output)
    assert decision.blessed
    assert decision.uri == output
    assert [(r.metric, r.bound, r.passed) for r in decision.rules] == [
        ("accuracy", "min", True),
        ("loss", "max", True),
    ]
    assert decided(output) == {
        "decision": "blessed",
        "headline": "digits: accuracy 0.9531; blessed",
        "reasons": [
            "Accuracy is 0.9531; it must be at least 0.95 (gate.min).",
            "Loss is 0.21; it must be at most 0.5 (gate.max).",
        ],
        "notes": [],
        "measured": {"metric": "accuracy", "value": 0.953125, "interval": None, "better": "higher",
                     "champion": None, "constant": None, "positive": []},
        "rules": [
            {"metric": "accuracy", "key": "gate.min", "bound": "min", "threshold": 0.95,
             "value": 0.953125, "passed": True, "note": "", "found": {}},
            {"metric": "loss", "key": "gate.max", "bound": "max", "threshold": 0.5, "value": 0.21,
             "passed": True, "note": "", "found": {}},
        ],
        "champion": "",
        "evaluation": evaluation,
        "global_step": 1500,
    }  # fmt: skip
    manifest = storage.verify(output)
    assert manifest.kind == "decision"
    assert manifest.fields == {
        "decision": "blessed", "gained": False, "champion": "", "evaluation": evaluation,
        "global_step": 1500,
    }  # fmt: skip


def test_a_refusal_says_why_and_only_why(tmp_path):
    output = storage.uri_of(tmp_path / "d")
    config = config_of({"accuracy": 0.999, "macro_precision": 0.9}, {"loss": 0.1})
    decision = gate.check(config, evaluated(tmp_path, MEASURED), output)
    assert not decision.blessed
    expected = (
        "Accuracy is 0.9531; it must be at least 0.999 (gate.min).",
        "Loss is 0.21; it must be at most 0.1 (gate.max).",
    )
    assert decision.reasons == expected
    tree = decided(output)
    assert tree["decision"] == "refused"
    assert tuple(tree["reasons"]) == expected
    assert [rule["passed"] for rule in tree["rules"]] == [False, True, False]
    assert storage.read_manifest(output).fields["decision"] == "refused"


@pytest.mark.parametrize(
    ("metrics", "lowest", "highest", "blessed", "reason"),
    [
        ({"accuracy": 0.95, "loss": 0.5}, {"accuracy": 0.95}, {"loss": 0.5}, True, ""),
        ({"accuracy": 1, "loss": 0}, {"accuracy": 1}, {}, True, ""),
        # The printed value differs from the threshold.
        ({"accuracy": math.nextafter(0.95, 0)}, {"accuracy": 0.95}, {}, False,
         "Accuracy is 0.94999999999999"),
        ({"loss": 0.3}, {"loss": 0.2}, {"loss": 0.4}, True, ""),
        ({"loss": 0.3}, {"loss": 0.35}, {"loss": 0.4}, False, "Loss is 0.3"),
        ({"loss": 0.3}, {"loss": 0.2}, {"loss": 0.25}, False, "Loss is 0.3"),
    ],
)  # fmt: skip
def test_a_threshold_may_be_met_exactly(tmp_path, metrics, lowest, highest, blessed, reason):  # noqa: PLR0913, PLR0917
    evaluation = evaluated(tmp_path, metrics)
    decision = gate.check(config_of(lowest, highest), evaluation, storage.uri_of(tmp_path / "d"))
    assert decision.blessed is blessed
    assert len(decision.rules) == len(lowest) + len(highest)
    assert decision.reasons[0].startswith(reason)


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
@pytest.mark.parametrize("bound", ["min", "max"])
def test_what_is_not_a_number_never_passes(tmp_path, value, bound):
    output = storage.uri_of(tmp_path / "d")
    config = parse_config({"gate": {"min": {}, "max": {}} | {bound: {"loss": 0.5}}})
    decision = gate.check(config, evaluated(tmp_path, {"loss": value}), output)
    assert not decision.blessed
    [reason] = decision.reasons
    side = "least" if bound == "min" else "most"
    assert reason == (f"Loss is not a finite number; it must be at {side} 0.5 (gate.{bound}).")
    [rule] = decided(output)["rules"]
    assert rule["value"] is None
    assert rule["passed"] is False


def test_without_rules_all_pass_and_the_decision_says_so(tmp_path):
    output = storage.uri_of(tmp_path / "d")
    evaluation = evaluated(tmp_path, MEASURED, global_step=None)
    assert gate.check(config_of({}), evaluation, output).blessed
    tree = decided(output)
    assert (tree["reasons"], tree["global_step"]) == ([], None)
    assert tree["headline"] == "digits: accuracy 0.9531; blessed, no bound set"
    [note] = tree["notes"]
    assert "gate.min.accuracy=0.85" in note


@pytest.mark.parametrize(
    ("metrics", "kind", "message"),
    [
        (MEASURED, "evaluation",
         "gate.min.macro_recall: 'macro_recall' was not measured; did you mean 'macro_precision'? "
         "(measured: accuracy, loss, macro_f1, macro_precision)"),
        ({}, "evaluation", "was not measured (measured: nothing)"),
        *(({"macro_recall": value}, "evaluation", "which cannot be compared with a threshold")
          for value in ("0.9", True, [0.9])),
        (MEASURED, "dataset", "is of kind 'dataset'; pass the URI of an evaluation"),
        (None, "evaluation", "metrics.json contains no metrics"),
        ([], "evaluation", "metrics.json contains no metrics"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_named(tmp_path, metrics, kind, message):
    output, evaluation = storage.uri_of(tmp_path / "d"), evaluated(tmp_path, metrics, kind)
    with pytest.raises(UserError) as error:
        gate.check(config_of({"macro_recall": 0.9}), evaluation, output)
    assert message in str(error.value)
    assert not storage.is_published(output)


def test_the_same_again_is_a_no_op_and_another_decision_does_not_replace_it(tmp_path):
    evaluation, output = evaluated(tmp_path, MEASURED), storage.uri_of(tmp_path / "d")
    first = gate.check(config_of({"accuracy": 0.95}), evaluation, output)
    stamp = storage.read_manifest(output).created
    assert gate.check(config_of({"accuracy": 0.95}), evaluation, output) == first
    assert storage.read_manifest(output).created == stamp
    with pytest.raises(storage.Conflict):
        gate.check(config_of({"accuracy": 0.99}), evaluation, output)
    assert decided(output)["decision"] == "blessed"


def test_an_absent_or_damaged_evaluation_is_not_believed(tmp_path):
    with pytest.raises(storage.NotPublished):
        gate.check(Config(), storage.uri_of(tmp_path / "nowhere"), "file:///x")
    uri = evaluated(tmp_path, {"accuracy": 0.11})
    path = storage.local_path(uri) / "metrics.json"
    path.write_text(path.read_text().replace("0.11", "0.99"))
    with pytest.raises(storage.Corrupt, match=r"metrics\.json has crc32c"):
        gate.check(Config(), uri, storage.uri_of(tmp_path / "d"))
    assert not (tmp_path / "d").exists()


_numbers = st.floats(allow_nan=True, allow_infinity=True)


@settings(deadline=None)
@given(st.sampled_from(["min", "max"]), _numbers, st.floats(-1e300, 1e300))
def test_a_rule_passes_on_the_right_side_only(bound, value, threshold):
    rule = Rule(metric="m", bound=bound, threshold=threshold, value=value, key="gate.x")
    right = value >= threshold if bound == "min" else value <= threshold
    assert rule.passed == (math.isfinite(value) and right)
    line = str(rule)
    assert line.startswith("M is ")
    assert "\n" not in line


SLICES = {
    "label": [
        {"value": "0", "metrics": {"accuracy": 0.99, "loss": 0.1}},
        {"value": "a=b", "metrics": {"accuracy": 0.4, "loss": 2.0}},
    ]
}


CHAMPION = "file:///registry/digits/3"


def check(folder, policy, **measured):
    evaluation = evaluated(folder, MEASURED, slices=SLICES, **measured)
    config = parse_config({"gate": {"min": {}, **policy}})
    return gate.check(config, evaluation, f"{evaluation}-decision")


def champion(only_challenger, only_champion, both=900):
    """Return a comparison from the numbers of examples that only one of two models got right."""
    pairs = Pairs(both, only_challenger, only_champion, 0)
    count, found = sum(pairs), compare_shares(pairs, 0.95)
    return {
        "uri": CHAMPION,
        "incomparable": "",
        "metrics": {"accuracy": MEASURED["accuracy"] - found.difference},
        "paired": {
            "metric": "accuracy", "better": "higher", "confidence": 0.95, "examples": count,
            "difference": found.difference, "bound": found.bound, "method": found.method,
        },
    }  # fmt: skip


def test_parts_of_a_slice_have_rules(tmp_path):
    lowest = {"accuracy@label=0": 0.9, "accuracy@label=a=b": 0.3}
    policy = {"min": lowest, "max": {"loss@label": 1.0}}
    decision = check(tmp_path, policy)
    assert not decision.blessed
    assert [(rule.metric, rule.passed) for rule in decision.rules] == [
        ("accuracy@label=0", True), ("accuracy@label=a=b", True),
        ("loss@label=0", True), ("loss@label=a=b", False),
    ]  # fmt: skip
    assert decision.reasons == ("Loss where label is a=b is 2; it must be at most 1 (gate.max).",)
    assert str(decision.rules[0]) == (
        "Accuracy where label is 0 is 0.99; it must be at least 0.9 (gate.min)."
    )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("accuracy@labl", "gate.min.accuracy@labl: there is no slice by 'labl'; did you mean"),
        ("accuracy@x=1", "gate.min.accuracy@x=1: there is no slice by 'x' (sliced by: label)"),
        (
            "accuracy@label=9",
            "gate.min.accuracy@label=9: no example has label '9' (values: 0, a",
        ),
        ("macro_f1@label=0", "gate.min.macro_f1@label=0: 'macro_f1' was not measured"),
    ],
)
def test_a_part_that_is_not_there_is_named(tmp_path, rule, message):
    with pytest.raises(UserError) as error:
        check(tmp_path, {"min": {rule: 0.5}})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"min": {"@label": 0.5}}, "'@label' does not begin with a metric; write accuracy or"),
        ({"min": {"accuracy@=3": 0.5}}, "'accuracy@=3' has no slice"),
        *(
            ({"champion": {"margin": each}}, "gate.champion.margin: ")
            for each in ("%", None, "nan")
        ),
        ({"significance": 0.05}, "gate: significance: the gate now compares with a margin; write "),
    ],
)
def test_a_wrong_rule_is_refused_by_the_configuration(rules, message):
    with pytest.raises(ConfigError) as error:
        parse_config({"gate": rules})
    assert message in str(error.value)


def over_constant(bound, better="higher"):
    """Return the comparison with a constant predictor whose accuracy is 0.9."""
    paired = {
        "metric": "accuracy", "better": better, "confidence": 0.995, "examples": 360,
        "difference": 0.05, "bound": bound, "method": "by hand", "constant": 0.9,
    }  # fmt: skip
    return {"answer": "always 'a'", "metrics": {"accuracy": 0.9}, "paired": paired}


@pytest.mark.parametrize(
    ("bound", "better", "blessed"),
    [
        (0.01, "higher", True),
        (-0.01, "higher", False),
        (0.0, "higher", False),  # equal to a constant
        (-0.01, "lower", True),
        (0.01, "lower", False),
        (0.0, "lower", False),
        (None, "higher", False),  # undefined for these examples
    ],
)
def test_a_model_has_to_beat_a_constant_for_sure(tmp_path, bound, better, blessed):
    decision = check(tmp_path, {}, constant=over_constant(bound, better))
    assert decision.blessed is blessed
    [rule] = decision.rules
    assert (rule.key, rule.metric, rule.threshold) == ("gate.constant", "accuracy_over_constant", 0)


def test_a_constant_that_is_not_beaten_is_named_and_so_are_the_examples_that_it_takes(tmp_path):
    decision = check(tmp_path, {"min": {"accuracy": 0.5}}, constant=over_constant(-0.01))
    [reason] = decision.reasons
    assert "0.9000 for a constant (always 'a')" in reason
    assert "must be higher (gate.constant)" in reason
    assert reason.endswith("360 test examples are too few to be sure; about 1,200 would be enough.")


def test_a_constant_that_is_reported_only_refuses_nothing_and_is_a_note(tmp_path):
    decision = check(tmp_path, {"constant": "reported"}, constant=over_constant(-0.01))
    assert decision.blessed
    assert not decision.rules
    assert any("does not beat a constant" in note for note in decision.notes)


@pytest.mark.parametrize("found", [{}, {"constant": {"answer": "", "metrics": {}, "paired": None}}])
def test_without_a_constant_or_a_champion_there_is_no_rule_about_them(tmp_path, found):
    decision = check(tmp_path, {"champion": {"margin": -0.5}}, **found)
    assert decision.blessed
    assert not decision.rules


def test_an_equal_model_is_not_worse(tmp_path):
    constant = {"answer": "always 'a'", "metrics": {"accuracy": 0.653125}, "paired": None}
    decision = check(tmp_path, {}, champion=champion(0, 0), constant=constant)
    assert decision.blessed
    [rule] = decided(decision.uri)["rules"]
    assert (rule["metric"], rule["bound"]) == ("accuracy_difference", "min")
    assert rule["threshold"] == pytest.approx(-0.05 * 0.3), "5% of what the champion gains"
    assert -0.01 < rule["value"] < 0
    assert decided(decision.uri)["champion"] == CHAMPION
    assert storage.read_manifest(decision.uri).fields["champion"] == CHAMPION


@pytest.mark.parametrize(
    ("gained", "lost", "margin", "blessed", "proved"),
    [
        (10, 12, 0.02, True, False),
        (10, 12, 0.01, False, False),  # it may have lost more than 1 in 100
        (0, 0, 0.0, False, False),  # without a margin, only a gain passes
        (12, 10, 0.0, False, False),  # better only by chance
        (40, 10, -0.015, True, True),
        (40, 10, -0.025, False, False),  # really better, but not by 0.025
        (40, 10, 0.01, True, True),
        (40, 10, 0.03, True, False),  # the gain may be smaller than the margin
        (10, 10, 0.0, False, False),
    ],
)
def test_a_loss_beyond_the_margin_has_to_be_ruled_out_and_a_gain_proved(  # noqa: PLR0913, PLR0917
    tmp_path, gained, lost, margin, blessed, proved
):
    decision = check(tmp_path, {"champion": {"margin": margin}}, champion=champion(gained, lost))
    assert (decision.blessed, decision.gained) == (blessed, proved)
    assert storage.read_manifest(decision.uri).fields["gained"] is proved


def test_seven_of_360_examples_are_a_loss_that_the_default_does_not_pass(tmp_path):
    """An accuracy of 0.9694 against 0.9889 may be a loss, although the loss is not significant."""
    policy = parse_config({}).gate.model_dump()
    [reason] = check(tmp_path, policy, champion=champion(1, 8, both=351)).reasons
    assert "it may be up to 0.03" in reason
    for allowed, blessed in ((0.03, False), (0.04, True)):
        policy = {"champion": {"margin": allowed}}
        assert check(tmp_path, policy, champion=champion(1, 8, both=351)).blessed is blessed


def test_a_refusal_names_both_metrics_and_how_many_examples_it_takes(tmp_path):
    few = champion(4, 4, both=92)
    [reason] = check(tmp_path, {"champion": {"margin": 0.02}}, champion=few).reasons
    assert reason.startswith("Accuracy is 0.9531, and 0.9531 for the champion")
    assert " lower, but only 0.020 is allowed (gate.champion.margin). " in reason
    assert reason.endswith("100 test examples are too few to be sure; about 2,200 would be enough.")
    [reason] = check(tmp_path, {"champion": {"margin": 0.02}}, champion=champion(0, 40)).reasons
    assert "too few" not in reason, "it is worse, whatever the number of examples"


def test_of_a_metric_of_which_less_is_better_the_bound_is_above(tmp_path):
    paired = {
        "metric": "loss", "better": "lower", "confidence": 0.9, "examples": 50,
        "difference": 0.01, "bound": 0.03, "method": "by hand",
    }  # fmt: skip
    other = {"uri": CHAMPION, "incomparable": "", "metrics": {"loss": 0.2}, "paired": paired}
    constant = {"answer": "always 3", "metrics": {"loss": 0.4}, "paired": None}
    policy = {"champion": {"margin": "20%"}}
    [rule] = check(tmp_path, policy, champion=other, constant=constant).rules
    assert (rule.bound, rule.value, rule.passed) == ("max", 0.03, True)
    assert rule.threshold == pytest.approx(0.04)
    unknown = {**other, "paired": {**paired, "bound": None}}
    decision = check(tmp_path, {}, champion=unknown)
    assert "it cannot be compared with the champion" in decision.reasons[0]


@pytest.mark.parametrize(
    ("constant", "words"),
    [
        (
            {"metrics": {"accuracy": None}},
            "The accuracy of a constant prediction is unknown, so the margin of 5%",
        ),
        ({"metrics": {"accuracy": 0.96}}, "The champion does not beat a constant, so the"),
    ],
)
def test_a_share_of_no_gain_is_nothing(tmp_path, constant, words):
    decision = check(tmp_path, {}, champion=champion(0, 0), constant=constant)
    assert not decision.blessed
    assert decision.rules[0].threshold == 0
    assert words in decision.reasons[0]


def lost(count):
    """Return the evaluation of ten classes, of which `count` are lost."""
    rows = [
        {"label": f"c{n}", "examples": 40, "own": 0.1 if n < count else 0.9, "champion": 0.9,
         "margin": 0.45, "bound": -0.9 if n < count else -0.1, "judged": n < 9, "lost": n < count}
        for n in range(10)
    ]  # fmt: skip
    return {"classes": rows, "class_counts": {"judged": 9, "not_judged": 1, "lost": count}}


@pytest.mark.parametrize(
    ("count", "words"), [(1, ""), (3, "0.9), c2 (0.1, champion 0.9)"), (8, "champion 0.9), 4 more")]
)
def test_one_rule_names_the_classes_that_are_lost(tmp_path, count, words):
    decision = check(
        tmp_path, {"champion": {"margin": 0.1}}, champion={**champion(0, 0), **lost(count)}
    )
    assert not decision.blessed
    rule = decision.rules[1]
    assert (rule.key, rule.metric) == ("gate.champion.class_margin", "recall_difference@label=c0")
    assert (rule.value, rule.threshold, rule.passed) == (-0.9, -0.45, False)
    assert rule.note.endswith(words)
    assert bool(rule.note) is (count > 1)
    [reason] = decision.reasons
    assert "c0" in reason
    assert "0.9" in reason


def test_without_a_lost_class_the_rule_is_of_the_weakest_one(tmp_path):
    policy = {"champion": {"margin": 0.1}}
    decision = check(tmp_path, policy, champion={**champion(0, 0), **lost(0)})
    assert decision.blessed
    assert [rule.key for rule in decision.rules][1:] == ["gate.champion.class_margin"]
    none = {"classes": lost(0)["classes"][9:], "class_counts": {}}
    assert len(check(tmp_path, policy, champion={**champion(0, 0), **none}).rules) == 1


def test_a_champion_that_cannot_be_asked_refuses(tmp_path):
    other = {"uri": CHAMPION, "incomparable": "it knows 9 classes, but this model 10"}
    decision = check(tmp_path, {}, champion=other)
    assert not decision.blessed
    [reason] = decision.reasons
    assert "it knows 9 classes, but this model 10; give this model another name" in reason
