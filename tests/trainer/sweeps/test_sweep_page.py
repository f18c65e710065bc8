"""The page of a sweep: every trial, the best marked, nothing loaded and nothing run."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from tests.trainer.sweeps.test_state import RATE, a_sweep
from trainer.sweeps.sweep_page import coordinates, render, rows_of


def trained():
    sweep = a_sweep(best=2, verdict="blessed", test={"accuracy": 0.97})
    for trial, value in zip(sweep.trials, (0.5, 0.25), strict=True):
        sweep = sweep.with_trial(sweep.reached(trial, 0, 30, value))
    second = sweep.reached(sweep.trials[1], 1, 90, 0.2)
    return sweep.with_trial(second)


def test_it_has_no_script_and_no_address():
    page = render(trained())
    HTMLParser().feed(page)
    assert not re.search(r"<script|<link|src=|https?://|@import|url\(", page)
    assert "default-src 'none'" in page


def test_it_shows_the_best_its_command_and_the_test_split():
    page = render(trained())
    assert f"--set {RATE}=0.003" in page
    assert "Accuracy on the test split" in page
    assert "0.97" in page
    assert 'class="trial best"' in page
    assert "90 steps" in page


def test_rows_are_by_rung_and_value():
    rows = rows_of(trained())
    assert [row.trial.number for row in rows] == [2, 1]
    assert [row.at for row in rows] == [100.0, 0.0]
    assert [row.is_best for row in rows] == [True, False]


def test_a_failure_is_listed_and_escaped():
    sweep = trained()
    failed = replace(sweep.trials[0], status="failed", error="<b>bad</b>", results=())
    page = render(sweep.with_trial(failed))
    assert "&lt;b&gt;bad&lt;/b&gt;" in page
    assert "<b>bad" not in page
    assert 'class="trial failed"' in page


def test_words_and_numbers_have_a_place_on_their_axis():
    sweep = a_sweep(keys=(RATE, "model.name"))
    for trial, name in zip(sweep.trials, ("mlp", "cnn"), strict=True):
        mine = replace(trial, settings={**trial.settings, "model.name": name})
        sweep = sweep.with_trial(sweep.reached(mine, 0, 30, 0.5))
    axes, lines = coordinates(sweep)
    assert [axis.name for axis in axes] == [RATE, "model.name", "validation_loss"]
    assert [label for _, label in axes[1].labels] == ["cnn", "mlp"]
    assert {len(line.points.split()) for line in lines} == {3}


def test_a_sweep_before_its_first_result_has_a_page():
    assert "running" in render(a_sweep())
