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
