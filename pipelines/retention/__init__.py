"""Retention: finds old, unreferenced data below a storage root and removes it.

This module decides what to remove: a pure function of the inventory, its references and the current
time. Items that are always kept are called roots: the newest versions of each model, the champion
and the versions that a rollback or the gate needs, recent or active runs, and recently used items.
Any other item is kept only if a root needs it, directly or indirectly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from flotilla.trainer.runtime.errors import ConfigError

RUN, VERSION, CHECKPOINT, SWEEP = "run", "version", "checkpoint", "sweep"
#: A record outside a run. It keeps the items that it names, and is never removed.
NOTE = "note"
#: The kind of the items in each shared folder below the root.
SHARED = {"datasets": "dataset", "listings": "listing", "code": "code"}
#: The order of removal, in which an item comes before the items that it refers to.
ORDER = (VERSION, SWEEP, RUN, CHECKPOINT, *SHARED.values())
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
# Minimum age at which a run may be removed. A step may write nothing for hours, and clocks differ.
LEAST = timedelta(days=1)
_MOST = timedelta(days=36500)
_DURATION = re.compile(r"(\d{1,9})([hdw])", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The age up to which runs and their data are kept, and the number of versions to keep.

    A field that is None keeps everything.
    """

    runs: timedelta | None = None
    versions: int | None = None


def policy(keep_runs: str, keep_versions: int | None) -> Policy:
    """Create a policy from command-line options. Raises `ConfigError`."""
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"--keep-versions {keep_versions}: keep at least 1 version of a model")
    if not keep_runs:
        return Policy(versions=keep_versions)
    found = _DURATION.fullmatch(keep_runs.strip())
    if not found:
        raise ConfigError(f"--keep-runs {keep_runs!r} is not a duration, such as 30d, 12w or 48h")
    time = min(int(found[1]) * _UNITS[found[2]], _MOST) if int(found[1]) < 10**7 else _MOST
    if time < LEAST:
        raise ConfigError(
            f"--keep-runs {keep_runs!r}: keep runs for at least 1d, because a run may still be "
            "active"
        )
    return Policy(runs=time, versions=keep_versions)


@dataclass(frozen=True, kw_only=True)
class Item:
    """An item below a root, which is removed or kept as a whole.

    Attributes:
        path: path below the root, such as `datasets/digits-1` or `RUN/checkpoints/step-00000100`.
        kind: `run`, `version`, `dataset` and so on; for outputs of a run, the manifest's kind.
        last: when the item was last published, used or active, or None if unknown.
        refs: paths of the items that it refers to.
        busy: whether the item's run is or may be active.
        damaged: why its manifest or a record is unreadable, or empty. A damaged item is kept.
    """

    path: str
    kind: str
    bytes: int = 0
    last: datetime | None = None
    refs: frozenset[str] = frozenset()
    busy: bool = False
    damaged: str = ""


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """A promotion of a model version, as recorded in the registry."""

    number: int
    version: int
    restores: int = 0


@dataclass(frozen=True, kw_only=True)
class Model:
    """A registered model.

    Attributes:
        versions: path of each version, by its number.
        promotions: oldest first.
        claimed: versions whose promotion is requested or decided, but not yet published.
        references: for each version without a proven gain, the champion it was compared with.
        damaged: errors of unreadable records. If there are any, all versions are kept.
    """

    name: str
    versions: Mapping[int, str]
    promotions: tuple[Promotion, ...] = ()
    claimed: frozenset[int] = frozenset()
    references: Mapping[int, int] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The items below a root, keyed by path, and its registered models."""

    items: Mapping[str, Item]
    models: tuple[Model, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The items to remove, in order, and remarks about old items that are kept."""

    going: tuple[Item, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The total size of the items."""
        return sum(each.bytes for each in self.going)


def make_plan(found: Inventory, wanted: Policy, now: datetime) -> Plan:
    """Plan which items to remove under a policy."""
    items, remarks = found.items, []
    kept = {path for model in found.models for path in find_kept_versions(model, wanted.versions)}
    # Keep the versions with which the gates of active runs compare their models.
    kept |= {path for item in items.values() if item.busy for path in item.refs}
    unsure = [each for model in found.models for each in model.damaged]
    # A damaged shared item can need only other shared items, but a damaged run can need any item.
    apart = (NOTE, *SHARED.values())
    unsure += [item.damaged for item in items.values() if item.damaged and item.kind not in apart]
    remarks += [f"kept: {each.damaged}" for each in items.values() if each.damaged]
    remarks += [f"kept: {each}" for model in found.models for each in model.damaged]
    going = [
        item for item in items.values()
        if item.kind == VERSION and item.path not in kept and not item.damaged
    ]  # fmt: skip
    if wanted.runs is None:
        return Plan(going=_order(going), remarks=tuple(remarks))
    if unsure:
        remarks.append(
            f"no run, dataset or checkpoint is removed, because {len(unsure)} damaged records may "
            "need any of them; restore these records, or delete the versions or runs they belong to"
        )
        return Plan(going=_order(going), remarks=tuple(remarks))
    leaving = {each.path for each in going}
    is_unclear = any(item.damaged for item in items.values() if item.kind in SHARED.values())
    since = now - wanted.runs
    roots = [
        item for item in items.values()
        if item.path not in leaving
        and (
            item.kind == VERSION
            or (is_unclear and item.kind in SHARED.values())
            or _stays(item, items, since)
        )
    ]  # fmt: skip
    needed = find_reachable(items, roots)
    remarks += [
        f"kept {item.path}, because the time of the run is unknown" for item in items.values()
        if item.kind == RUN and item.last is None
    ]  # fmt: skip
    runs = {find_run(path) for path in needed}
    going += [item for item in items.values() if item.path not in needed and _goes(item, runs)]
    return Plan(going=_order(going), remarks=tuple(remarks))


def _order(going: list[Item]) -> tuple[Item, ...]:
    return tuple(sorted(going, key=lambda item: (ORDER.index(item.kind), item.path)))


def find_kept_versions(model: Model, count: int | None) -> Iterator[str]:
    """Yield the paths of the versions to keep, among them the newest `count` (None: all)."""
    numbers = sorted(model.versions)
    wanted = numbers if count is None or model.damaged else numbers[-count:]
    left, seen = [*wanted, *_find_fallbacks(model)], set[int]()
    while left:
        number = left.pop()
        if number in seen:
            continue
        seen.add(number)
        left.append(model.references.get(number, 0))
        if number in model.versions:
            yield model.versions[number]


def _find_fallbacks(model: Model) -> Iterator[int]:
    """Yield the champion, and versions that a promotion, a rollback or the gate may need."""
    yield from model.claimed
    made = {each.number: each for each in model.promotions}
    if not made:
        return
    newest = made[max(made)]
    yield newest.version
    # Keep the version that a rollback would restore.
    before = [number for number in made if number < (newest.restores or newest.number)]
    if before:
        yield made[max(before)].version
    # Keep the previous champion, which the gate needs if the run of the champion is resumed.
    others = [number for number, each in made.items() if each.version != newest.version]
    if others:
        yield made[max(others)].version


def find_run(path: str) -> str:
    """Return the run that contains an item, or the item itself if it is a run."""
    return path.partition("/")[0]


def _stays(item: Item, items: Mapping[str, Item], since: datetime) -> bool:
    """Return whether to keep an item (not a version) even if nothing refers to it."""
    if item.kind == NOTE:
        return True
    if item.kind in (RUN, SWEEP, *SHARED.values()):
        return item.busy or bool(item.damaged) or item.last is None or item.last >= since
    # The outputs of a run are kept as long as the run.
    run = items.get(find_run(item.path))
    return bool(item.damaged) or (run is not None and _stays(run, items, since))


def find_reachable(
    items: Mapping[str, Item], roots: list[Item], known: AbstractSet[str] = frozenset()
) -> set[str]:
    """Return the paths of `roots` and of all items that they need, except those in `known`."""
    left, seen = list(roots), {each.path for each in roots}
    while left:
        origin = left.pop()
        for path in origin.refs - seen - known:
            target = items.get(path)
            if target and _needs(origin, target):
                seen.add(path)
                left.append(target)
    return seen


def _needs(origin: Item, target: Item) -> bool:
    """Return whether a kept item needs an item that it refers to.

    A version is never needed here, because the versions to keep are chosen separately. A checkpoint
    contains all values, so it does not need the checkpoint that its training started from. This
    lets retention remove the older checkpoints in a chain of warm starts.
    """
    return target.kind != VERSION and not origin.kind == target.kind == CHECKPOINT


def _goes(item: Item, runs: set[str]) -> bool:
    """Return whether to remove an unneeded item. `runs` are the runs with a needed item."""
    if item.kind == RUN:
        return item.path not in runs
    if item.kind == CHECKPOINT:
        # If the whole run is removed, the checkpoint goes with it. Other outputs of a run are small
        # and are kept as long as the run.
        return find_run(item.path) in runs
    return item.kind in (SWEEP, *SHARED.values())
