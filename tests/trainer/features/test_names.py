"""Tests that columns of any name get valid names of layers and arguments."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.trainer.features.names import argument_names, curve_name, layer_name
from tests.trainer.odd_names import names


@given(st.lists(names(), unique=True))
def test_layers_are_called_by_few_signs_and_apart(found):
    called = [layer_name(name) for name in found]
    assert len(set(called)) == len(found)
    assert all(re.fullmatch("[A-Za-z0-9.][A-Za-z0-9_.-]{0,99}", each) for each in called)


@given(st.lists(names(), unique=True), st.randoms())
def test_arguments_are_words_that_differ_in_more_than_their_case(found, random):
    called = argument_names(found)
    assert list(called) == found
    assert len({each.lower() for each in called.values()}) == len(found)
    assert all(re.fullmatch("[A-Za-z][A-Za-z0-9_]*", each) for each in called.values())
    other = random.sample(found, len(found))
    assert argument_names(other) == called


@pytest.mark.parametrize("name", ["age", "Age", "sepal.length", "a-b", "2020", "hidden_0", "class"])
def test_a_plain_name_stays(name):
    assert layer_name(name) == name
    for curve in (name, f"validation_{name}", f"workers/{name}", f"größe_{name}"):
        assert curve_name(curve) == curve


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("Sepal Length (cm)", "Sepal_Length_cm."),
        ("größe", "gr_e."),
        ("", "column."),
        ("/", "column."),
    ],
)
def test_another_one_can_be_read_and_is_its_own(name, layer):
    assert re.fullmatch(rf"{re.escape(layer)}[0-9a-f]{{16}}", layer_name(name))
    assert layer_name(name) != layer_name(f"{name} ")


def test_an_argument_is_called_as_its_column_where_that_is_a_word():
    found = argument_names(["a b", "a_b", "A_B", "größe", "class", "self", "1st", "x"])
    # `a_b` and `A_B` differ only in case, so only one of them keeps its name.
    assert found["A_B"] == "A_B"
    assert found["a_b"].startswith("a_b_")
    words = {"größe": "gr__e", "class": "input_class", "self": "input_self", "1st": "input_1st"}
    assert {name: found[name] for name in (*words, "x")} == {**words, "x": "x"}


@given(st.lists(names(), unique=True))
def test_curves_are_called_as_a_tracker_takes_them_and_apart(found):
    called = [curve_name(f"{name}_mae") for name in found]
    assert len(set(called)) == len(found)
    for name in called:
        assert re.fullmatch(r"[\w\-. :/]{1,250}", name)
        assert not {"", ".", ".."} & {*name.split("/")}
        assert len(name.splitlines()) == 1
