"""Short simulations of the gate: it promotes the right models, and small losses do not add up."""

import pytest

from benchmarks.nights import DATA, Model, chain, first, kinds, promoted

# At an error rate of 1 in 200, the probability of more than MOST errors in NIGHTS nights is 0.02 %.
NIGHTS, MOST = 100, 4


@pytest.mark.parametrize(("name", "examples"), [("50 %", 56), ("5 %", 560), ("1 %", 2800)])
def test_a_model_that_is_worse_by_the_margin_is_seldom_promoted(name, examples):
    data = DATA[name]
    model = kinds(data)["worse by the margin"]
    assert promoted(data, model, examples, NIGHTS) * NIGHTS <= MOST


@pytest.mark.parametrize("kind", ["half of the positives lost", "finds nothing"])
def test_a_model_that_loses_a_class_is_seldom_promoted(kind):
    data = DATA["5 %"]
    assert promoted(data, kinds(data)[kind], 4000, NIGHTS) * NIGHTS <= MOST


def test_a_model_that_finds_nothing_seldom_is_the_first_champion():
    assert first(DATA["5 %"], 560, 20) * 20 <= 1


def test_equal_models_are_promoted_where_the_examples_are_enough():
    data = DATA["50 %"]
    assert promoted(data, Model.of(data, data.value), 2000, 50) > 0.75


def test_small_losses_do_not_add_up():
    kept, lost = (chain("each worse by 0.005", rule, 60) for rule in ("the gate", "champion alone"))
    assert kept.values[-1] >= DATA["50 %"].value - 2 * DATA["50 %"].margin
    assert lost.values[-1] < 0.8
