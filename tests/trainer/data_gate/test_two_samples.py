"""Tests of two samples: seldom significant by chance, and equal to those of SciPy."""

import numpy as np
import pytest
from scipy import stats

from trainer.data_gate import two_samples


def test_the_distance_is_that_of_scipy():
    rng = np.random.default_rng(0)
    new, old = np.sort(rng.normal(size=300)), np.sort(rng.normal(0.2, 1, size=200))
    size, chance = two_samples.kolmogorov_smirnov(new, old)
    known = stats.ks_2samp(new, old, method="asymp")
    assert size == pytest.approx(known.statistic)
    assert chance == pytest.approx(known.pvalue, rel=0.3)
    assert two_samples.exceeds(new, old) == pytest.approx(
        stats.mannwhitneyu(new, old).statistic / 300 / 200
    )


def test_rare_values_are_one_value():
    old = {"a": 500, "b": 480, **{f"x{n}": 1 for n in range(20)}}
    new = {"a": 490, "b": 490, **{f"y{n}": 1 for n in range(20)}}
    _, chance = two_samples.homogeneity(new, old)
    assert chance > 0.1
    assert two_samples.homogeneity({"a": 1}, {"a": 9}) == (0.0, 1.0)
    moved, chance = two_samples.homogeneity({"a": 700, "b": 300}, {"a": 500, "b": 500})
    assert moved == pytest.approx(0.2)
    assert chance < 1e-10


def test_many_tests_are_corrected():
    assert two_samples.holm({"a": 0.004, "b": 0.03, "c": 0.9}, 0.05) == {"a"}
    assert two_samples.holm({"a": 0.004, "b": 0.02, "c": 0.9}, 0.05) == {"a", "b"}
    assert two_samples.holm({}, 0.05) == set()


def test_a_share_is_compared_by_the_exact_test():
    exact = stats.fisher_exact([[8, 92], [2, 198]], alternative="greater").pvalue
    assert two_samples.more_often(8, 100, 2, 200) == pytest.approx(exact)
    assert two_samples.only_in_one(3, 100, 100) == pytest.approx(0.123, abs=0.01)
