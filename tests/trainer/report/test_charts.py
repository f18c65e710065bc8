import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.report.charts import (
    MARKED_POINTS,
    MOST_POINTS,
    fit_axis,
    line_chart,
)

_any = st.none() | st.text() | st.booleans() | st.floats() | st.integers(-(10**400), 10**400)


def drawn(table, **series):
    chart = line_chart("t", table, "step", series or {"loss": "training"})
    assert chart
    return chart


def test_a_falling_line_falls():
    chart = drawn([{"step": 100, "loss": 2.0}, {"step": 300, "loss": 0.5}])
    [line] = chart.lines
    (x1, y1), (x2, y2) = line.points
    assert x1 < x2
    assert y1 < y2, "the picture's vertical axis points down"
    assert line.label == "training"
    assert line.path == f"{x1:.2f},{y1:.2f} {x2:.2f},{y2:.2f}"
    assert line.marks == line.points


@pytest.mark.parametrize(
    ("first", "last", "columns", "rows"),
    [
        ((50, 2.31), (1500, 0.04), "0 500 1000 1500", "0 0.5 1 1.5 2"),
        ((0, 0.1), (1, 0.7), "0 0.2 0.4 0.6 0.8 1", "0.2 0.4 0.6"),
        ((20, 1.0), (12_000, 2.0), "0 2500 5000 7500 10000", "1 1.25 1.5 1.75 2"),
    ],
)
def test_the_grid_is_round_and_holds_all_points(first, last, columns, rows):
    chart = drawn([{"step": step, "loss": loss} for step, loss in (first, last)])
    assert [tick.label for tick in chart.columns] == columns.split()
    assert [tick.label for tick in chart.rows] == rows.split()
    assert chart.columns[0].at == 0
    assert chart.columns[-1].at <= chart.lines[0].points[-1][0] == 100


def test_the_lines_fill_the_height():
    chart = drawn([{"step": 1, "loss": 0.91}, {"step": 2, "loss": 0.97}])
    (_, low), (_, high) = chart.lines[0].points
    assert (low, high) == (pytest.approx(100 - 100 / 22), pytest.approx(100 / 22))
    assert [tick.label for tick in chart.rows] == ["0.92", "0.94", "0.96"]


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0001, 0.1], ["0.0001", "0.001", "0.01", "0.1"]),
        ([0.001, 0.02], ["0.001", "0.002", "0.005", "0.01", "0.02"]),
        ([3.0, 4.0], ["3", "3.2", "3.4", "3.6", "3.8", "4"]),
        ([16.0, 256.0], ["20", "50", "100", "200"]),
    ],
)
def test_the_ticks_of_a_log_axis_are_within_it(values, labels):
    axis = fit_axis(values, is_log=True)
    assert [tick.label for tick in axis.ticks] == labels
    assert (axis.place(values[0]), axis.place(values[1])) == (0, 100)
    assert axis.place((values[0] * values[1]) ** 0.5) == pytest.approx(50)
    for low in (0.0, -1.0):
        assert not fit_axis([low, values[1]], is_log=True).is_log, "it needs positive values"


def test_rows_without_a_number_add_no_point():
    table: list[dict[str, Any]] = [
        {"step": 1, "loss": 1.0},
        {"step": 2},
        {"step": 3, "loss": math.nan},
        {"step": 4, "loss": math.inf},
        {"step": 5, "loss": None},
        {"step": 6, "loss": "0.5"},
        {"step": 7, "loss": True},
        {"loss": 0.5},
        {"step": 8, "loss": 10**400},
        {"step": 9, "loss": 2},
    ]
    assert len(drawn(table).lines[0].points) == 2


def test_each_series_is_a_line_and_empty_ones_are_left_out():
    table = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0, "b": 5.0}]
    chart = drawn(table, a="first", b="second", c="third")
    assert [(line.label, len(line.points)) for line in chart.lines] == [("first", 2), ("second", 1)]


@pytest.mark.parametrize("table", [[], [{}], [{"step": 1}], [{"step": 1, "loss": math.nan}]])
def test_nothing_to_draw(table):
    assert line_chart("t", table, "step", {"loss": "training"}) is None


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-300, 1e99, 123456789.0])
def test_one_point_is_inside(value):
    chart = drawn([{"step": 500, "loss": value}])
    [(x, y)] = chart.lines[0].points
    assert 0 < x < 100
    assert 0 < y < 100


def test_rows_out_of_order_are_put_in_order():
    chart = drawn([{"step": 3, "loss": 1.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 0.0}])
    across = [x for x, _ in chart.lines[0].points]
    assert across == sorted(across)


def test_many_points_are_thinned_without_losing_a_peak():
    table = [{"step": n, "loss": 1.0} for n in range(20_000)]
    table[7777]["loss"] = 9.0
    table[8888]["loss"] = -9.0
    [line] = drawn(table).lines
    assert len(line.points) <= MOST_POINTS + 2
    assert min(y for _, y in line.points) < 25
    assert max(y for _, y in line.points) > 75
    assert line.marks == ()


def test_marks_are_for_few_points():
    few = drawn([{"step": n, "loss": 1.0 * n} for n in range(MARKED_POINTS)])
    more = drawn([{"step": n, "loss": 1.0 * n} for n in range(MARKED_POINTS + 1)])
    assert len(few.lines[0].marks) == MARKED_POINTS
    assert more.lines[0].marks == ()


@settings(deadline=None)
@given(st.lists(st.fixed_dictionaries({}, optional={"step": _any, "loss": _any, "b": _any})))
def test_whatever_the_table_holds_the_picture_is_whole(table):
    chart = line_chart("t", table, "step", {"loss": "training", "b": "other"})
    if not chart:
        return
    assert 2 <= len(chart.columns) <= 7
    assert 2 <= len(chart.rows) <= 7
    for line in chart.lines:
        for x, y in line.points:
            assert 0 <= x <= 100
            assert 0 <= y <= 100


def test_flags_that_are_near_are_one_and_those_outside_are_at_the_end():
    table = [{"step": 0, "loss": 1.0}, {"step": 1000, "loss": 2.0}]
    flags = [(500.0, "restart"), (501.0, "restart"), (502.0, "stalled"), (9e9, "resumed")]
    chart = line_chart("t", table, "step", {"loss": "training"}, flags=flags)
    assert chart
    assert [flag.text for flag in chart.flags] == ["restart (2 times), stalled", "resumed"]
    assert chart.flags[-1].at == 100


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([1.8, 0.03], True), ([1.8, 0.5], False), ([1.8, 0.0], False), ([1e9, 1e-9], True)],
)
def test_a_loss_that_falls_far_is_drawn_by_powers_of_ten(values, is_log):
    table = [{"step": at, "loss": value} for at, value in enumerate(values)]
    chart = line_chart("t", table, "step", {"loss": "training"}, logarithmic=True)
    assert chart
    assert chart.is_log is is_log
    assert 2 <= len(chart.rows) <= 8
    for _, y in chart.lines[0].points:
        assert 0 <= y <= 100
