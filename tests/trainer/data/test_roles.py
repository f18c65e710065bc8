"""Tests the roles of columns."""

from __future__ import annotations

import pytest

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.roles import assign
from flotilla.trainer.runtime.errors import ConfigError


def test_a_likely_label_is_suggested_if_a_column_is_left() -> None:
    with pytest.raises(ConfigError, match=r"perhaps 'b' \(one of a, b\)$"):
        assign(DataConfig(source="t.csv"), ["a", "b"])
    with pytest.raises(ConfigError, match=r"the column to predict$"):
        assign(DataConfig(source="t.csv", drop=("a",)), ["a"])


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_a_column_that_cannot_be_named_is_refused(name):
    with pytest.raises(ConfigError, match=r"t\.csv has a column (without a name|named 'a.x00b')"):
        assign(DataConfig(source="t.csv"), ["x", name, "label"])
