"""Tests that planted skews are reported and clean resamples are not."""

import sys
from collections import Counter

import numpy as np
import pytest

from flotilla.trainer.data_gate.validate import find_all
from tests.trainer.data_gate.skews import SKEWS, table
from tests.trainer.data_gate.tables import profile, question, split_of


def clean(seed, size, width):
    return split_of(table(np.random.default_rng(seed), size, width))


def named(skew, size, width, seed=1):
    champion = profile(clean(seed, size, width))
    skewed = skew(np.random.default_rng(seed + 1), clean(seed + 2, size, width))
    return {each.rule for each in find_all(question(profile(skewed), champion))}


# Numbers of rows, of features without the label, and of resamples.
RESAMPLES = ((200, 5, 60), (200, 100, 40), (3000, 8, 60), (3000, 100, 20), (50_000, 8, 5))
IMAGES = 30


def images(seed, size=400):
    """Return images of two classes, of which the second is brighter."""
    rng = np.random.default_rng(seed)
    label = (rng.random(size) < 0.5).astype(int)
    pictures = rng.integers(0, 200, (size, 6, 6), dtype=np.uint8)
    return {"image": pictures + (label * 30)[:, None, None].astype(np.uint8), "label": label}


def alarms(make, count):
    before, found = make(0), Counter()
    for seed in range(1, count + 1):
        new = make(seed)
        if findings := find_all(question(new, before)):
            found[", ".join(sorted({each.rule for each in findings}))] += 1
        before = new
    return found


def write_table(record_property, rows):
    """Add the table to the test report, and print it with `pytest -s`."""
    for row in rows:
        record_property(str(row[0]), str(row[1:]))
        sys.stdout.write(f"{row}\n")


@pytest.mark.long
def test_clean_resamples_are_left_alone(record_property):
    rows, wrong = [], 0
    for size, width, count in RESAMPLES:
        found = alarms(lambda seed: profile(clean(seed, size, width)), count)  # noqa: B023
        rows.append((f"{size} rows, {width} features", count, dict(found)))
        wrong += found.total()
    found = alarms(lambda seed: profile(split_of(images(seed))), IMAGES)
    rows.append(("images", IMAGES, dict(found)))
    wrong += found.total()
    resamples = sum(count for _, count, _ in rows)
    write_table(record_property, rows)
    assert resamples >= 200
    assert wrong <= resamples // 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "width", "most"),
    [(1000, 5, 2), (3000, 8, 0), pytest.param(50_000, 5, 2, marks=pytest.mark.long)],
)
def test_planted_skews_are_named(size, width, most, record_property):
    found = {}
    for name, (skew, rules) in SKEWS.items():
        said = named(skew, size, 60 if name == "many small drifts" else width)
        found[name] = sorted(said), sorted(rules)
    missed = [name for name, (said, rules) in found.items() if not set(said) & set(rules)]
    write_table(record_property, found.items())
    assert len(SKEWS) >= 30
    assert len(missed) <= most, missed
