"""Tests the page of a sweep: axes in the scale of the space, colors by objective, all trials."""

import json
import math
import re

import pytest

from flotilla.trainer.sweeps import page
from flotilla.trainer.sweeps.sweep import DONE, FAILED, Result, Trial, make_table
from tests.trainer.page import Page
from tests.trainer.sweeps.test_sweep import RATE, a_sweep

EVIL = "<script>alert(1)</script>"
UNITS = "model.args.hidden_units"
LOG = json.dumps(
    {"name": "FloatDistribution", "attributes": {"low": 0.0001, "high": 0.1, "log": True}}
)


def swept(values, key=RATE, **more):
    """Return a sweep over one key, with the loss of each value."""
    trials = tuple(
        Trial(number=number, settings={key: text}, run_id=f"r{number}", status=DONE, rung=0,
              results=() if loss is None else (Result(rung=0, steps=30, value=loss),))
        for number, (text, loss) in enumerate(values.items(), start=1)
    )  # fmt: skip
    return a_sweep(trials=trials, keys=(key,), rungs=(30,), **more)


def drawn(sweep, **more):
    html = page.render(sweep, **more).decode()
    return html, Page(html)


def dots(html):
    """Return the horizontal position and the color of each trial in the charts."""
    found = re.findall(r'class="dot[^>]*left:([\d.]+)%;bottom:[\d.]+%;--shade:(\d+)"', html)
    return [(float(left), int(shade)) for left, shade in found]


def test_a_log_space_has_a_log_axis_and_the_best_value_the_strongest_colour():
    sweep = swept({"0.001": 0.5, "0.01": 0.2, "0.1": 1.0}, space={RATE: LOG}, best=2)
    html, words = drawn(sweep, headline="digits v1: promoted", report="../r2/report.html")
    assert [left for left, _ in dots(html)] == pytest.approx([100 / 3, 200 / 3, 100], abs=0.01)
    assert [shade for _, shade in dots(html)] == [62, 100, 0]
    first = words.words.index("(log scale)")
    assert words.words[first + 1 : first + 10][-4:] == ["0.0001", "0.001", "0.01", "0.1"]
    assert "Trial 2 is the best of 3" in words.words
    assert words.links() == ["../r2/report.html"]
    assert "Outlined: trial 2." in words.words


def test_the_page_has_the_numbers_of_the_terminal():
    sweep = swept({"0.001": 0.123456789, "0.01": 0.2}, best=1)
    heads, rows = make_table(sweep)
    words = drawn(sweep)[1].words
    first = words.index(heads[0])
    assert words[first:] == [*heads, *(cell for row in rows for cell in row)]
    assert "Validation loss 0.1235, training.optimizer.learning_rate=0.001" in words


@pytest.mark.parametrize(
    ("values", "labels", "places"),
    [
        (["16", "64", "256"], ["16", "64", "256"], [0, 50, 100]),
        (["0.0", "0.1", "0.5"], ["0", "0.1", "0.5"], [0, 20, 100]),
        (["[64]", "[64, 64]"], ["[64]", "[64, 64]"], [25, 75]),
    ],
)
def test_a_list_of_numbers_is_on_its_scale_and_other_values_are_named(values, labels, places):
    html, words = drawn(swept(dict.fromkeys(values, 1.0), key=UNITS))
    assert [left for left, _ in dots(html)] == pytest.approx(places, abs=0.01)
    assert "\n".join(labels) in words.text


@pytest.mark.parametrize(
    "sweep",
    [
        a_sweep(),
        swept({"0.1": None}),
        swept({"0.1": math.inf, "0.2": 1.0}),
        swept({"0.1": math.nan}),
        swept({"": 1.0}),
        swept({"0.1": 1.0}, space={RATE: "{"}),
        swept({"0.1": 1.0, "1e308": 1.0}, space={RATE: '{"attributes": {"low": 1, "high": 2}}'}),
        swept({EVIL: 1.0, "1e999": 2.0}, message=EVIL),
    ],
    ids=["waiting", "no result", "inf", "nan", "empty", "damaged", "outside", "evil"],
)
def test_whatever_the_trials_the_page_is_whole(sweep):
    _, words = drawn(sweep)
    assert "script" not in words.tags
    assert "Trials" in words.words


def test_a_failure_is_escaped_and_listed():
    trial = Trial(number=1, settings={RATE: "0.1"}, status=FAILED, error=EVIL)
    html, words = drawn(a_sweep(trials=(trial,)))
    assert f"trial 1: {EVIL}" in words.words
    assert EVIL not in html
