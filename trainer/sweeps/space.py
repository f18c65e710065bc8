"""The search space of a sweep, and its trials: a grid, or random draws.

A key of `--set` with several values, `key=a,b,c`, or with a range, `key=low..high`, is searched; a
key with one value is set for all trials. Commas within brackets and quotes belong to a value. The
configuration of every trial is checked here, before the first one begins.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer.config.load import override, parse_value
from trainer.config.schema import Config
from trainer.errors import ConfigError

#: More than these nobody waits for, and no page shows.
MOST_TRIALS = 1000
# Of a draw: more digits say nothing and are not read.
_DIGITS = 4
# So often a draw is repeated until it is a new one.
_MOST_REPEATS = 100
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"^\s*({_NUMBER})\.\.({_NUMBER})(:log)?\s*$")
_OPEN, _CLOSE = "[{(", "]})"
# Trials are compared by one measure on the same examples, and promoted by one policy.
_SAME = {
    "name": "the registry compares models of one name",
    "data": "trials are compared on the same examples of validation",
    "evaluation": "only the best trial is evaluated on the test split",
    "gate": "only the best trial goes through the gate",
    "export": "only the best trial is exported",
    "registry": "only the best trial is registered",
    "storage": "trials share what is published",
}
_SEARCHED_OF_DATA = ("data.partition",)

Settings = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`; integers where both are written so, by magnitude if `log`."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def draw(self, by: random.Random) -> str:
        """Return the text of a number."""
        if self.log:
            drawn = math.exp(by.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = by.uniform(self.low, self.high)
        if self.whole:
            return str(min(max(round(drawn), int(self.low)), int(self.high)))
        short = float(f"{drawn:.{_DIGITS}g}")
        return f"{min(max(short, self.low), self.high):g}"


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched.

    Attributes:
        base: the configuration that all trials share.
        keys: the values, or the range, of each searched key.
    """

    base: Config
    keys: Mapping[str, tuple[str, ...] | Range]


def space_of(config: Config, assignments: Iterable[str]) -> Space:
    """Return the space of `section.key=value` texts, laid over a configuration.

    Raises:
        ConfigError: an assignment is none, nothing is searched, or a key cannot be searched.
    """
    fixed: list[str] = []
    keys: dict[str, tuple[str, ...] | Range] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {assignment!r}: write it as section.key=a,b,c")
        if key in keys:
            raise ConfigError(f"--set {assignment!r}: {key} is searched already; name it once")
        found = _choices(assignment, text)
        if isinstance(found, tuple) and len(found) == 1:
            fixed.append(assignment)
            continue
        _require_searchable(key, assignment)
        keys[key] = found
    _require_apart(keys, fixed)
    base = override(config, fixed)
    if not keys:
        raise ConfigError(
            "nothing is searched: give a key several values, such as "
            "--set training.optimizer.learning_rate=0.01,0.003,0.001"
        )
    return Space(base=base, keys=keys)


def grid(space: Space) -> tuple[Settings, ...]:
    """Return the settings of each trial: all combinations, those of an equal result once.

    Raises:
        ConfigError: there are too many, a key has a range, or a trial is not allowed.
    """
    lists: dict[str, tuple[str, ...]] = {}
    for key, values in space.keys.items():
        if isinstance(values, Range):
            raise ConfigError(f"--set {key}: a range needs --random N; a grid takes values: a,b,c")
        lists[key] = values
    count = math.prod(map(len, lists.values()))
    if count > MOST_TRIALS:
        raise ConfigError(
            f"the grid has {count} trials, at most {MOST_TRIALS}: name fewer values, or draw some "
            "of them by --random N"
        )
    combined = itertools.product(*lists.values())
    every = (dict(zip(lists, each, strict=True)) for each in combined)
    return _checked(space.base, every, count)


def drawn(space: Space, count: int, seed: int) -> tuple[Settings, ...]:
    """Return the settings of `count` random trials, fewer where there are no more; by `seed`.

    Raises:
        ConfigError: `count` is out of bounds, or a trial is not allowed.
    """
    if not 1 <= count <= MOST_TRIALS:
        raise ConfigError(f"--random {count}: draw from 1 to {MOST_TRIALS} trials")
    by = random.Random(seed)

    def draws() -> Iterable[Settings]:
        for _ in range(count * _MOST_REPEATS):
            yield {
                key: values.draw(by) if isinstance(values, Range) else by.choice(values)
                for key, values in space.keys.items()
            }

    _require_ends(space)
    return _checked(space.base, draws(), count)


def config_of(base: Config, settings: Settings) -> Config:
    """Return the configuration of a trial; raises `ConfigError`."""
    return override(base, assignments_of(settings))


def assignments_of(settings: Settings) -> list[str]:
    """Return the settings of a trial as `section.key=value` texts."""
    return [f"{key}={value}" for key, value in settings.items()]


def _checked(base: Config, every: Iterable[Settings], count: int) -> tuple[Settings, ...]:
    """Return the first `count` that are allowed and have a configuration of their own."""
    found: dict[str, Settings] = {}
    tried: set[tuple[str, ...]] = set()
    for settings in every:
        assignments = tuple(assignments_of(settings))
        # A check takes milliseconds, and a small space is drawn a hundred times over.
        if assignments in tried:
            continue
        tried.add(assignments)
        try:
            config = config_of(base, settings)
        except ConfigError as error:
            what = ", ".join(assignments)
            raise ConfigError(f"the trial {what}: {error}") from None
        found.setdefault(config.model_dump_json(), settings)
        if len(found) == count:
            break
    return tuple(found.values())


def _require_ends(space: Space) -> None:
    """Check both ends of each range, which few draws come near; raises `ConfigError`."""
    for key, values in space.keys.items():
        if isinstance(values, Range):
            first = {
                other: str(each.low) if isinstance(each, Range) and not each.whole
                else str(int(each.low)) if isinstance(each, Range) else each[0]
                for other, each in space.keys.items()
            }  # fmt: skip
            for end in (values.low, values.high):
                text = str(int(end)) if values.whole else f"{end!r}"
                _checked(space.base, [{**first, key: text}], 1)


def _require_searchable(key: str, assignment: str) -> None:
    section = key.partition(".")[0]
    if section in _SAME and key not in _SEARCHED_OF_DATA:
        raise ConfigError(
            f"--set {assignment!r}: {key} has to be the same for all trials: {_SAME[section]} "
            "(a list as one value is written in brackets)"
        )


def _require_apart(keys: Mapping[str, object], fixed: Sequence[str]) -> None:
    """Refuse a key that is also set as a whole or in part: what holds would depend on order."""
    names = [each.partition("=")[0].strip() for each in fixed]
    for key in keys:
        for other in (*names, *keys):
            if (other == key and names.count(key)) or other.startswith(f"{key}."):
                raise ConfigError(f"--set {key} and --set {other}: both set {other}; keep one")


def _choices(assignment: str, text: str) -> tuple[str, ...] | Range:
    values = tuple(part.strip() for part in _split(text))
    if not any(values):
        raise ConfigError(f"--set {assignment!r} names no value: write section.key=a,b,c")
    if not all(values):
        raise ConfigError(f"--set {assignment!r}: a value between its commas is empty")
    for value in values:
        parse_value(value)
    if ranged := _RANGE.match(text):
        return _range(assignment, *ranged.groups())
    if ".." in text and any(_RANGE.match(value) for value in values):
        raise ConfigError(f"--set {assignment!r}: a range stands alone; give values or a range")
    return values


def _range(assignment: str, low: str, high: str, log: str | None) -> Range:
    found = Range(
        low=float(low),
        high=float(high),
        log=bool(log),
        whole=all(re.fullmatch(r"[-+]?\d+", each) for each in (low, high)),
    )
    if not (math.isfinite(found.low) and math.isfinite(found.high) and found.low < found.high):
        raise ConfigError(f"--set {assignment!r}: a range rises from its first number to its last")
    if found.log and found.low <= 0:
        raise ConfigError(f"--set {assignment!r}: a range by magnitude (:log) begins above zero")
    return found


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and not parts[-1].strip(" [{(,:"):
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += letter
    return parts
