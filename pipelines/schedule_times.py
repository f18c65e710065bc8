"""The times at which a schedule starts runs: a cron expression or an interval.

KFP's cron expressions have six fields, seconds first. If there are only five, KFP still reads the
first one as seconds. Here, five fields have their usual meaning, with a zero for the seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from flotilla.trainer.runtime.errors import ConfigError

_EVERY = {
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
    "@monthly": "0 0 0 1 * *",
    "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@hourly": "0 0 * * * *",
}
# The name, minimum and maximum of each field, and its attribute in cronsim.
_FIELDS = (
    ("second", 0, 59, "seconds"),
    ("minute", 0, 59, "minutes"),
    ("hour", 0, 23, "hours"),
    ("day of the month", 1, 31, "days"),
    ("month", 1, 12, "months"),
    ("day of the week", 0, 6, "weekdays"),
)
# The field syntax of KFP's parser; cronsim accepts more, such as `L` and `#`.
_PART = re.compile(r"(?P<from>[*?]|\d+|[a-z]{3})(?P<to>-(\d+|[a-z]{3}))?(?P<step>/\d+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Cron:
    """A cron expression: `text` for KFP, and `known` for cronsim."""

    text: str
    known: str

    def after(self, moment: datetime) -> datetime | None:
        """Return the first match after `moment` in its time zone, or None if there is none."""
        try:
            return next(CronSim(self.known, moment), None)
        except CronSimError:
            return None


def parse(text: str) -> Cron:
    """Parse a cron expression of five or six fields. Raises `ConfigError`."""
    words = _EVERY.get(text.strip().lower(), text).split()
    if len(words) == len(_FIELDS) - 1:
        words = ["0", *words]
    if len(words) != len(_FIELDS):
        raise ConfigError(
            f"--cron {text!r} has {len(words)} fields: give five (minute hour day month weekday), "
            "or six with seconds first"
        )
    known = []
    for place, word in enumerate(words):
        parts = [_normalize_part(part, place) for part in word.lower().split(",")]
        if None in parts:
            name, least, most, _ = _FIELDS[place]
            part = word.split(",")[parts.index(None)]
            raise ConfigError(
                f"--cron {text!r}: {part!r} is not a valid {name} ({least} to {most}, *, a-b, a,b, "
                f"*/n)"
            )
        known.append(",".join(map(str, parts)))
    return Cron(text=" ".join(words), known=" ".join(known))


def _normalize_part(part: str, place: int) -> str | None:
    """Return a part of a field in cronsim's syntax, or None if KFP or cronsim refuses it."""
    _, _, most, values = _FIELDS[place]
    found = _PART.fullmatch(part)
    if not found:
        return None
    start, end, step = found["from"].replace("?", "*"), found["to"] or "", found["step"]
    # Refuse 7 for Sunday, which cronsim accepts but KFP does not.
    if values == "weekdays" and "7" in (start.lstrip("0"), end.lstrip("-0")):
        return None
    if step and start != "*" and not end:
        end = f"-{most}"
    alone = ["*"] * len(_FIELDS)
    alone[place] = f"{start}{end}{step if start == '*' and step else ''}"
    try:
        read = CronSim(" ".join(alone), datetime.now(UTC))
    except CronSimError:
        return None
    if not step or start == "*":
        return alone[place]
    every = int(step[1:])
    return ",".join(map(str, sorted(getattr(read, values))[::every])) if every else None


_INTERVAL = re.compile(r"(\d{1,9})([smhd]?)", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = 366 * 86400


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times at which a schedule starts runs, and how it starts them.

    Attributes:
        interval: seconds from one start to the next, or 0; either this or `cron` is set.
        zone: the time zone of `cron`, which is a setting of the whole instance.
        catch_up: whether missed runs are started later.
        at_once: maximum number of concurrent runs.
        latest: whether each run uses the version that is newest at its start, not a fixed one.
    """

    cron: Cron | None
    interval: int
    zone: str = "UTC"
    catch_up: bool = False
    at_once: int = 1
    latest: bool = False


def make_timing(cron: str, every: str, *, version: str, **more: Any) -> Timing:
    """Create a timing from the command-line options. Raises `ConfigError`."""
    if bool(cron) == bool(every):
        raise ConfigError("a schedule needs either --cron or --every")
    if more["latest"] and version:
        raise ConfigError("--latest and --version contradict each other: leave one out")
    if cron:
        return Timing(cron=parse(cron), interval=0, **more)
    found = _INTERVAL.fullmatch(every)
    seconds = int(found[1]) * _SECONDS[found[2] or "s"] if found else 0
    if not 0 < seconds <= _LONGEST:
        raise ConfigError(f"--every {every!r} is not an interval, such as 6h")
    if more["zone"] != "UTC":
        raise ConfigError("--timezone applies only to --cron: an interval has no time zone")
    return Timing(cron=None, interval=seconds, **more)


def _find_zone(name: str) -> tzinfo:
    """Return the time zone with this name. Raises `ConfigError`."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):
        raise ConfigError(
            f"--timezone {name!r} is not a time zone, such as Europe/Berlin"
        ) from None


def describe(when: Timing) -> tuple[str, str]:
    """Return a description of a timing, and its next start. Raises `ConfigError`."""
    if when.cron is None:
        return f"every {when.interval} s", ""
    zone = _find_zone(when.zone)
    upcoming = when.cron.after(datetime.now(zone))
    if upcoming is None:
        raise ConfigError(f"--cron {when.cron.text!r} never matches a date")
    there = f"{upcoming:%Y-%m-%d %H:%M:%S} {when.zone}"
    utc = upcoming.astimezone(UTC)
    also = "" if when.zone == "UTC" else f" ({utc:%Y-%m-%d %H:%M:%S} UTC)"
    unless = "the instance uses UTC, unless CRON_SCHEDULE_TIMEZONE is set there"
    if when.zone != "UTC":
        unless = f"the instance must set CRON_SCHEDULE_TIMEZONE={when.zone}"
    text = f"cron {when.cron.text!r}, next at {there}{also}; {unless}"
    return text, f"{utc:%Y-%m-%dT%H:%M:%SZ}"
