"""Generated clicks of a large service by day, with 10 million users and 1 million items.

Nothing is stored. Events are computed from the seed, day, split and part, and the properties of a
user or an item from a hash of its id. `Clickstream.chances` computes the true probability of a
click.

    ids        sparse integers below 2^52, as in a real service, instead of consecutive numbers
    items      are shown with frequencies that follow Zipf's law. Each day, a share `drift` of the
               popularity moves to other items, and `new_items` replace as many old items
    users      differ in activity: a few are often active, most of them rarely (Zipf's law with a
               flat head). Each day, `new_users` are new, and tastes turn by `drift` of a right
               angle
    clicks     are more likely if the tastes of user and item agree; items also differ in quality
    segment    of a user, and `category` of an item, are also known for a new id. Users of a
               segment share a part of their tastes (`explained`), and so do items of a category.
               The rest depends on the id alone
    shown      how often the item was shown on the day before; 0 for a new item

Each day is a version: 1.1.17 is day 17. The newest day is `day` or, if the date of day 0 is given
as `since`, today. A run without `data.version` uses the newest day.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow_datasets as tfds

LAST_DAY = 9999
#: Number of events drawn at once, and number of consecutive events of one user.
PART = 1 << 16
VISIT = 8
RANK = 2
# Weights and constant of the score. The probability of a click is the sigmoid of the score.
AFFINITY, QUALITY, BASE = 3.0, 0.7, -3.0
# Exponent of the users' activity, and number of users about as active as the most active one.
_ACTIVITY, _FLAT = 1.2, 30.0
_MOST = 10**9
# A prime above `_MOST`, so that no two ranks of users share a slot.
_STRIDE = 2654435761
_STEEPEST = 2.0
_SPLITS = ("train", "test")
# Increase this number if a change of the code changes the events of a day.
_RELEASE = "1.1."
_BITS, _HALF = 52, 26
_MASK = np.uint64((1 << _BITS) - 1)
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
# Salts of the hash, one for each generated quantity.
_USERS, _ITEMS, _TASTE, _TURNED, _QUALITY, _IMPRESSIONS = range(1, 7)
_SEGMENT, _CATEGORY, _OF_SEGMENT, _TURNED_SEGMENT, _OF_CATEGORY = range(20, 25)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Law:
    """Zipf's law over the ranks 0 to `count - 1`: `1 / (rank + 1 + flat) ** exponent`.

    Ranks are intervals of a continuous distribution, so that no sums must be computed or stored.
    """

    count: int
    exponent: float
    flat: float = 0.0

    def ranks(self, uniform: Floats) -> Ints:
        """Return the ranks for uniform numbers in [0, 1)."""
        low, high = 1.0 + self.flat, self.count + 1.0 + self.flat
        power = 1.0 - self.exponent
        if abs(power) < 1e-9:  # noqa: PLR2004
            places = low * (high / low) ** uniform
        else:
            places = (low**power + uniform * (high**power - low**power)) ** (1 / power)
        return np.clip(np.floor(places - low), 0, self.count - 1).astype(np.int64)

    def shares(self, ranks: Ints) -> Floats:
        """Return the probability of each rank."""
        low, high = 1.0 + self.flat, self.count + 1.0 + self.flat
        at = ranks + low
        power = 1.0 - self.exponent
        if abs(power) < 1e-9:  # noqa: PLR2004
            found: Floats = np.log1p(1 / at) / math.log(high / low)
        else:
            found = ((at + 1) ** power - at**power) / (high**power - low**power)
        return found


@dataclass(frozen=True, kw_only=True)
class Clickstream:
    """The true distribution of a service: users and items of a day, impressions and clicks.

    Attributes:
        users: number of users on a day.
        items: number of items on a day.
        events: number of events per day, from which `shown` is computed.
        zipf: exponent of the items' popularity; with 0, all items are equally popular.
        drift: share of popularity and of tastes that changes per day.
        new_users: number of users that are replaced each day.
        new_items: number of items that are replaced each day.
        segments: number of segments of users.
        categories: number of categories of items.
        explained: share of the tastes that the segment of a user or the category of an item
            determines; with 0, they depend on the id alone.
        seed: seed of all random numbers.
    """

    users: int = 10_000_000
    items: int = 1_000_000
    events: int = 1_000_000
    zipf: float = 1.0
    drift: float = 0.02
    new_users: int = 50_000
    new_items: int = 5_000
    segments: int = 64
    categories: int = 256
    explained: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject values that are out of range."""
        for name in ("users", "items", "events", "segments", "categories"):
            whole(name, getattr(self, name), 1, _MOST)
        whole("new_users", self.new_users, 0, self.users)
        whole("new_items", self.new_items, 0, self.items)
        whole("seed", self.seed, 0, 2**31 - 1)
        for name, most in (("zipf", _STEEPEST), ("drift", 1.0), ("explained", 1.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= most:
                refuse(name, value, f"a number from 0 to {most:g}")

    def draw(self, day: int, split: int, part: int) -> dict[str, Ints]:
        """Return the features and labels of `PART` events."""
        # NumPy guarantees the same numbers in every version only for this generator.
        random = np.random.RandomState([self.seed, day, split, part])
        visits = self._user_law.ranks(random.random_sample(PART // VISIT))
        # Without the stride, the first new users would all replace the most active ones.
        users = np.repeat(self._ids(visits * _STRIDE % self.users, _USERS, day), VISIT)
        ranks = self._item_law.ranks(random.random_sample(PART))
        fashion, share = self._fashion(day)
        later = random.random_sample(PART) < share
        slots = np.where(later, *(self._slots(ranks, each) for each in (fashion + 1, fashion)))
        items = self._ids(slots, _ITEMS, day)
        clicks = random.random_sample(PART) < self.chances(users, items, day)
        return {
            "user": users,
            "segment": self.segment(users),
            "item": items,
            "category": self.category(items),
            "shown": self.impressions(items, day),
            "label": clicks.astype(np.int64),
        }

    def chances(self, users: Ints, items: Ints, day: int) -> Floats:
        """Return the probability of a click on a day for each pair of user and item."""
        known, where = np.unique(users, return_inverse=True)
        wanted = self.tastes(known, day)[where] * self.features(items)
        score = BASE + AFFINITY * wanted.sum(axis=1) / math.sqrt(RANK) + self.quality(items)
        found: Floats = 1 / (1 + np.exp(-score))
        return found

    def tastes(self, users: Ints, day: int) -> Floats:
        """Return the tastes of users on a day [n, RANK]."""
        angle = self.drift * day * math.pi / 2
        groups = self.segment(users)
        first = self._explained(users, _TASTE, groups, _OF_SEGMENT)
        second = self._explained(users, _TURNED, groups, _TURNED_SEGMENT)
        found: Floats = math.cos(angle) * first + math.sin(angle) * second
        return found

    def features(self, items: Ints) -> Floats:
        """Return the properties of items that tastes are compared with [n, RANK]."""
        return self._explained(items, _ITEMS, self.category(items), _OF_CATEGORY)

    def segment(self, users: Ints) -> Ints:
        """Return the segment of users [n], starting at 0."""
        return self._group(users, _SEGMENT, self.segments)

    def category(self, items: Ints) -> Ints:
        """Return the category of items [n], starting at 0."""
        return self._group(items, _CATEGORY, self.categories)

    def quality(self, items: Ints) -> Floats:
        """Return the quality of items [n], in units of the score."""
        return QUALITY * self._normals(items, 2, _QUALITY)[:, 0]

    def exposure(self, items: Ints, day: int) -> Floats:
        """Return the share of a day's events that show each item; 0 if the item is not offered."""
        serials = self._serials(items, _ITEMS)
        first = day * self.new_items
        slots = serials % self.items
        fashion, share = self._fashion(day)
        now, later = (
            self._item_law.shares(self._ranks(slots, each)) for each in (fashion, fashion + 1)
        )
        there = (serials >= first) & (serials < first + self.items)
        return np.where(there, (1 - share) * now + share * later, 0.0)

    def impressions(self, items: Ints, day: int) -> Ints:
        """Return how often items were shown on the day before, as integers."""
        expected = self.events * self.exposure(items, day - 1)
        salt = np.uint64(_hashed(self.seed, _IMPRESSIONS, day))
        # Round at random in proportion to the fraction, which preserves the mean.
        return np.floor(expected + _uniform(_mixed(items.astype(np.uint64) ^ salt))).astype(
            np.int64
        )

    def first_item(self, items: Ints) -> Ints:
        """Return the day on which each item was new; 0 for items that exist from the start."""
        return np.maximum(0, self._serials(items, _ITEMS) - self.items + self.new_items) // max(
            1, self.new_items
        )

    @property
    def _user_law(self) -> Law:
        return Law(count=self.users, exponent=_ACTIVITY, flat=_FLAT)

    @property
    def _item_law(self) -> Law:
        return Law(count=self.items, exponent=self.zipf)

    def _fashion(self, day: int) -> tuple[int, float]:
        """Return the current ranking, and the share of events that already follow the next one."""
        at = math.floor(day * self.drift)
        return at, day * self.drift - at

    def _order(self, fashion: int) -> tuple[int, int]:
        """Return the factor and the shift of a ranking: `slot = factor * rank + shift`."""
        factor = _hashed(self.seed, 10, fashion) % self.items
        while math.gcd(factor, self.items) != 1:
            factor = (factor + 1) % self.items if self.items > 1 else 1
        return factor, _hashed(self.seed, 11, fashion) % self.items

    def _slots(self, ranks: Ints, fashion: int) -> Ints:
        factor, shift = self._order(fashion)
        found: Ints = (ranks * factor + shift) % self.items
        return found

    def _ranks(self, slots: Ints, fashion: int) -> Ints:
        factor, shift = self._order(fashion)
        inverse = pow(factor, -1, self.items)
        found: Ints = ((slots - shift) % self.items * inverse) % self.items
        return found

    def _ids(self, slots: Ints, kind: int, day: int) -> Ints:
        """Return the ids in slots on a day; an id changes when its user or item is replaced."""
        count, new = (
            (self.users, self.new_users) if kind == _USERS else (self.items, self.new_items)
        )
        first = day * new
        found = (first + (slots - first) % count).astype(np.uint64)
        found = (found * np.uint64(_FACTORS[0]) + self._key(kind)) & _MASK
        found ^= found >> np.uint64(_HALF)
        found = (found * np.uint64(_FACTORS[1])) & _MASK
        found ^= found >> np.uint64(_HALF)
        return found.astype(np.int64)

    def _serials(self, ids: Ints, kind: int) -> Ints:
        """Return the serial numbers of ids: the inverse of `_ids`."""
        first, second = (np.uint64(pow(each, -1, 1 << _BITS)) for each in _FACTORS)
        found = ids.astype(np.uint64)
        found ^= found >> np.uint64(_HALF)
        found = (found * second) & _MASK
        found ^= found >> np.uint64(_HALF)
        serials: Hashes = ((found - self._key(kind)) * first) & _MASK
        return serials.astype(np.int64)

    def _key(self, kind: int) -> np.uint64:
        return np.uint64(_hashed(self.seed, 12, kind) & int(_MASK))

    def _group(self, ids: Ints, kind: int, count: int) -> Ints:
        salt = np.uint64(_hashed(self.seed, kind))
        return (_mixed(ids.astype(np.uint64) ^ salt) % np.uint64(count)).astype(np.int64)

    def _explained(self, ids: Ints, kind: int, groups: Ints, of_group: int) -> Floats:
        """Return normal numbers [n, RANK], of which the group determines the share `explained`."""
        alike, own = self._normals(groups, RANK, of_group), self._normals(ids, RANK, kind)
        found: Floats = math.sqrt(self.explained) * alike + math.sqrt(1 - self.explained) * own
        return found

    def _normals(self, ids: Ints, count: int, kind: int) -> Floats:
        """Return normal numbers for ids [n, count]; `count` is even (Box and Muller 1958)."""
        found = np.empty((len(ids), count))
        for place in range(0, count, 2):
            salts = (np.uint64(_hashed(self.seed, kind, place + each)) for each in (0, 1))
            one, two = (_uniform(_mixed(ids.astype(np.uint64) ^ salt)) for salt in salts)
            radius = np.sqrt(-2 * np.log1p(-one))
            found[:, place] = radius * np.cos(2 * math.pi * two)
            found[:, place + 1] = radius * np.sin(2 * math.pi * two)
        return found


def _mixed(values: Hashes) -> Hashes:
    """Return hashes of integers (splitmix64: Steele, Lea and Flood 2014)."""
    found = values + np.uint64(_FACTORS[0])
    found = (found ^ (found >> np.uint64(30))) * np.uint64(_FACTORS[1])
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


def _uniform(hashes: Hashes) -> Floats:
    return (hashes >> np.uint64(11)).astype(np.float64) / 2**53


def _hashed(*values: int) -> int:
    found = np.zeros(1, np.uint64)
    for value in values:
        found = _mixed(found ^ np.uint64(value % 2**64))
    return int(found[0])


def refuse(name: str, value: Any, wanted: str) -> None:
    """Raise `ValueError` for an invalid argument of the builder."""
    raise ValueError(f"{name}: {value!r} is not allowed; it must be {wanted}")


def whole(name: str, value: Any, least: int, most: int) -> None:
    """Raise `ValueError` unless an argument is an integer in a range."""
    if type(value) is not int or not least <= value <= most:
        refuse(name, value, f"a whole number from {least} to {most}")


class ClicksLarge(tfds.core.GeneratorBasedBuilder):
    """Generated clicks of one day, or of several days."""

    VERSION = tfds.core.Version(f"{_RELEASE}0")

    def __init__(  # noqa: PLR0913
        self,
        *,
        day: int = 0,
        days: int = 1,
        since: str = "",
        events: int = 1_000_000,
        test_events: int = 100_000,
        data_dir: Any = None,
        version: str | None = None,
        **truth: Any,
    ) -> None:
        """Select the days and the number of events.

        Args:
            day: the newest day.
            days: number of days for training; test events are from the newest day.
            since: date of day 0, such as 2026-11-23; the newest day is then today.
            events: training events per day.
            test_events: test events of the newest day.
            data_dir: the data folder of TFDS.
            version: 1.1.DAY, to set `day`.
            **truth: arguments of `Clickstream`.
        """
        known = {each.name for each in fields(Clickstream)}
        if unknown := [name for name in truth if name not in known]:
            raise TypeError(f"{unknown[0]!r} is not an argument ({', '.join(sorted(known))})")
        self.day = _day(version, since, day)
        whole("days", days, 1, self.day + 1)
        whole("test_events", test_events, 1, _MOST)
        self.days = days
        self.clickstream = Clickstream(events=events, **truth)
        #: Examples per split. Because of this attribute, Flotilla reads the data with `columns`,
        #: and TFDS writes nothing.
        self.sizes: Mapping[str, int] = {"train": events * days, "test": test_events}
        self.VERSION = tfds.core.Version(f"{_RELEASE}{self.day}")
        super().__init__(data_dir=data_dir, version=version)

    def columns(self, split: str, first: int, end: int) -> Iterator[dict[str, Ints]]:
        """Yield the events of a range of a split in parts, which alternate between the days."""
        number, days = _SPLITS.index(split), self.days if split == "train" else 1
        for part in range(first // PART, -(-end // PART)):
            drawn = self.clickstream.draw(self.day - part % days, number, part // days)
            kept = slice(max(first - part * PART, 0), end - part * PART)
            yield {name: values[kept] for name, values in drawn.items()}

    def _info(self) -> Any:
        number = tfds.features.Scalar(np.int64)
        label = tfds.features.ClassLabel(names=["no_click", "click"])
        inputs = ("user", "segment", "item", "category", "shown")
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(dict.fromkeys(inputs, number) | {"label": label}),
            supervised_keys=({name: name for name in inputs}, "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        return {split: self._generate_examples(split) for split in self.sizes}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, int]]]:
        number = 0
        for columns in self.columns(split, 0, self.sizes[split]):
            for values in zip(*(each.tolist() for each in columns.values()), strict=True):
                yield number, dict(zip(columns, values, strict=True))
                number += 1


def _day(version: str | None, since: str, day: int) -> int:
    if version:
        text = version.removeprefix(_RELEASE)
        if not (text.isdecimal() and text.isascii()) or text == version:
            raise ValueError(f"version {version!r} names no day; write {_RELEASE}17 for day 17")
        if int(text) > LAST_DAY:
            raise ValueError(f"version {version} is beyond the last day, {LAST_DAY}")
        return int(text)
    whole("day", day, 0, LAST_DAY)
    if not since:
        return day
    try:
        begin = date.fromisoformat(since)
    except (TypeError, ValueError):
        raise ValueError(f"since: {since!r} is not a date; write it as 2026-11-23") from None
    passed = (datetime.now(UTC).date() - begin).days
    if not 0 <= passed <= LAST_DAY:
        refuse("since", since, f"a date from {LAST_DAY} days ago to today")
    return passed
