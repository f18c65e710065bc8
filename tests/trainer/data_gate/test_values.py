"""Values: which unit they have now, and which categories are no news."""

import numpy as np
import pytest

from tests.trainer.data_gate.tables import profile, question, split_of
from trainer.data_gate import values


def rows(seed, **columns):
    rng = np.random.default_rng(seed)
    size = 800
    made = {name: make(rng, size) for name, make in columns.items()}
    return profile(split_of({**made, "label": (rng.random(size) < 0.5).astype(int)}))


def heights(factor, offset=0.0):
    return lambda rng, size: factor * (20 + 6 * rng.gamma(4, 1, size)) + offset


@pytest.mark.parametrize(
    ("factor", "offset", "says"),
    [
        (1000, 0, "times 1000 (thousands)"), (1e-3, 0, "divided by 1000 (thousands)"),
        (100, 0, "times 100 (hundreds"), (1 / 2.54, 0, "divided by 2.54 (inches)"),
        (1.8, 32, "times 1.8 (degrees Fahrenheit)"), (60, 0, "times 60 (minutes)"),
    ],
)  # fmt: skip
def test_the_unit_is_named(factor, offset, says):
    new, old = rows(1, x=heights(factor, offset)), rows(2, x=heights(1))
    (found,) = values.unit(question(new, old))
    assert says in found.says


def test_a_shift_is_no_unit():
    assert not list(values.unit(question(rows(1, x=heights(1, 9)), rows(2, x=heights(1)))))


def test_rare_words_are_no_new_categories():
    def words(rng, size):
        return rng.zipf(1.5, size).astype("U")

    for seed in range(20):
        asked = question(rows(seed, word=words), rows(seed + 50, word=words))
        assert not list(values.new_values(asked))
