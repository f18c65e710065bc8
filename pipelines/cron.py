"""Cron expressions as KFP reads them: six fields, seconds first.

KFP takes five fields too, and reads the first one as seconds: `10 10 * * *` would run each hour.
Here five fields are what they are everywhere else, and get their second.
"""

from __future__ import annotations

import calendar
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from trainer.errors import ConfigError

_MONTHS = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
_DAYS = {
    name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))
}
_EVERY = {
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
    "@monthly": "0 0 0 1 * *",
    "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@hourly": "0 0 * * * *",
}
# A day that does not come in so many years, such as the 30th of February, does not come.
_YEARS = 9


@dataclass(frozen=True, kw_only=True)
class _Field:
    name: str
    least: int
    most: int
    words: Mapping[str, int]


_FIELDS = (
    _Field(name="second", least=0, most=59, words={}),
    _Field(name="minute", least=0, most=59, words={}),
    _Field(name="hour", least=0, most=23, words={}),
    _Field(name="day of the month", least=1, most=31, words={}),
    _Field(name="month", least=1, most=12, words=_MONTHS),
    _Field(name="day of the week", least=0, most=6, words=_DAYS),
)


@dataclass(frozen=True, kw_only=True)
class Cron:
    """A schedule.

    Attributes:
        text: the six fields, as KFP gets them.
        allowed: the values of each field.
        any_day: whether the day of the month is left open.
        any_weekday: whether the day of the week is left open.
    """

    text: str
    allowed: tuple[frozenset[int], ...]
    any_day: bool
    any_weekday: bool

    def after(self, moment: datetime) -> datetime | None:
        """Return the first time after `moment`, in its time zone; None if it never comes."""
        seconds, minutes, hours, days, months, weekdays = self.allowed
        when = moment.replace(microsecond=0) + timedelta(seconds=1)
        last = moment.year + _YEARS
        while when.year <= last:
            if when.month not in months:
                first = when.replace(day=1, hour=0, minute=0, second=0)
                when = (first + timedelta(days=32)).replace(day=1)
            elif not self._has_day(when, days, weekdays):
                when = when.replace(hour=0, minute=0, second=0) + timedelta(days=1)
            elif when.hour not in hours:
                when = when.replace(minute=0, second=0) + timedelta(hours=1)
            elif when.minute not in minutes:
                when = when.replace(second=0) + timedelta(minutes=1)
            elif when.second not in seconds:
                when += timedelta(seconds=1)
            else:
                return when
        return None

    def _has_day(self, when: datetime, days: frozenset[int], weekdays: frozenset[int]) -> bool:
        day = when.day in days
        weekday = when.isoweekday() % 7 in weekdays
        # Where both are given, either will do.
        return day and weekday if self.any_day or self.any_weekday else day or weekday


def parsed(text: str) -> Cron:
    """Return the schedule of a cron expression of five or six fields; raises `ConfigError`."""
    words = _EVERY.get(text.strip().lower(), text).split()
    if len(words) == len(_FIELDS) - 1:
        words = ["0", *words]
    if len(words) != len(_FIELDS):
        raise ConfigError(
            f"--cron {text!r} has {len(words)} fields: give five (minute hour day month weekday), "
            "or six with seconds first"
        )
    allowed = tuple(_values(word, field, text) for word, field in zip(words, _FIELDS, strict=True))
    return Cron(
        text=" ".join(words),
        allowed=allowed,
        any_day=words[3][0] in "*?",
        any_weekday=words[5][0] in "*?",
    )


def _values(word: str, field: _Field, text: str) -> frozenset[int]:
    values: set[int] = set()
    for part in word.split(","):
        span, slash, step_text = part.partition("/")
        low_text, dash, high_text = span.partition("-")
        try:
            if span in ("*", "?"):
                low, high = field.least, field.most
            else:
                low = _number(low_text, field)
                high = _number(high_text, field) if dash else (field.most if slash else low)
            step = int(step_text) if slash else 1
        except ValueError:
            low, high, step = 1, 0, 0
        if not (field.least <= low <= high <= field.most and step >= 1):
            raise ConfigError(
                f"--cron {text!r}: {part!r} is no {field.name} "
                f"({field.least} to {field.most}, *, a-b, a,b, */n)"
            )
        values.update(range(low, high + 1, step))
    return frozenset(values)


def _number(word: str, field: _Field) -> int:
    return field.words[word.lower()] if word.lower() in field.words else int(word)
