"""What may go: a pure function of what is there, what refers to what, and the time.

These stay for their own sake: the newest versions of each model, the champion with what a rollback
and the gate fall back on, runs that are young or going on, and what was used lately. All else stays
only where one of these names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from flotilla.trainer.runtime.errors import ConfigError

RUN, VERSION, CHECKPOINT, SWEEP = "run", "version", "checkpoint", "sweep"
#: A record that is no run's: it keeps what it names, and never goes.
NOTE = "note"
#: What lies in a folder of its own below the root, by that folder.
SHARED = {"datasets": "dataset", "listings": "listing", "code": "code"}
#: The order of removal: what refers to something goes before it.
ORDER = (VERSION, SWEEP, RUN, CHECKPOINT, *SHARED.values())
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
# A step may say nothing for hours, and clocks differ.
LEAST = timedelta(days=1)
_MOST = timedelta(days=36500)
_DURATION = re.compile(r"(\d{1,9})([hdw])", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How long runs, with what they alone use, and how many versions are kept; None: all."""

    runs: timedelta | None = None
    versions: int | None = None


def policy(keep_runs: str, keep_versions: int | None) -> Policy:
    """Return what the options of the command line say; raises `ConfigError`."""
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"--keep-versions {keep_versions}: keep at least 1 version of a model")
    if not keep_runs:
        return Policy(versions=keep_versions)
    found = _DURATION.fullmatch(keep_runs.strip())
    if not found:
        raise ConfigError(f"--keep-runs {keep_runs!r} is no time, such as 30d, 12w or 48h")
    time = min(int(found[1]) * _UNITS[found[2]], _MOST) if int(found[1]) < 10**7 else _MOST
    if time < LEAST:
        raise ConfigError(
            f"--keep-runs {keep_runs!r}: keep runs for 1d at least, since a run may still be active"
        )
    return Policy(runs=time, versions=keep_versions)


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something below a root that goes as a whole, or stays.

    Attributes:
        path: below the root, such as `datasets/digits-1` or `RUN/checkpoints/step-00000100`.
        kind: `run`, `version`, `dataset`, ...; of what a run has published the manifest's.
        last: when it was published, used, or did something last; None where nothing says so.
        busy: of a run: it goes on, or may.
        damaged: why its manifest cannot be read; it stays.
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
    """One promotion, as `flotilla.trainer.promotion.registry` has it."""

    number: int
    version: int
    restores: int = 0


@dataclass(frozen=True, kw_only=True)
class Model:
    """A registered model.

    Attributes:
        versions: path of each version by its number.
        promotions: oldest first.
        claimed: versions of promotions that are decided, or asked for, and not yet published.
        references: by version the one since which no gain was proved, where it names one.
        damaged: records that cannot be read: which versions count is not known then.
    """

    name: str
    versions: Mapping[int, str]
    promotions: tuple[Promotion, ...] = ()
    claimed: frozenset[int] = frozenset()
    references: Mapping[int, int] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What is below a root: items by their path, and the models."""

    items: Mapping[str, Item]
    models: tuple[Model, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What goes, in the order of removal, and remarks on what stays though it may be old."""

    going: tuple[Item, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Of all that goes."""
        return sum(each.bytes for each in self.going)


def make_plan(found: Inventory, wanted: Policy, now: datetime) -> Plan:
    """Return what may go by a policy."""
    items, remarks = found.items, []
    kept = {path for model in found.models for path in find_kept_versions(model, wanted.versions)}
    # Whatever a run that goes on is compared with.
    kept |= {path for item in items.values() if item.busy for path in item.refs}
    unsure = [each for model in found.models for each in model.damaged]
    # What a dataset is made from are listings and code; a run may need anything.
    apart = (NOTE, *SHARED.values())
    unsure += [item.damaged for item in items.values() if item.damaged and item.kind not in apart]
    remarks += [f"kept: {each.damaged}" for each in items.values() if each.damaged]
    remarks += [f"kept: {each}" for model in found.models for each in model.damaged]
    going = [
        item for item in items.values()
        if item.kind == VERSION and item.path not in kept and not item.damaged
    ]  # fmt: skip
    if wanted.runs is None:
        return Plan(going=_ordered(going), remarks=tuple(remarks))
    if unsure:
        remarks.append(
            f"no run, dataset or checkpoint is removed: {len(unsure)} damaged records do not "
            "show what they need; restore them, or delete their version or run"
        )
        return Plan(going=_ordered(going), remarks=tuple(remarks))
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
        f"kept: {item.path}: the time of the run is unknown" for item in items.values()
        if item.kind == RUN and item.last is None
    ]  # fmt: skip
    runs = {find_run(path) for path in needed}
    going += [item for item in items.values() if item.path not in needed and _goes(item, runs)]
    return Plan(going=_ordered(going), remarks=tuple(remarks))


def _ordered(going: list[Item]) -> tuple[Item, ...]:
    return tuple(sorted(going, key=lambda item: (ORDER.index(item.kind), item.path)))


def find_kept_versions(model: Model, count: int | None) -> Iterator[str]:
    """Yield the paths of the versions that stay for their own sake; `count` of the newest."""
    numbers = sorted(model.versions)
    wanted = numbers if count is None or model.damaged else numbers[-count:]
    left, seen = [*wanted, *_fallen_back_on(model)], set[int]()
    while left:
        number = left.pop()
        if number in seen:
            continue
        seen.add(number)
        left.append(model.references.get(number, 0))
        if number in model.versions:
            yield model.versions[number]


def _fallen_back_on(model: Model) -> Iterator[int]:
    """Yield the champion, and whichever version becomes it, or is compared with, next."""
    yield from model.claimed
    made = {each.number: each for each in model.promotions}
    if not made:
        return
    newest = made[max(made)]
    yield newest.version
    # Of a rollback.
    before = [number for number in made if number < (newest.restores or newest.number)]
    if before:
        yield made[max(before)].version
    # Of a run that made the champion, and is resumed.
    others = [number for number, each in made.items() if each.version != newest.version]
    if others:
        yield made[max(others)].version


def find_run(path: str) -> str:
    """Return the run in which something is; itself where it is a run."""
    return path.partition("/")[0]


def _stays(item: Item, items: Mapping[str, Item], since: datetime) -> bool:
    """Say whether something other than a version stays for its own sake."""
    if item.kind == NOTE:
        return True
    if item.kind in (RUN, SWEEP, *SHARED.values()):
        return item.busy or bool(item.damaged) or item.last is None or item.last >= since
    # What a run has published stays with it.
    run = items.get(find_run(item.path))
    return bool(item.damaged) or (run is not None and _stays(run, items, since))


def find_reachable(
    items: Mapping[str, Item], roots: list[Item], known: AbstractSet[str] = frozenset()
) -> set[str]:
    """Return the paths of `roots`, and of all that these need but what is `known` to be needed."""
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
    """Say whether what stays needs what it names.

    The versions that stay were chosen. A checkpoint holds all that it had of the one it began with;
    else no chain of warm starts would end.
    """
    return target.kind != VERSION and not origin.kind == target.kind == CHECKPOINT


def _goes(item: Item, runs: set[str]) -> bool:
    """Say whether what nothing needs goes by itself; `runs` are those of which something stays."""
    if item.kind == RUN:
        return item.path not in runs
    if item.kind == CHECKPOINT:
        # With its run, or without it. The small records of a run stay as long as anything does.
        return find_run(item.path) in runs
    return item.kind in (SWEEP, *SHARED.values())
