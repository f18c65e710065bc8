"""Tests that the configuration selects failure or warning, and that the page escapes text."""

import json

import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.data import RULES
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data_gate import validate
from flotilla.trainer.data_gate.findings import Finding
from tests.trainer.data_gate.skews import SKEWS, table
from tests.trainer.data_gate.tables import profile, question, rules_of, split_of
from tests.trainer.page import Page


def clean(seed=0, size=1000):
    return split_of(table(np.random.default_rng(seed), size))


def test_every_rule_is_one_of_the_configuration():
    said = {rule for _, rules in SKEWS.values() for rule in rules}
    assert said <= set(RULES)
    # No skew triggers these two rules, which have their own tests.
    assert set(RULES) - said == {"schema", "new_class"}


def test_without_a_champion_a_dataset_is_compared_with_itself(tmp_path):
    assert rules_of(profile(clean())) == set()
    skew, _ = SKEWS["test rows in training"]
    assert rules_of(profile(skew(np.random.default_rng(1), clean()))) == {"leakage"}
    found = validate.opponent(storage.uri_of(tmp_path), "digits")
    assert (found.version, found.note) == (0, "digits has no champion yet")


def test_a_rule_that_is_off_finds_nothing():
    skew, _ = SKEWS["drift of a number"]
    skewed = profile(skew(np.random.default_rng(1), clean(2)))
    champion = profile(clean(3))
    assert "drift" in rules_of(skewed, champion)
    assert "drift" not in rules_of(skewed, champion, rules={"drift": "off"})
    assert rules_of(skewed, champion, rules={"all": "off"}) == set()
    assert "drift" not in rules_of(skewed, champion, limits={"drift": 0.9})
    config = Config.model_validate({"data": {"gate": {"rules": {"drift": False}}}})
    assert config.data.gate.action("drift") == "off"


def test_classes_are_compared_by_name():
    columns = clean()
    for part in columns.values():
        part["label"][:20] = 2
    new = profile(columns, classes=("no", "yes", "perhaps"))
    findings = validate.find_all(question(new, profile(clean(1))))
    assert "perhaps" in next(each.value for each in findings if each.rule == "new_class")
    new = profile(clean(), classes=("no", "Yes"))
    rules = {"new_class", "class_gone", "balance"}
    assert not rules & rules_of(new, profile(clean(1), classes=("No", "yes")))


def test_a_value_that_is_no_number_is_written_as_a_text():
    tree = Finding(rule="range", says="x", value=float("inf"), limit=1).to_json("warn")
    assert json.loads(json.dumps(tree, allow_nan=False))["value"] == "inf"


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        ({"rules": {"drfit": "off"}}, "'drfit' is not a rule; did you mean 'drift'?"),
        ({"rules": {"drift": "on"}}, "refuse"),
        ({"limits": {"drift": 2}}, "drift: 2 is not between 0 and 1"),
        ({"limits": {"drfit": 0.1}}, "'drfit' is not a limit"),
        ({"limits": {"significance": 0}}, "significance: 0 is not between 1e-12 and 0.1"),
    ],
)
def test_a_wrong_key_is_named(gate, says):
    with pytest.raises(ValueError, match=r"data\.gate") as refused:
        Config.model_validate({"data": {"gate": gate}})
    assert says in str(refused.value)


FACTS = {
    "decision": "accepted", "dataset": "file:///d", "examples": {"train": 7},
    "champion": {"version": 3, "dataset": "file:///c", "note": ""}, "findings": [],
}  # fmt: skip


def drawn(columns, before=None, **more):
    new = profile(split_of(columns))
    old = profile(split_of(before)) if before else None
    return validate.render_page({**FACTS, **more}, new, old).decode()


def test_histograms_stand_next_to_those_of_the_champion():
    rng = np.random.default_rng(0)
    text = drawn(table(rng, 300), table(rng, 300))
    assert text.count("<figure ") == 6
    assert 'class="old"' in text
    assert "data of version 3" in text
    assert 'class="old"' not in drawn(table(rng, 300))


def labelled(columns):
    return {**columns, "label": np.zeros(len(next(iter(columns.values()))), int)}


def test_categories_and_numbers_have_labels():
    new = {"plan": np.array(["basic", "plus", "basic", "plus", "basic"] * 200, object)}
    old = {"plan": np.array(["basic", "plus"] * 500, object)}
    words = Page(drawn(labelled(new), labelled(old))).words
    first = words.index("basic")
    assert words[first : first + 6] == ["basic", "60 %", "50 %", "plus", "40 %", "50 %"]
    many = {"plan": np.array([f"plan {n % 15}" for n in range(1500)], object)}
    words = Page(drawn(labelled(many))).words
    assert words[words.index("all others") + 1] == "20 %"
    words = Page(drawn(labelled({"age": np.linspace(0, 80, 1000)}))).words
    first = words.index("age", words.index("age") + 1)
    assert words[first + 1].startswith("up to 4.")
    drawn_below = [each for each in words[first + 2 :] if " to " not in each]
    assert drawn_below[:5] == ["20", "40", "missing", "0", "mean"]


def test_the_page_is_escaped_and_bounded_and_draws_features_with_findings():
    columns = table(np.random.default_rng(0), 300)
    evil = "<script>alert(1)</script>"
    columns[evil] = np.full(300, evil)
    finding = {"rule": "drift", "feature": evil, "split": "", "says": evil, "action": "warn"}
    text = drawn(columns, findings=[finding])
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    finding |= {"feature": "x394", "says": "moved"}
    columns = table(np.random.default_rng(0), 60, width=400)
    text = drawn(columns, findings=[finding] * 500)
    assert text.count("<figure ") == validate.MOST_FEATURES
    assert '<figure id="feature-1"><figcaption>x394' in text
    assert "341 further features are not drawn" in text
    assert len(text) < 1_000_000
