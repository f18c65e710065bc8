"""Tests which cron expressions a schedule accepts, and when it starts runs."""

from datetime import UTC, datetime

import pytest

from flotilla.pipelines.schedule_times import parse
from flotilla.trainer.runtime.errors import ConfigError

# This date is a Wednesday.
NOW = datetime(2026, 7, 15, 10, 20, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "sent", "upcoming"),
    [
        ("10 10 * * *", "0 10 10 * * *", "2026-07-16 10:10:00"),
        ("0 10 10 * * *", "0 10 10 * * *", "2026-07-16 10:10:00"),
        ("* * * * *", "0 * * * * *", "2026-07-15 10:21:00"),
        ("* * * * * *", "* * * * * *", "2026-07-15 10:20:31"),
        ("*/15 * * * *", "0 */15 * * * *", "2026-07-15 10:30:00"),
        ("7/15 * * * *", "0 7/15 * * * *", "2026-07-15 10:22:00"),
        ("0 9-17 * * mon-fri", "0 0 9-17 * * mon-fri", "2026-07-15 11:00:00"),
        ("0 3 * * SUN", "0 0 3 * * SUN", "2026-07-19 03:00:00"),
        ("0 0 9 ? * 2-6", "0 0 9 ? * 2-6", "2026-07-16 09:00:00"),
        ("0 0 1 jan *", "0 0 0 1 jan *", "2027-01-01 00:00:00"),
        ("0 0 29 2 *", "0 0 0 29 2 *", "2028-02-29 00:00:00"),
        ("0 0 31 * *", "0 0 0 31 * *", "2026-07-31 00:00:00"),
        ("0 0 1,20 * *", "0 0 0 1,20 * *", "2026-07-20 00:00:00"),
        # The schedule fires on the 13th and on every Friday.
        ("0 0 13 * 5", "0 0 0 13 * 5", "2026-07-17 00:00:00"),
        ("@daily", "0 0 0 * * *", "2026-07-16 00:00:00"),
        ("@Hourly", "0 0 * * * *", "2026-07-15 11:00:00"),
        # A step in the day-of-week field stops at Saturday.
        ("0 0 * * thu/2", "0 0 0 * * thu/2", "2026-07-16 00:00:00"),
        ("0 0 * * 5/2", "0 0 0 * * 5/2", "2026-07-17 00:00:00"),
        ("0 0 12 */7 *", "0 0 0 12 */7 *", "2026-08-12 00:00:00"),
        ("  5   4 * * * ", "0 5 4 * * *", "2026-07-16 04:05:00"),
    ],
)
def test_what_it_means(text, sent, upcoming):
    cron = parse(text)
    assert cron.text == sent
    assert f"{cron.after(NOW):%Y-%m-%d %H:%M:%S}" == upcoming


def test_what_never_comes_and_a_time_that_is_now():
    for text in ("0 0 30 2 *", "0 0 31 apr,jun *"):
        assert parse(text).after(NOW) is None
    exactly = datetime(2026, 7, 15, 10, 0, 0, tzinfo=UTC)
    assert parse("0 10 * * *").after(exactly) == exactly.replace(day=16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 fields"),
        ("* * * *", "has 4 fields: give five"),
        ("* * * * * * *", "has 7 fields"),
        ("@reboot", "has 1 fields"),
        ("60 * * * *", "'60' is not a valid minute (0 to 59"),
        ("0 24 * * *", "'24' is not a valid hour (0 to 23"),
        ("0 0 0 * *", "'0' is not a valid day of the month (1 to 31"),
        ("0 0 * 13 *", "'13' is not a valid month"),
        ("0 0 * * 7", "'7' is not a valid day of the week (0 to 6"),
        ("5-1 * * * *", "'5-1' is not a valid minute"),
        ("*/0 * * * *", "'*/0' is not a valid minute"),
        ("a * * * *", "'a' is not a valid minute"),
        ("1,,2 * * * *", "'' is not a valid minute"),
        ("* * * foo *", "'foo' is not a valid month"),
        ("-1 * * * *", "'-1' is not a valid minute"),
        ("1--3 * * * *", "'1--3' is not a valid minute"),
        # Syntax that cronsim supports and KFP does not.
        ("0 0 L * *", "'L' is not a valid day of the month"),
        ("0 0 LW * *", "'LW' is not a valid day of the month"),
        ("0 0 * * 5L", "'5L' is not a valid day of the week"),
        ("0 0 * * 5#2", "'5#2' is not a valid day of the week"),
        ("0 0 * * 5-7", "'5-7' is not a valid day of the week"),
        ("0 0 31 2 1#1", "'1#1' is not a valid day of the week"),
    ],
)
def test_what_is_no_cron(text, message):
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert message in str(refused.value)
